"""What ZSMerge's figures show here, in sentences that follow from their numbers."""

from __future__ import annotations

from typing import Any

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.zsmerge import decoding, merging, printed, sensitivity, theorem
from kvlab.render.phrases import by_side, grouped, listed, number, percent, sentence, side, stated

MATTERS = "matters more than merging itself"


def figure_4(findings: Findings) -> list[str]:
    """Under figure 4; findings: of `merging.figure_4`."""
    rows = [row for row in findings.rows if row.effect == merging.REDUCTION]
    clear = len(by_side(rows)["above"])
    paper: Any = papers.figure("zsmerge", "figure4").set_index("ratio")["reduction"]
    beside = [(row, float(str(row.keys["ratio"]))) for row in rows if row.keys["ratio"] in (0.05, 0.2, 0.5)]
    told = [f"{percent(row)} at {100 * ratio:.0f} % of the cache ({100 * paper[ratio]:.1f} %)" for row, ratio in beside]
    inside = sum(side(row, "above", "below", "inside", at=paper[ratio]) == "inside" for row, ratio in beside)
    removes = (
        f", and removes {listed(told)} of eviction's error, in brackets figure 4's; {inside} of these {len(told)} lie "
        "inside our intervals"
        if told
        else ""
    )
    grows = findings.found(merging.GROWTH, first=0.05, last=0.50)
    readings = "; ".join(part for part in (_definitions(findings), _similarity(findings)) if part)
    return [
        f"Merging is clearly ahead of eviction at {clear} of {len(rows)} ratios, of which figure 4 has it ahead at all"
        f"{removes}.",
        ""
        if grows is None
        else "From 5 to 50 % of the cache the share "
        + side(
            grows,
            above="grows, as the paper's own numbers do and its caption denies.",
            below="falls, as the caption says and the paper's own numbers do not.",
            undecided="neither clearly grows nor falls, where the paper's numbers grow and its caption says they fall.",
        ),
        f"At 20 % of the cache {readings}." if readings else "",
        "Next: in which layers it gains, and whether that lasts where a response is long enough that tokens are merged "
        "one by one.",
    ]


def _definitions(findings: Findings) -> str:
    """Whether another reading of "relative error" would explain the difference from the paper."""
    at = 0.2
    effects = {"heads": merging.REDUCTION, "squares": merging.REDUCTION_SQUARED, "layers": merging.REDUCTION_LAYER}
    rows = {name: findings.found(effect, ratio=at) for name, effect in effects.items()}
    if any(row is None for row in rows.values()):
        return ""
    paper = float(papers.figure("zsmerge", "figure4").set_index("ratio").loc[at, "reduction"])
    nearest = min(rows, key=lambda name: abs(rows[name].value - paper))  # type: ignore[union-attr]
    told = {"heads": "head by head", "squares": "squared", "layers": "over whole layers"}
    shown = listed([f"{percent(row)} {told[name]}" for name, row in rows.items() if row is not None])
    explains = abs(rows[nearest].value - paper) < 0.1 * paper  # type: ignore[union-attr]
    so = "within a tenth of it" if explains else "so that the definition does not explain the difference"
    return f"the reduction is {shown}; the one {told[nearest]} is nearest to the paper's, {so}"


def _similarity(findings: Findings) -> str:
    row = findings.found(merging.SAVED_BY_CHOICE, choice="similarity", ratio=0.2)
    if row is None:
        return ""
    reduced = findings.row(merging.REDUCTION_OF_CHOICE, choice="similarity", ratio=0.2)
    verdict = side(
        row,
        above="serves clearly better than the authors' contiguous runs",
        below="serves clearly worse than the authors' contiguous runs",
        undecided="is not told apart from the authors' contiguous runs",
    )
    return f"filling the slots by similarity, as the algorithm says, {verdict} ({percent(reduced)} removed)"


