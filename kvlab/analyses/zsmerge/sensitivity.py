"""ZSMerge, appendix C.2 and figure 5: how much its five hyper-parameters matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.analyses.zsmerge.merging import CHOICES
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.lib.intervals import argmin, summarise
from kvlab.methods import Policy, policy
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

RECOMMENDED = {"proximity": 0.5, "residual": 0.02, "alpha": 1.0, "decay": 0.98, "window": 8}
"""The anchor: the configuration that appendix C.2 recommends."""

SWEEPS: dict[str, tuple[float, ...]] = {
    "proximity": (0.1, 0.3, 0.5, 0.7, 0.9),
    "residual": (0.0, 0.01, 0.02, 0.03, 0.05, 0.08),
    "alpha": (0.0, 0.25, 0.5, 0.75, 1.0),
    "decay": (0.0, 0.5, 0.9, 0.98, 1.0),
    "window": (4, 8, 16, 128),
}
"""The values that the text of appendix C.2 names."""

STABLE = {"proximity": (0.3, 0.7), "residual": (0.01, 0.03), "decay": (0.5, 1.0), "window": (4, 16)}
"""Ranges (first, last) within which the paper calls the method stable."""

SYMBOLS = {
    "proximity": "share of recent tokens, Bp / B",
    "residual": "residual slots, Br / (B - Bp)",
    "alpha": "strength of the bias, alpha",
    "decay": "decay of the scores, lambda",
    "window": "window (queries)",
}

ERROR = "error/{parameter}/{setting:g}"
MASS_LOST = "mass_lost/{parameter}/{setting:g}"
WORSE = "worse/{parameter}/{setting:g}"
BEST = "best/{parameter}"
SPREAD = "spread/{parameter}"
SPREAD_OVER_MERGING = "spread_over_merging/{parameter}"
WORSE_BY_CHOICE = "worse_by/{choice}"
CHOICE_OVER_MERGING = "worse_by_over_merging/{choice}"


def figure_5(traces: Sequence[Trace], ratio: float = 0.2, sweeps: Mapping[str, Sequence[float]] = SWEEPS) -> Findings:
    """Measure figure 5: one hyper-parameter at a time is moved away from the recommended configuration.

    The paper draws ROUGE on XSum. Here the measures are the relative error of the attention output and the attention
    mass lost.

    Args:
        ratio: cache budget as a share of the prompt (the paper does not say which it used).
        sweeps: parameter -> values; the recommended value is measured whether it is among them or not.

    Returns:
        Table with columns document, parameter, value, error, mass_lost (means over layers, heads and steps). All
        metrics are document by document, with intervals over documents:
        - `error/PARAMETER/VALUE` and `mass_lost/PARAMETER/VALUE`.
        - `worse/PARAMETER/VALUE`: error there minus error at the recommended value.
        - `best/PARAMETER`: the value at which the mean over the documents is smallest.
        - `spread/PARAMETER`: largest minus smallest error within the paper's stable range, over the error at the
          recommended value.
        - `spread_over_merging/PARAMETER`: the same difference over the change by switching merging off (residual = 0
          against the recommended value, in either direction).

    Raises:
        KvlabError: a parameter that is not among the five.
    """
    unknown = set(sweeps) - set(RECOMMENDED)
    if unknown:
        known = ", ".join(RECOMMENDED)
        raise KvlabError(f"figure 5 sweeps {known}, not {min(unknown)}")
    rows = []
    jobs = [
        (trace, parameter, value)
        for trace in traces
        for parameter, values in sweeps.items()
        for value in sorted({*values, RECOMMENDED[parameter]})
    ]
    measured: dict[tuple[int, Policy], dict[str, float]] = {}
    for trace, parameter, value in progress_bars.each(jobs, "figure 5", "setting"):
        zsmerge = policy("zsmerge", budget=ratio, **{**RECOMMENDED, parameter: value})
        if (id(trace), zsmerge) not in measured:
            result = replay(trace, zsmerge)
            measured[id(trace), zsmerge] = {
                "error": float(result.output_error.mean()),
                "mass_lost": float(result.mass_lost.mean()),
            }
        row = {"document": trace.document, "parameter": parameter, "value": float(value)}
        rows.append(row | measured[id(trace), zsmerge])
    findings = Findings(pd.DataFrame(rows))
    _summarise(findings)
    return findings


def open_choices(traces: Sequence[Trace], ratio: float = 0.2) -> Findings:
    """Measure the choices that the paper leaves open (`merging.CHOICES`), one at a time, next to figure 5's numbers.

    Each changes the recommended configuration.

    Returns:
        Table with columns document, choice, error. Choice "none" is the recommended configuration, and "residual" is
        eviction. All metrics are document by document, with intervals over documents:
        - `worse_by/similarity`: the error with that choice less the recommended one's.
        - `worse_by_over_merging/similarity`: the size of that difference over the change by switching merging off, in
          either direction.
    """
    policies = {"none": {}, "residual": {"residual": 0}} | CHOICES
    rows = []
    jobs = [(trace, choice) for trace in traces for choice in policies]
    for trace, choice in progress_bars.each(jobs, "open choices", "setting"):
        result = replay(trace, policy("zsmerge", budget=ratio, **{**RECOMMENDED, **policies[choice]}))
        rows.append({"document": trace.document, "choice": choice, "error": float(result.output_error.mean())})
    findings = Findings(pd.DataFrame(rows))
    errors: Any = findings.table.pivot(index="document", columns="choice", values="error")
    merging = (errors["residual"] - errors["none"]).abs()
    for choice in CHOICES:
        findings.add_difference(WORSE_BY_CHOICE, errors[choice], errors["none"], choice=choice)
        findings.add(CHOICE_OVER_MERGING, (errors[choice] - errors["none"]).abs() / merging, choice=choice)
    return findings


def _summarise(findings: Findings) -> None:
    merging = None
    parts = {str(name): part for name, part in findings.table.groupby("parameter", sort=False)}
    if "residual" in parts:
        errors = parts["residual"].pivot(index="document", columns="value", values="error")
        if 0.0 in errors:
            merging = errors[0.0] - errors[RECOMMENDED["residual"]]
    for parameter, part in parts.items():
        errors = part.pivot(index="document", columns="value", values="error")
        lost = part.pivot(index="document", columns="value", values="mass_lost")
        anchor = errors.loc[:, RECOMMENDED[parameter]]
        for setting, values in errors.items():
            findings.add(ERROR, values, parameter=parameter, setting=setting)
            findings.add(MASS_LOST, lost.loc[:, setting], parameter=parameter, setting=setting)
            if setting != RECOMMENDED[parameter]:
                findings.add_difference(WORSE, values, anchor, parameter=parameter, setting=setting)
        findings.set(BEST, *argmin(errors), parameter=parameter)
        if parameter in STABLE:
            first, last = STABLE[parameter]
            stable = errors[[value for value in errors.columns if first <= value <= last]]
            spread = stable.max(axis="columns") - stable.min(axis="columns")
            findings.add(SPREAD, spread / anchor, parameter=parameter)
            if merging is not None:
                findings.add(SPREAD_OVER_MERGING, spread / merging.abs(), parameter=parameter)


def changes(findings: Findings) -> pd.DataFrame:
    """Return figure 5 as points to draw: the relative changes of `error` and `mass_lost`, document by document.

    They are against the recommended configuration. The columns are parameter, value, measure, mean, low, high.
    """
    rows = []
    for parameter, part in findings.table.groupby("parameter", sort=False):
        for measure in ("error", "mass_lost"):
            wide = part.pivot(index="document", columns="value", values=measure)
            relative = wide.div(wide.loc[:, RECOMMENDED[str(parameter)]], axis="index") - 1
            for value, changed in relative.items():
                mean, (low, high) = summarise(changed)
                rows.append(
                    {"parameter": parameter, "value": value, "measure": measure, "mean": mean, "low": low, "high": high}
                )
    return pd.DataFrame(rows)


def paper_yardstick(printed: pd.DataFrame) -> dict[str, float]:
    """Compute the paper's own `spread_over_merging` from figure 5 as printed.

    It is how far ROUGE varies within a stable range, over the least that it loses without residual slots.
    """
    rows = printed.to_dict("records")
    (least,) = (-row["highest"] for row in rows if row["parameter"] == "residual" and row["last"] == 0)
    return {
        row["parameter"]: row["highest"] / least
        for row in rows
        if STABLE.get(row["parameter"]) == (row["first"], row["last"])
    }


def flatness(findings: Findings) -> pd.DataFrame:
    """For each swept parameter with a stable range: parameter, from, to, spread, spread_over_merging, intervals."""
    ranges = [{"parameter": name, "from": first, "to": last} for name, (first, last) in STABLE.items()]
    spread, over_merging = (
        findings.frame(effect).rename(columns={"value": name, "low": f"{name}_low", "high": f"{name}_high"})
        for name, effect in (("spread", SPREAD), ("spread_over_merging", SPREAD_OVER_MERGING))
    )
    return pd.DataFrame(ranges).merge(spread, on="parameter").merge(over_merging, on="parameter", how="left")
