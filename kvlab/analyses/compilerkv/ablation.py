"""CompilerKV, table 2: without the stabilised utility; and the way from CompilerKV to SnapKV, one change at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.compilerkv.quality import MEASURES, by_document, by_method, sweep
from kvlab.analyses.compilerkv.variants import RawAttention, ladder
from kvlab.analyses.findings import Findings, estimates
from kvlab.methods.compilerkv import CompilerKV
from kvlab.traces.trace import Trace

LOSS = "ablation/{measure}/{part}"
STORED = "ablation/stored/{part}"
STEP = "steps/{step}/{percent}"
NORMS_SPARE, NORMS_SPARE_ERROR = "norms_spare/{percent}", "norms_spare_error/{percent}"
MODEL_MEAN_SPARES, MODEL_MEAN_SPARES_ERROR = "model_mean_spares/{percent}", "model_mean_spares_error/{percent}"
ONE_SET_COSTS = "one_set_costs/{percent}"
AGAINST_SNAPKV = "against_snapkv/{percent}"
HEADS_WORSE = "heads_worse/{percent}"


def table_2(traces: Sequence[Trace], tables: str | None, share: float) -> Findings:
    """Measure table 2: the loss by raw attention instead of the stabilised utility, as a share of CompilerKV's value.

    Both fill the budget, so that both store the same.

    Returns:
        The table of `sweep`. The first three metrics are positive where the part helps:
        - `ablation/kept/raw_attention` and `ablation/recall/raw_attention`: 1 - without / with.
        - `ablation/error/raw_attention`: without / with - 1.
        - `ablation/stored/full` and `ablation/stored/raw_attention`: entries.
    """
    whole = CompilerKV(budget=share, tables=tables, pad="budget")
    raw = RawAttention(budget=share, tables=tables, pad="budget")
    findings = Findings(sweep(traces, [("full", whole), ("raw_attention", raw)]))
    ratios = {}
    for measure in (*MEASURES, "error"):
        values = by_method(findings.table, measure)
        ratios[measure] = values["raw_attention"] / values["full"] - 1
    for measure, ratio in ratios.items():
        findings.add(LOSS, ratio if measure == "error" else -ratio, measure=measure, part="raw_attention")
    for part, entries in by_method(findings.table, "stored").items():
        findings.add(STORED, entries, part=part)
    return findings


def steps_to_snapkv(traces: Sequence[Trace], shares: Sequence[float]) -> Findings:
    """Find where one set for each layer loses against one for each KV head: from CompilerKV to SnapKV, step by step.

    All steps store the same entries. There are no tables.

    Args:
        shares: budgets as parts of the prompt.

    Returns:
        The table of `sweep`; its methods are the steps in order. Metrics, for a share of 7 %:
        - `steps/0/7` .. `steps/6/7`: the attention lost at each step.
        - `norms_spare/7`: the loss without value norms (eq. 7), less the loss with them.
        - `model_mean_spares/7`: the loss with the mean over each layer, less that with the mean over layers (eq. 6).
        - `norms_spare_error/7` and `model_mean_spares_error/7`: the same of the output's error.
        - `one_set_costs/7`: CompilerKV's loss less that of a set for each KV head.
        - `against_snapkv/7`: CompilerKV's loss less SnapKV's.
        - `heads_worse/7`: the share of heads that lose more than with SnapKV.
    """
    settings = [(name, method) for share in shares for name, method in ladder(share).items()]
    findings = Findings(sweep(traces, settings))
    lost = dict((1 - by_document(findings.table, "kept")).items())
    errors = dict(by_document(findings.table, "error").items())
    for share in shares:
        at = percent(share)
        steps, step_errors = ([values[name, share] for name in ladder(share)] for values in (lost, errors))
        for number, losses in enumerate(steps):
            findings.add(STEP, losses, step=number, percent=at)
        findings.add_difference(NORMS_SPARE, steps[0], steps[1], percent=at)
        findings.add_difference(MODEL_MEAN_SPARES, steps[2], steps[0], percent=at)
        findings.add_difference(NORMS_SPARE_ERROR, step_errors[0], step_errors[1], percent=at)
        findings.add_difference(MODEL_MEAN_SPARES_ERROR, step_errors[2], step_errors[0], percent=at)
        findings.add_difference(ONE_SET_COSTS, steps[1], steps[4], percent=at)
        findings.add_difference(AGAINST_SNAPKV, steps[1], steps[6], percent=at)
        findings.set(HEADS_WORSE, (against_snapkv(findings, share) > 0).to_numpy().mean(), percent=at)
    return findings


def percent(share: float) -> int:
    """A share in whole percent, as metrics are named."""
    return round(100 * share)


def against_snapkv(steps: Findings, share: float) -> pd.DataFrame:
    """Attention lost by neutral CompilerKV minus that lost by SnapKV, averaged over documents: a row for each layer, a
    column for each query head.
    """
    _, ours, *_, snapkv = ladder(share)
    at = steps.table.query("budget == @share")
    lost = {
        name: 1 - at.query("method == @name").pivot_table(index="layer", columns="head", values="kept")
        for name in (ours, snapkv)
    }
    return lost[ours] - lost[snapkv]


def by_layer(steps: Findings, share: float) -> pd.DataFrame:
    """Attention lost in each layer with CompilerKV's one set, with a set for each KV head, and with SnapKV.

    Returns:
        method, layer, value, low, high (over documents).
    """
    names, groups = list(ladder(share)), []
    at = steps.table.query("budget == @share")
    for name in (names[1], names[4], names[6]):
        kept = at.query("method == @name").pivot_table(index="document", columns="layer", values="kept")
        groups += [((name, layer), losses) for layer, losses in (1 - kept).items()]
    return estimates(groups, ["method", "layer"])


def differences_in_words(steps: Findings) -> str:
    """The paired differences of `steps_to_snapkv`, share by share."""
    labels = {
        NORMS_SPARE: "value norms spare",
        NORMS_SPARE_ERROR: "value norms spare of the output's error",
        MODEL_MEAN_SPARES: "the mean over layers spares",
        MODEL_MEAN_SPARES_ERROR: "the mean over layers, of that error",
        ONE_SET_COSTS: "one set for each layer costs",
        AGAINST_SNAPKV: "CompilerKV loses more than SnapKV by",
    }
    rows = [
        (percent, label, steps.row(effect, percent=percent))
        for percent in steps.frame(NORMS_SPARE)["percent"]
        for effect, label in labels.items()
    ]
    return "\n".join(
        f"{percent:3} % of the prompt, {label:40}{row.value:+.3f}   {row.low:+.3f} to {row.high:+.3f}"
        for percent, label, row in rows
    )
