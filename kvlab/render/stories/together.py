"""What the figures of the notebooks that compare all methods show, in sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.together import equal_bytes, storing
from kvlab.render.phrases import by_side, grouped, listed, number, sentence, stated

NO_RIVALS = ["full", equal_bytes.ORACLE]
NOUNS = {"stored": "stored", "read": "read at a step"}


def pareto(measured: pd.DataFrame, side: str) -> list[str]:
    """Which policies no other beats at some budget."""
    points = equal_bytes.points(measured, side, "output_error")
    on, every = points.query("front")["policy"], points.query("policy != 'full'")["policy"].nunique()
    counts = on.value_counts()
    return [
        f"By bytes {NOUNS[side]} {len(counts)} of {every} policies stand on the front of output error at some budget: "
        f"{listed([str(name) for name in counts.index])}.",
        "The papers compare at equal budgets, which stand for different bytes, and draw no such front.",
        "A point on the front is a mean over documents; whether neighbours differ beyond chance is asked below, at "
        "equal bytes.",
    ]


def at_equal_bytes(
    summaries: Mapping[str, pd.DataFrame], shares: Mapping[str, float], measure: str = "output_error"
) -> list[str]:
    """Who is best at equal bytes, and who cannot be told from it.

    Args:
        summaries: of `equal_bytes.summary`, for "stored" and "read".
        shares: of the full cache's bytes, likewise.
    """
    told = [_at_side(summary, side, shares[side], measure) for side, summary in summaries.items()]
    asked = "whether attention mass lost ranks them alike" if measure == "output_error" else "who finds needles"
    return [*told, "The papers compare at equal budgets, which stand for different bytes.", f"Next: {asked}."]


def _at_side(summary: pd.DataFrame, side: str, share: float, measure: str) -> str:
    known = summary.dropna(subset=measure).query("policy not in @NO_RIVALS").sort_values(measure)
    if known.empty:
        return f"At {share:.1%} of the bytes {NOUNS[side]} no policy was measured."
    best, worst = known.iloc[0], known.iloc[-1]
    near = known[known[f"{measure}_low"] <= best[f"{measure}_high"]]["policy"].tolist()[1:]
    shown = [*near[:4], *([f"{len(near) - 4} more"] if len(near) > 4 else [])]
    overlap = f"; the intervals of {listed([str(one) for one in shown])} overlap with it" if near else ""
    missing = len(summary) - len(summary.dropna(subset=measure))
    absent = f"; {missing} policies cannot be made as small, or were not measured" if missing else ""
    return (
        f"At {share:.1%} of the full cache's bytes {NOUNS[side]}, {best['policy']} has the smallest "
        f"{measure.replace('_', ' ')}, {best[measure]:.3f} ({best[f'{measure}_low']:.3f} to "
        f"{best[f'{measure}_high']:.3f}), and {worst['policy']} the largest, {worst[measure]:.3f}{overlap}{absent}."
    )


def needles(hidden: Findings) -> list[str]:
    """Who finds needles wherever they stand."""
    rows = hidden.frame(equal_bytes.NEEDLE).sort_values("value", ascending=False, kind="stable")
    full = rows.query("policy == 'full'")["value"]
    others = rows.query("policy != 'full'")
    top = others[others["value"] >= others["value"].max()]["policy"].tolist()
    last = others.iloc[-1]
    rocketkv, dapq = (
        100 * stated(claim) for claim in ("rocketkv.figure4.task_needle_near_full", "dapq.abstract.task_needle")
    )
    whole = f"; the full cache finds {full.iloc[0]:.0%}" if len(full) else ""
    return [
        f"Most of the needles' digits are found with {listed([str(name) for name in top])} "
        f"({others['value'].max():.0%}), fewest with {last['policy']} ({last['value']:.0%}){whole}.",
        "One text and a handful of places: this ranks no neighbours, and chance alone finds a tenth.",
        f"With 256 tokens of longer prompts RocketKV prints {rocketkv:.0f} % and DapQ {dapq:.1f} %; more needles are "
        "asked for in tasks_at_small_budgets.",
    ]


def evict_or_quantise(measured: pd.DataFrame) -> list[str]:
    """Which systems no other beats by the bytes that they store."""
    sentences = []
    for name, label in (("kl", "KL of the next token"), ("output_error", "output error")):
        points = storing.points(measured, name).query("front")
        systems = dict.fromkeys(f"{row['policy']} in {row['storage']}" for row in points.to_dict("records"))
        whole = sum(system.startswith("full ") for system in systems)
        sentences.append(
            f"By {label} the front holds {len(systems)} pairs of a policy and a storage, {whole} of them the full "
            f"cache in fewer bits: {listed(list(systems)[:5])}{' and others' if len(systems) > 5 else ''}."
        )
    return [
        *sentences,
        "The papers draw no such front; whether neighbours on it differ beyond chance is asked below.",
    ]


def differences(findings: Findings, measure: str = "kl") -> list[str]:
    """Whether evicting, rounding or both lose less at equal bytes.

    Args:
        findings: of `storing.findings`.
        measure: a key of `storing.MEASURES`.
    """
    evict = grouped(
        [
            (row, f"{row.keys['storage']} ({row.keys['policy']}, {number(row)})")
            for row in _least(findings.of(storing.EVICT, measure=measure), "storage")
        ],
        above="evicting loses more than rounding to",
        below="evicting loses less than rounding to",
        undecided="evicting is not told apart from rounding to",
    )
    rounded = [row for row in findings.of(storing.BOTH, measure=measure) if row.keys["storage"] != row.keys["other"]]
    both = grouped(
        [
            (row, f"{row.keys['storage']} ({row.keys['policy']} in {row.keys['other']}, {number(row)})")
            for row in _least(rounded, "storage", "other")
        ],
        above="both lose more than rounding alone to",
        below="both lose less than rounding alone to",
        undecided="both are not told apart from rounding alone to",
    )
    alone = []
    for share in dict.fromkeys(row.keys["share"] for row in findings.of(storing.BOTH_OR_EVICT, measure=measure)):
        sides = by_side(findings.of(storing.BOTH_OR_EVICT, measure=measure, share=share))
        alone.append(f"{len(sides['above'])} gain and {len(sides['below'])} lose at {share:.0%} of the full cache")
    asked = {
        "kl": "the same by the error of the attention output and by needles",
        "output_error": "the same by needles",
        "needles_lost": "what a cache costs that must serve several questions, in shared_context",
    }
    return [
        f"By {storing.MEASURES[measure]}, at the same bytes and with the best policy there, {evict}." if evict else "",
        sentence([both]),
        f"Of the evictors that keep more entries, rounded, for fewer as they are, {listed(alone)}." if alone else "",
        f"None of the papers' tables at hand has a rounded cache; next, {asked[measure]}.",
    ]


def _least(rows: Sequence[Row], *keys: str) -> list[Row]:
    """The smallest of the rows with the same keys, which is chosen on the documents that it is told of."""
    best: dict[tuple[object, ...], Row] = {}
    for row in rows:
        at = tuple(row.keys[key] for key in keys)
        best[at] = min(best.get(at, row), row, key=lambda one: one.value)
    return list(best.values())
