"""ZSMerge, section 4.3 and appendix A: does merging keep the attention output closer than eviction?"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.replays.replay import Replay
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

RATIOS = (0.02, 0.05, 0.10, 0.20, 0.30, 0.50, 0.80)
WITHOUT_BIAS = (0.05, 0.20, 0.50)

ERROR = "error/{variant}/{ratio:.2f}"
SAVED = "saved/{ratio:.2f}"
BIAS = "bias/{ratio:.2f}"
REDUCTION = "reduction/{ratio:.2f}"
REDUCTION_ALPHA0 = "reduction_alpha0/{ratio:.2f}"
GROWTH = "growth/{first:.2f}_to_{last:.2f}"
GROWTHS = ((0.05, 0.50), (0.20, 0.50))  # between which ratios the claims ask how the reduction changes
REDUCTION_SQUARED = "reduction_squared/{ratio:.2f}"
REDUCTION_LAYER = "reduction_layer/{ratio:.2f}"
REDUCTION_OF_CHOICE = "reduction_{choice}/{ratio:.2f}"
SAVED_BY_CHOICE = "saved_by_{choice}/{ratio:.2f}"
TEMPLATE = "template/{ratio:.2f}"


def variants(ratio: float) -> dict[str, Policy]:
    """The three that figure 4 and the issue of alpha compare, at one cache ratio."""
    return {
        "evict": policy("zsmerge", budget=ratio, residual=0),
        "merge": policy("zsmerge", budget=ratio),
        "merge_alpha0": policy("zsmerge", budget=ratio, alpha=0.0),
    }


CHOICES: dict[str, dict[str, str]] = {
    "similarity": {"initial": "similarity"},
    "displaces": {"newcomer": "displaces"},
    "plain": {"scored": "plain"},
}
"""Choices that the paper leaves open or that its authors' code makes otherwise, as changes of kvlab's default."""

DEFINITIONS = ("error", "squared_error", "layer_error")
"""Three readings of "relative error of attention outputs": the mean over heads and steps of ||o - o'|| / ||o||; the
mean of its square; and the same ratio of all heads of a layer together, so that heads of small output count for
less."""


def figure_4(
    traces: Sequence[Trace],
    ratios: Sequence[float] = RATIOS,
    without_bias: Sequence[float] = WITHOUT_BIAS,
    choices: Sequence[float] = (),
) -> Findings:
    """Measure figure 4: the relative output error of eviction against residual merging, by cache ratio.

    `evict` is the same policy without residual slots. Their entries go to the context part, so both store the same.

    Args:
        ratios: cache budgets as shares of the prompt.
        without_bias: those of them at which merging is also measured without the logit bias.
        choices: those of them at which merging is also measured with each of CHOICES.

    Returns:
        Table with columns document, ratio, variant, layer, error, squared_error, layer_error (DEFINITIONS), mass_lost.
        The numbers are means over heads and steps. All metrics are document by document, with intervals over documents:
        - `error/evict/0.20`, `error/merge/0.20`, `error/merge_alpha0/0.20`.
        - `saved/0.20`: evicted - merged error.
        - `bias/0.20`: the error that the bias alone removes.
        - `reduction/0.20` and `reduction_alpha0/0.20`: 1 - merged error / evicted error.
        - `reduction_squared/0.20`: the same of the mean squared errors.
        - `reduction_layer/0.20`: the same of the errors of whole layers.
        - `reduction_similarity/0.20`: the same of that choice.
        - `saved_by_similarity/0.20`: the default's error less that choice's.
        - `growth/0.05_to_0.50`: the reduction at the larger ratio less that at the smaller.
    """
    rows = []
    jobs = [(trace, ratio) for trace in traces for ratio in ratios]
    for trace, ratio in progress_bars.each(jobs, "figure 4", "ratio"):
        policies = variants(ratio)
        if ratio not in without_bias:
            policies.pop("merge_alpha0")
        if ratio in choices:
            policies |= {name: policy("zsmerge", budget=ratio, **chosen) for name, chosen in CHOICES.items()}
        for variant, zsmerge in policies.items():
            parts = errors_by_layer(replay(trace, zsmerge))
            rows += [{"document": trace.document, "ratio": ratio, "variant": variant} | part for part in parts]
    findings = Findings(pd.DataFrame(rows))
    by_document = findings.table.pivot_table(index=["ratio", "document"], columns="variant", values="error")
    for definition, effect in (("squared_error", REDUCTION_SQUARED), ("layer_error", REDUCTION_LAYER)):
        errors = findings.table.pivot_table(index=["ratio", "document"], columns="variant", values=definition)
        for ratio, table in errors.groupby("ratio"):
            findings.add(effect, 1 - table["merge"] / table["evict"], ratio=ratio)
    reductions = {
        ratio: 1 - table.loc[:, "merge"].droplevel("ratio") / table.loc[:, "evict"].droplevel("ratio")
        for ratio, table in by_document.groupby("ratio")
    }
    for first, last in GROWTHS:
        if {first, last} <= reductions.keys():
            findings.add_difference(GROWTH, reductions[last], reductions[first], first=first, last=last)
    for ratio, table in by_document.groupby("ratio"):
        errors = dict(table.dropna(axis="columns").items())
        for variant, values in errors.items():
            findings.add(ERROR, values, variant=variant, ratio=ratio)
        findings.add_difference(SAVED, errors["evict"], errors["merge"], ratio=ratio)
        findings.add(REDUCTION, 1 - errors["merge"] / errors["evict"], ratio=ratio)
        if "merge_alpha0" in errors:
            findings.add_difference(BIAS, errors["merge_alpha0"], errors["merge"], ratio=ratio)
            findings.add(REDUCTION_ALPHA0, 1 - errors["merge_alpha0"] / errors["evict"], ratio=ratio)
        for choice in sorted(CHOICES.keys() & errors.keys()):
            findings.add(REDUCTION_OF_CHOICE, 1 - errors[choice] / errors["evict"], choice=choice, ratio=ratio)
            findings.add_difference(SAVED_BY_CHOICE, errors["merge"], errors[choice], choice=choice, ratio=ratio)
    return findings


def errors_by_layer(result: Replay, steps: slice = slice(None)) -> list[dict[str, int | float]]:
    """For each layer: its number, the errors of DEFINITIONS, and mass_lost, means over heads and these steps."""
    errors, norms = result.output_error[..., steps], result.full_norms[..., steps]
    whole = (errors * norms).square().sum(1).sqrt() / norms.square().sum(1).sqrt()
    measured = {
        "error": errors.mean((1, 2)),
        "squared_error": errors.square().mean((1, 2)),
        "layer_error": whole.mean(1),
        "mass_lost": result.mass_lost[..., steps].mean((1, 2)),
    }
    columns = {name: values.tolist() for name, values in measured.items()}
    return [
        {"layer": layer} | {name: values[row] for name, values in columns.items()}
        for row, layer in enumerate(result.trace.layers)
    ]


def template(plain: Sequence[Trace], templated: Sequence[Trace], ratio: float = 0.2) -> Findings:
    """Measure the effect of a final chat template on the scores.

    The scores start with the last queries, which are mostly the template's.

    Args:
        plain, templated: traces of the same prompts without and with the model's chat template.
        ratio: cache budget as a share of the prompt.

    Returns:
        The tables of both `figure_4`, with a column template. Metric `template/0.20` is about the share of eviction's
        error that merging removes: with the template less without, paired by document.
    """
    sides = {}
    for name, traces in (("without", plain), ("with", templated)):
        table = figure_4(traces, [ratio], []).table
        errors = table.pivot_table(index="document", columns="variant", values="error")
        sides[name] = table.assign(template=name), 1 - errors["merge"] / errors["evict"]
    findings = Findings(pd.concat([table for table, _ in sides.values()], ignore_index=True))
    findings.add_difference(TEMPLATE, sides["with"][1], sides["without"][1], ratio=ratio)
    return findings


def reduction_by_layer(findings: Findings) -> pd.DataFrame:
    """Share of eviction's error that merging removes: one row for each layer, one column for each ratio."""
    errors = findings.table.pivot_table(index="layer", columns=["variant", "ratio"], values="error")
    return 1 - errors.loc[:, "merge"] / errors.loc[:, "evict"]
