"""Every policy meets every measure, and is compared with the others at equal bytes.

Each paper means something else by a budget: entries of the prompt that stay, entries stored at any time, or entries
read at a step. Some count a method's other stored or loaded data, too. Bytes mean the same for all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.analyses.tasks import scores
from kvlab.analyses.tasks.contenders import contenders
from kvlab.analyses.tasks.examples import needle_grid
from kvlab.analyses.texts import DOCUMENTS
from kvlab.core.storage import AS_IS
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.lib.intervals import summarise
from kvlab.methods import Policy, policy, registry
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

QUALITY = ("recall", "window_recall", "step_recall", "mass_lost", "output_error")
BETTER_LOW = ("mass_lost", "output_error")
SIDES = {"stored": "stored_bytes", "read": "read_bytes"}
VERBS = {"stored": "stores", "read": "reads"}
ORACLE, LIMIT = "exact_topk", "oracle_attention"
"""Oracles, which are on no front: one has to score every key to find the few that it reads, one sees the response."""

TOP = 0.1
"""The top that recalls ask for, as a share of the prompt: one for all policies and budgets."""

AT_EQUAL = "{side}/{share:g}/{policy}/{measure}"
NEEDLE = "needle/{policy}"


def family(name: str) -> str:
    """The family of a policy, by its name; "other" for an unknown name."""
    return registry()[name].family if name in registry() else Policy.family


def measure(
    traces: Sequence[Trace],
    budgets: Sequence[int | float],
    heads: str | None = None,
    tables: str | None = None,
    names: Sequence[str] | None = None,
    top: float = TOP,
) -> pd.DataFrame:
    """Replay every policy at every budget on every trace.

    compilerkv fills up to its budget (`pad="budget"`, as the authors' code can). Its gate rejects tokens whatever the
    budget, and would reach few of the sizes at which policies are compared.

    Args:
        top: the recalls of all policies and budgets ask for the same top, of this share of the prompt.

    Returns:
        One row for each, with columns document, policy, budget, the measures of `Replay.summary`, and full_bytes.
        budget is missing for the full cache. Bytes are sums over layers and means over steps. full_bytes are those that
        the full cache stores on that trace.
    """
    every = contenders(budgets, heads, tables, names, pad="budget")
    rows = []
    with (
        progress_bars.counting(len(traces) * len(every), "replay", "policy") as bar,
        warnings.catch_warnings(),
    ):
        # compilerkv and duoattention say at every replay that they run without tables or head scores.
        warnings.simplefilter("ignore", UserWarning)
        for trace in traces:
            k = max(1, round(top * trace.prompt_length))
            whole = replay(trace, policy("full"), k=k).summary["stored_bytes"]
            for contender in every:
                rows.append(
                    {
                        "document": trace.document,
                        "policy": contender.name,
                        "budget": getattr(contender, "budget", None),
                        **replay(trace, contender, k=k).summary,
                        "full_bytes": whole,
                    }
                )
                bar.update()
    return pd.DataFrame(rows)


def in_words(measured: pd.DataFrame) -> str:
    """The extent of what `measure` measured, and the size of the full cache, as text."""
    policies, budgets, documents = (len(measured[name].dropna().unique()) for name in ("policy", "budget", "document"))
    full = mebibytes(measured["full_bytes"].to_numpy().mean(), ".1f")
    return f"{policies} policies, {budgets} budgets, {documents} documents; the full cache: {full}"


# ---------------------------------------------------------------------------------------------------- equal bytes


@dataclass(frozen=True)
class Reading:
    """A value read off a curve, or the reason why it has none."""

    value: float | None
    reason: str = ""


def interpolate(size: Sequence[float], values: Sequence[float], at: float, verb: str = "takes") -> Reading:
    """Read the value of a curve at `at` bytes: linear in the logarithm of the bytes between neighbouring points.

    There is no extrapolation: below the smallest and above the largest measured size a reason replaces the value. A
    curve can pass a size more than once if its bytes do not rise with its budget. rocketkv stores less at some larger
    budgets, and selection stores the same at all. Then the part with the larger budgets counts, which a user with that
    many bytes would choose.

    Args:
        size: bytes of each point, all above 0, in the order of their budgets.
        values: the measure at each point.
        verb: what a policy does with the bytes, for the reason.
    """
    if len(size) != len(values) or not len(size) or min(size) <= 0 or at <= 0:
        raise KvlabError("a curve needs as many values as sizes, at least one, and sizes above zero")
    logs, target = [math.log(n) for n in size], math.log(at)
    # From the last point back; each has the part of the curve before it.
    for i in reversed(range(len(logs))):
        if math.isclose(logs[i], target, abs_tol=1e-9):
            return Reading(float(values[i]))
        if i and min(logs[i - 1 : i + 1]) < target < max(logs[i - 1 : i + 1]):
            part = (target - logs[i - 1]) / (logs[i] - logs[i - 1])
            return Reading(float(values[i - 1] + part * (values[i] - values[i - 1])))
    if target < min(logs):
        return Reading(None, f"{verb} at least {mebibytes(min(size))}")
    return Reading(None, f"{verb} at most {mebibytes(max(size))}")


def mebibytes(size: float, form: str = ".3g") -> str:
    """A size in words: "12.3 MiB"."""
    return f"{size / 2**20:{form}} MiB"


def at_equal(table: pd.DataFrame, side: str, share: float | str) -> pd.DataFrame:
    """Every policy at the same bytes: its measures there, document by document.

    Args:
        table: from `measure`, or the summary of a replay with `full` among its policies. A policy in a storage of its
            own is a curve of its own, "snapkv+turbo-4".
        side: "stored" or "read".
        share: of what the full cache stores on the same document. Or a curve's name, "full+turbo-4", with one size on
            each document: then at that size.

    Returns:
        One row for each policy, measure and document: policy, measure, document, value and reason. The value is missing
        where the policy was not measured at that size on every document.

    Raises:
        KvlabError: no size of the full cache; several rows of one policy at one budget on one document; no such curve.
    """
    if side not in SIDES:
        raise KvlabError(f"bytes are stored or read, not {side!r}")
    curves, rows = _curves(table), []
    sizes = _sizes(curves, side, share)
    for name, curve in curves.groupby("policy", sort=False):
        for quality in [each for each in QUALITY if each in curve]:
            readings = {}
            for document, part in curve.groupby("document", sort=False):
                part = part.sort_values("budget")
                readings[document] = interpolate(
                    part[SIDES[side]].tolist(), part[quality].tolist(), sizes[str(document)], VERBS[side]
                )
            reason = next((reading.reason for reading in readings.values() if reading.value is None), "")
            rows += [
                {
                    "policy": name,
                    "measure": quality,
                    "document": document,
                    "value": math.nan if reason else reading.value,
                    "reason": reason,
                }
                for document, reading in readings.items()
            ]
    return pd.DataFrame(rows)


def _curves(table: pd.DataFrame) -> pd.DataFrame:
    """The table with one name for each curve, and full_bytes.

    Raises:
        KvlabError: as `at_equal`.
    """
    if missing := [name for name in ("policy", "document", "budget", *SIDES.values()) if name not in table]:
        raise KvlabError(
            f"curves at equal bytes need columns that the table lacks: {', '.join(missing)}; pass a replay's summary"
        )
    curves = table.reset_index(drop=True)
    if "storage" in curves:
        changed = curves["storage"].ne(AS_IS.name) & curves["storage"].notna()
        curves.loc[changed, "policy"] = curves["policy"] + "+" + curves["storage"]
    if "full_bytes" not in curves:
        whole = curves.query("policy == 'full'")
        whole = dict(zip(whole["document"], whole["stored_bytes"], strict=True))
        if not set(curves["document"]) <= set(whole):
            raise KvlabError("no size of the full cache on each document; replay the policy `full`, too")
        curves["full_bytes"] = [whole[document] for document in curves["document"]]
    twice = curves[curves.duplicated(["policy", "document", "budget"])]
    if len(twice):
        row = twice.iloc[0]
        raise KvlabError(
            f"several rows of {row['policy']} at budget {row['budget']} on {row['document']}: give each setting of "
            "other parameters a name, by a subclass with another `name`"
        )
    return curves


def _sizes(curves: pd.DataFrame, side: str, share: float | str) -> dict[str, float]:
    """The bytes at which policies are compared, by document."""
    if not isinstance(share, str):
        return {str(document): share * part["full_bytes"].iloc[0] for document, part in curves.groupby("document")}
    sizes = {
        str(document): set(part.loc[part["policy"] == share, SIDES[side]])
        for document, part in curves.groupby("document")
    }
    if any(len(own) != 1 for own in sizes.values()):
        known = ", ".join(curves["policy"].unique())
        raise KvlabError(f"{share!r} has not one size on each document; the table has {known}")
    return {document: own.pop() for document, own in sizes.items()}


def ranks(equal: pd.DataFrame) -> pd.DataFrame:
    """The place of each policy on each document, 1 for the best, ties shared: policy, measure, document, rank.

    Policies without a value are left out.
    """
    known = equal.dropna(subset="value").reset_index(drop=True)
    signed = known["value"].where(known["measure"].isin(BETTER_LOW), -known["value"])
    ranked = signed.groupby([known["measure"], known["document"]]).rank(method="average")
    return known.assign(rank=ranked).filter(["policy", "measure", "document", "rank"])


def summary(equal: pd.DataFrame, by: str = "output_error") -> pd.DataFrame:
    """One row for each policy, the best by `by` first and those without a value last.

    Columns: policy; for each measure MEASURE, MEASURE_low, MEASURE_high over documents; rank, rank_low and rank_high by
    the measure `by`; reason.
    """
    ranked = ranks(equal).query("measure == @by")
    rows = []
    for name, part in equal.groupby("policy", sort=False):
        columns = {
            quality: part.query("measure == @quality")["value"].to_numpy() for quality in part["measure"].unique()
        }
        columns["rank"] = ranked.query("policy == @name")["rank"].to_numpy()
        row = {"policy": name}
        for column, values in columns.items():
            value, (low, high) = _summary(values)
            row |= {column: value, f"{column}_low": low, f"{column}_high": high}
        rows.append(row | {"reason": part["reason"].iloc[0]})
    return pd.DataFrame(rows).sort_values(
        by, ascending=by in BETTER_LOW, na_position="last", kind="stable", ignore_index=True
    )


def _summary(values: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The mean and its interval; all are missing if a document has no value."""
    if not len(values) or np.isnan(values).any():
        return math.nan, (math.nan, math.nan)
    return summarise(values)


def findings(table: pd.DataFrame, shares: Mapping[str, Sequence[float]]) -> Findings:
    """Metrics of every policy at equal bytes.

    Args:
        shares: which shares of the full cache, for "stored" and "read".

    Returns:
        Metrics `stored/SHARE/POLICY/MEASURE`, `read/SHARE/POLICY/MEASURE` and `SIDE/SHARE/POLICY/rank` (by output
        error), with intervals over documents; only those that exist.
    """
    findings = Findings(table)
    for side, of_side in shares.items():
        for share in of_side:
            equal = at_equal(table, side, share)
            ranked = (
                ranks(equal).query("measure == 'output_error'").assign(measure="rank", value=lambda part: part["rank"])
            )
            for name, of_policy in pd.concat([equal.dropna(subset="value"), ranked]).groupby("policy", sort=False):
                for measure, part in of_policy.groupby("measure", sort=False):
                    findings.add(AT_EQUAL, part["value"], side=side, share=share, policy=name, measure=measure)
    return findings


# ---------------------------------------------------------------------------------------------------- the front


def front(size: Sequence[float], loss: Sequence[float], slack: float = 0.0) -> list[bool]:
    """Find the points that no other beats: no point is at most as large on both axes and smaller on one.

    Args:
        slack: sizes that exceed a point's by no more than this share count as equal. Else the front would hold 64
            entries both with and without the token just generated.
    """
    sizes, losses = np.asarray(size, dtype=float), np.asarray(loss, dtype=float)
    order = np.argsort(sizes, kind="stable")
    least = np.concatenate([[math.inf], np.minimum.accumulate(losses[order])])
    smaller = least[np.searchsorted(sizes[order], sizes, side="left")]
    as_large = least[np.searchsorted(sizes[order], sizes * (1 + slack), side="right")]
    return ((losses <= as_large) & (losses < smaller)).tolist()


def points(table: pd.DataFrame, side: str, quality: str, slack: float = 0.05) -> pd.DataFrame:
    """The curves to draw: policy, budget, bytes, value, low, high (over documents), front (see `front` for `slack`).

    The front is that of methods that can be run, without oracles. The full cache beats points that are
    larger than itself, but is not marked: every curve ends in it.
    """
    rows = []
    for _, part in table.groupby(["policy", "budget"], sort=False, dropna=False):
        value, (low, high) = summarise(part[quality])
        rows.append(
            {
                "policy": part["policy"].iloc[0],
                "budget": part["budget"].iloc[0],
                "bytes": part[SIDES[side]].mean(),
                "value": value,
                "low": low,
                "high": high,
            }
        )
    curves = pd.DataFrame(rows)
    compared = ~curves["policy"].isin([ORACLE, LIMIT])
    curves["front"] = False
    curves.loc[compared, "front"] = front(curves.loc[compared, "bytes"], curves.loc[compared, "value"], slack)
    curves.loc[curves["policy"] == "full", "front"] = False
    return curves


# ---------------------------------------------------------------------------------------------------- needles


def needles(
    lm: LM,
    lengths: Sequence[int],
    depths: Sequence[float],
    budget: float,
    heads: str | None = None,
    tables: str | None = None,
    document: str = DOCUMENTS[0],
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> Findings:
    """Ask for a needle at each length and depth under every policy (or those named) at one budget.

    The table is for `plots.needle_heatmap`.

    Returns:
        Table with columns policy, budget, length, depth, score, and the others of `scores.measure`. score is its
        `hits`: the share of the needle's digits after the first that are the likeliest given those before. By chance it
        is 0.1. Metrics `needle/POLICY` are the mean scores.
    """
    every = contenders([budget], heads, tables, names, pad="budget")
    plan = [(needle_grid(lm, lengths, depths, document, seed), [(contender, "prompt") for contender in every])]
    table = scores.measure(lm, plan).assign(score=lambda table: table["hits"])
    findings = Findings(table)
    for row in table.pivot_table(index="policy", values="score").reset_index().to_dict("records"):
        findings.set(NEEDLE, row["score"], policy=row["policy"])
    return findings