def by_layer(findings: Findings) -> list[str]:
    """Under the map of layers; findings: of `merging.figure_4`."""
    gains: Any = merging.reduction_by_layer(findings)
    worse = gains.lt(0).mean()
    tightest = gains.columns.min()
    best = gains.mean(axis="columns")
    return [
        f"Averaged over ratios merging gains most in layer {best.idxmax()} ({100 * best.max():.0f} % of "
        f"eviction's error) and "
        f"least in layer {best.idxmin()} ({100 * best.min():.0f} %).",
        f"At {100 * tightest:.0f} % of the cache it is worse than eviction in "
        f"{100 * worse[tightest]:.0f} % of the layers, over all "
        f"ratios in {100 * worse.mean():.0f} %.",
        "The paper draws no layers; whether these are layers of broad attention is the next question.",
    ]


def while_decoding(findings: Findings, theorem_1: Findings) -> list[str]:
    """Under the long responses; findings: of `decoding.merging_while_decoding`, theorem_1: of `theorem.theorem_1`."""
    merge = findings.row(decoding.REDUCTION, definition="error", variant="merge")
    ahead = side(merge, above="it is clearly ahead", below="it is clearly behind", undecided="no clear difference")
    last = findings.found(decoding.REDUCTION_OF_PART, part=decoding.PARTS)
    still = last and side(
        last,
        above="it is still clearly ahead, as section 3.4 says",
        below="it is clearly behind, where section 3.4 has it still ahead",
        undecided="it is not told apart from eviction, where section 3.4 has it still ahead",
    )
    told = {"displaces": "the newcomer displacing another", "plain": "scores by eq. 2", "alpha0": "no bias"}
    rows = [(findings.row(decoding.AHEAD, choice=choice), words) for choice, words in told.items()]
    error = grouped(
        [(row, f"{words} ({number(row, 2)} saved)") for row, words in rows],
        above="clearly lower with",
        below="clearly higher with",
        undecided="not clearly other with",
    )
    sentences = [
        f"Along a response that outgrows the cache merging one by one removes {percent(merge)} of eviction's error: "
        f"{ahead}" + (f"; in the last quarter {still} ({percent(last)})." if last else "."),
        f"The error is {error}; section 3.5 has the bias as what makes the difference.",
    ]
    fullest = theorem_1.found(theorem.FULLEST, moment=theorem.WHILE_DECODING)
    if fullest is not None:
        even = theorem_1.row(theorem.EVEN, moment=theorem.WHILE_DECODING)
        crowded = side(
            fullest,
            above="eq. 6 sends most tokens into one slot",
            below="eq. 6 spreads tokens evenly",
            undecided="eq. 6 spreads tokens about evenly",
            at=min(1.0, 1.5 * even.value),
        )
        sentences.append(
            f"The fullest slot of a KV head holds {percent(fullest)} of what was merged, {percent(even)} would be its "
            f"even share: {crowded}."
        )
    return [*sentences, "The paper prints no error along such a response; next, what its printed tables add up to."]


def printed_tables(over_snapkv: Findings, infinite: Findings, summaries: Findings) -> list[str]:
    """Under the paper's own tables; arguments: of `printed.over_snapkv`, `.infinite_bench` and `.summaries`."""
    counts = {
        what: over_snapkv.row(printed.OVER, table="table3", method="snapkv", what=what).value
        for what in ("wins", "losses", "ties")
    }
    low, high = (
        summaries.row(printed.OVER, table="table2", method="h2o", what=what).value for what in ("least", "most")
    )
    stated = papers.figure("zsmerge", "headline").iloc[0]
    shares = [infinite.row(printed.SHARE_OF_FULL, source=source).value for source in ("recomputed", "printed")]
    surpasses = "is" if counts["wins"] > counts["losses"] + counts["ties"] else "is not"
    return [
        f"In table 3 ZSMerge is above SnapKV in {counts['wins']:.0f} cells, below in {counts['losses']:.0f} and level "
        f'in {counts["ties"]:.0f}, which {surpasses} what "consistently surpassing" says.',
        f"Its gains over H2O on XSum reach from {100 * low:.1f} % to {100 * high:.0f} %; section 5 "
        f"states {100 * stated['low']:.0f} % to "
        f"{100 * stated['high']:.0f} %.",
        f"The tasks of table 6 give {100 * shares[0]:.1f} % of the full cache's average, the printed "
        f"averages {100 * shares[1]:.1f} %.",
        "Next: how much the hyper-parameters matter, in zsmerge_sensitivity.",
    ]


