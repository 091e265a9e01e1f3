"""ZSMerge, section 4.3 and appendix A: does merging keep the attention output closer than eviction?"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from kvlab.analyses import telling
from kvlab.analyses.findings import Findings
from kvlab.core import attention
from kvlab.core.store import LayerStore
from kvlab.lib import bars
from kvlab.methods import Policy, policy
from kvlab.replays.run import Replay
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
TEMPLATE = "template/{ratio:.2f}"
VIOLATIONS = "theorem1/violations"
SMALLEST_MARGIN = "theorem1/smallest_margin"


def variants(ratio: float) -> dict[str, Policy]:
    """The three that figure 4 and the issue of alpha compare, at one cache ratio."""
    return {
        "evict": policy("zsmerge", budget=ratio, residual=0),
        "merge": policy("zsmerge", budget=ratio),
        "merge_alpha0": policy("zsmerge", budget=ratio, alpha=0.0),
    }


def figure_4(
    traces: Sequence[Trace], ratios: Sequence[float] = RATIOS, without_bias: Sequence[float] = WITHOUT_BIAS
) -> Findings:
    """Figure 4: relative output error of eviction against residual merging, by cache ratio.

    `evict` is the same policy without residual slots (their entries go to the context part), so both store the same.

    Args:
        ratios: cache budgets as shares of the prompt.
        without_bias: those of them at which merging is also measured without the logit bias.

    Returns:
        Table with columns document, ratio, variant, layer, error, squared_error, mass_lost (means over heads and
        steps); metrics `error/evict/0.20`, `error/merge/0.20`, `error/merge_alpha0/0.20`; `saved/0.20` (evicted -
        merged error) and `bias/0.20` (what the bias alone takes off the error); `reduction/0.20` and
        `reduction_alpha0/0.20` (1 - merged error / evicted error), `reduction_squared/0.20` (the same of the mean
        squared errors); `growth/0.05_to_0.50` (the reduction at the larger ratio less that at the smaller); all
        document by document, with intervals over documents.
    """
    rows = []
    jobs = [(trace, ratio) for trace in traces for ratio in ratios]
    for trace, ratio in bars.each(jobs, "figure 4", "ratio"):
        for variant, zsmerge in variants(ratio).items():
            if variant == "merge_alpha0" and ratio not in without_bias:
                continue
            result = Replay(trace, zsmerge)
            errors, lost = result.output_error.mean((1, 2)), result.mass_lost.mean((1, 2))
            squared = result.output_error.square().mean((1, 2))
            rows += [
                {
                    "document": trace.document,
                    "ratio": ratio,
                    "variant": variant,
                    "layer": layer,
                    "error": e,
                    "squared_error": s,
                    "mass_lost": m,
                }
                for layer, e, s, m in zip(trace.layers, *(t.tolist() for t in (errors, squared, lost)), strict=True)
            ]
    findings = Findings(pd.DataFrame(rows))
    by_document = findings.table.pivot_table(index=["ratio", "document"], columns="variant", values="error")
    squares = findings.table.pivot_table(index=["ratio", "document"], columns="variant", values="squared_error")
    for ratio, squared in squares.groupby("ratio"):
        findings.add(REDUCTION_SQUARED, 1 - squared["merge"] / squared["evict"], ratio=ratio)
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
    return findings


def template(plain: Sequence[Trace], templated: Sequence[Trace], ratio: float = 0.2) -> Findings:
    """What a chat template at the prompt's end does to the scores: the last queries, which start them, are mostly its.

    Args:
        plain, templated: traces of the same prompts without and with the model's chat template.
        ratio: cache budget as a share of the prompt.

    Returns:
        The tables of both `figure_4`, with a column template; metric `template/0.20`, the share of eviction's error
        that merging removes with the template less that without, paired by document.
    """
    sides = {}
    for name, traces in (("without", plain), ("with", templated)):
        table = figure_4(traces, [ratio], []).table
        errors = table.pivot_table(index="document", columns="variant", values="error")
        sides[name] = table.assign(template=name), 1 - errors["merge"] / errors["evict"]
    findings = Findings(pd.concat([table for table, _ in sides.values()], ignore_index=True))
    findings.add_difference(TEMPLATE, sides["with"][1], sides["without"][1], ratio=ratio)
    return findings


def template_in_words(findings: Findings, ratio: float = 0.2) -> list[str]:
    """What `template` found, in sentences."""
    row = findings.row(TEMPLATE, ratio=ratio)
    change = telling.side(row, "more", "less", "not measurably more or less")
    return [
        f"With the chat template merging removes {change} of eviction's error at {ratio:.0%} of the cache: "
        f"the share changes by {telling.number(row)}."
    ]


def reduction_by_layer(findings: Findings) -> pd.DataFrame:
    """Share of eviction's error that merging removes: one row for each layer, one column for each ratio."""
    errors = findings.table.pivot_table(index="layer", columns=["variant", "ratio"], values="error")
    return 1 - errors.loc[:, "merge"] / errors.loc[:, "evict"]


@torch.inference_mode()
def theorem_1(traces: Sequence[Trace], ratio: float = 0.2) -> Findings:
    """Theorem 1, an identity: with alpha <= 1 no unmerged entry gets less attention than in the full cache.

    Checked on the first decoding query of every layer and head, in double precision. Only an arithmetic error can make
    it fail.

    Returns:
        Table with columns document, layer, head, smallest_margin, entries; metrics `theorem1/violations` (entries whose
        attention fell by more than rounding) and `theorem1/smallest_margin`.
    """
    rows = []
    violations = 0
    # In double precision, so on the CPU: Apple's GPUs have none.
    for trace in (captured.to("cpu") for captured in traces):
        store = LayerStore(trace.prompt_keys.double(), trace.prompt_values.double())
        zsmerge = policy("zsmerge", budget=ratio)
        zsmerge.compress(store, trace.prompt)
        new = slice(trace.prompt_length, trace.prompt_length + 1)
        store.append(trace.keys[:, :, new].double(), trace.values[:, :, new].double())
        query = trace.response_queries[:, :, :1].double()
        full = attention.weights(query, trace.keys[:, :, : new.stop].double(), trace.softmax)[:, :, 0]
        bias = zsmerge.bias(store)
        bias = None if bias is None else attention.to_query_heads(bias, trace.heads)[:, :, None]
        compensated = attention.weights(query, store.keys, trace.softmax, bias=bias)[:, :, 0]
        where = attention.to_query_heads(store.positions, trace.heads)
        unmerged = attention.to_query_heads(store.fusion_counts, trace.heads) == 1
        margin = (compensated - full.gather(-1, where)).masked_fill(~unmerged, torch.inf)
        violations += int((margin < -1e-12).sum())
        smallest = margin.amin(-1)
        rows += [
            {
                "document": trace.document,
                "layer": layer,
                "head": head,
                "smallest_margin": float(smallest[row, head]),
                "entries": int(unmerged[row, head].sum()),
            }
            for row, layer in enumerate(trace.layers)
            for head in range(trace.heads)
        ]
    findings = Findings(pd.DataFrame(rows))
    findings.set(VIOLATIONS, violations)
    findings.set(SMALLEST_MARGIN, min(findings.table["smallest_margin"]))
    return findings


def theorem_1_in_words(findings: Findings) -> str:
    """What `theorem_1` found, in one line."""
    entries, violations = findings.table["entries"].sum(), findings.row(VIOLATIONS).value
    margin = findings.row(SMALLEST_MARGIN).value
    return f"{entries:,} unmerged entries, {violations:.0f} violations, smallest margin {margin:.1e}"