def figure_5(findings: Findings) -> list[str]:
    """Under figure 5; findings: of `sensitivity.figure_5`."""
    spreads, best = [], []
    for row in findings.rows:
        if row.effect == sensitivity.SPREAD_OVER_MERGING and row.keys["parameter"] in ("decay", "window"):
            verdict = side(
                row, above=MATTERS, below="matters less than merging itself", undecided="may matter as much", at=1.0
            )
            spreads.append(f"the {row.keys['parameter']} {verdict} ({number(row, 2)})")
        if row.effect == sensitivity.BEST and row.keys["parameter"] in ("proximity", "residual"):
            recommended = sensitivity.RECOMMENDED[str(row.keys["parameter"])]
            best.append(
                f"the best {row.keys['parameter']} is {number(row, 2)} where the paper recommends {recommended:g}"
            )
    none = findings.found(sensitivity.WORSE, parameter="residual", setting=0.0)
    if none is not None:
        costs = side(none, above="clearly costs", below="clearly saves", undecided="does not clearly change")
        paper: Any = papers.figure("zsmerge", "figure5").query("parameter == 'residual' and first == 0").iloc[0]
        best.append(
            f"giving up the residual slots {costs} error ({number(none, 2)}), where it costs the paper "
            f"{-100 * paper['highest']:.0f} to {-100 * paper['lowest']:.0f} % of ROUGE"
        )
    return [
        f"Within the range that the paper calls stable {listed(spreads)}, in brackets by how many times what merging "
        f"gains the error varies; the paper's printed ROUGE comes to {stated('zsmerge.figure5.decay_robust'):.2f} at "
        "most."
        if spreads
        else "",
        sentence(best),
        "Next: the choices that the paper leaves open; by ROUGE, which is no error of an output, optima may lie "
        "elsewhere.",
    ]


def choices(findings: Findings) -> list[str]:
    """Under the open choices; findings: of `sensitivity.open_choices`."""
    told = {
        "similarity": "how the slots are first filled",
        "displaces": "whether the newcomer competes",
        "plain": "whose attention the scores gather",
    }
    parts = []
    for choice, words in told.items():
        row = findings.row(sensitivity.CHOICE_OVER_MERGING, choice=choice)
        worse = findings.row(sensitivity.WORSE_BY_CHOICE, choice=choice)
        verdict = side(
            row, above=MATTERS, below="matters less than merging itself", undecided="may matter as much", at=1.0
        )
        way = side(worse, above="for the worse", below="for the better", undecided="in no clear direction")
        parts.append(f"{words} {verdict} ({number(row, 2)} times its gain, {way})")
    return [
        f"Of the choices that are no numbers, {listed(parts)}.",
        "Appendix C.2 calls the method robust, and varies none of these.",
        "Next: whether merging pays on tasks, in tasks_at_small_budgets.",
    ]


def template(findings: Findings, ratio: float = 0.2) -> list[str]:
    """What the chat template changes, from `merging.template`."""
    row = findings.row(merging.TEMPLATE, ratio=ratio)
    change = side(row, "more", "less", "not measurably more or less")
    return [
        f"With the chat template merging removes {change} of eviction's error at {ratio:.0%} of the cache: "
        f"the share changes by {number(row)}.",
        "The paper's scores start from a prompt's last queries, some of which are then the template's own tokens.",
        "Next: a response that outgrows the cache, where scores are renewed at every step.",
    ]
