"""ZSMerge while it decodes: long responses, into whose slots eq. 6 merges one token at every step.

Figure 4 follows short answers to long prompts, where nearly everything was merged at the end of the prefill, by runs.
Here the prompt is short and the response many times the budget, so that algorithm 1 itself decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.analyses.zsmerge.merging import DEFINITIONS, errors_by_layer
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

REDUCTION = "decoding/{definition}/{variant}"
AHEAD = "decoding/saved_by_{choice}"
REDUCTION_OF_PART = "decoding/part/{part}"
PARTS = 4
"""Quarters of the response."""


def variants(budget: int, residual: int) -> dict[str, Policy]:
    """Eviction, merging, and merging as the paper's algorithm, its authors' code and a missing bias change it."""
    chosen = {"displaces": {"newcomer": "displaces"}, "plain": {"scored": "plain"}, "alpha0": {"alpha": 0.0}}
    return {
        "evict": policy("zsmerge", budget=budget, residual=0),
        "merge": policy("zsmerge", budget=budget, residual=residual),
        **{
            name: policy("zsmerge", budget=budget, residual=residual, **parameters)
            for name, parameters in chosen.items()
        },
    }


def merging_while_decoding(traces: Iterable[Trace], budget: int, residual: int) -> Findings:
    """Measure the attention output's error along a long response, with eviction and with merging step by step.

    Args:
        traces: one for each document, of short prompts with long responses.
        budget, residual: entries of each layer and KV head, and how many of them are slots.

    Returns:
        Table with columns document, variant, part, error, squared_error, layer_error. part numbers the quarters of the
        response, from 1. The errors are means over layers, heads and the part's steps. Metrics, with intervals over
        documents:
        - `decoding/error/merge` and so on, for each variant but eviction: 1 - its error / eviction's, by each of
          DEFINITIONS.
        - `decoding/part/1`: the same of merging, by the mean error in each quarter.
        - `decoding/saved_by_displaces`: merging's error less that choice's.
    """
    rows = []
    for trace in progress_bars.each(traces, "merging while decoding", "doc"):
        for variant, zsmerge in variants(budget, residual).items():
            result = replay(trace, zsmerge)
            for part in range(PARTS):
                steps = slice(part * trace.steps // PARTS, (part + 1) * trace.steps // PARTS)
                means = pd.DataFrame(errors_by_layer(result, steps))[list(DEFINITIONS)].mean()
                rows.append({"document": trace.document, "variant": variant, "part": part + 1, **means.to_dict()})
    findings = Findings(pd.DataFrame(rows))
    for definition in DEFINITIONS:
        errors = findings.table.pivot_table(index="document", columns="variant", values=definition)
        for variant in errors.columns.drop("evict"):
            reduction = 1 - errors[variant] / errors["evict"]
            findings.add(REDUCTION, reduction, definition=definition, variant=variant)
    errors: Any = findings.table.pivot_table(index="document", columns="variant", values="error")
    for choice in errors.columns.drop(["evict", "merge"]):
        findings.add_difference(AHEAD, errors["merge"], errors[choice], choice=choice)
    by_part = findings.table.pivot_table(index=["part", "document"], columns="variant", values="error")
    for part, errors in by_part.groupby("part"):
        # Where both still hold everything neither errs, and there is nothing to reduce.
        if min(errors["evict"]) > 1e-6:
            findings.add(REDUCTION_OF_PART, 1 - errors["merge"] / errors["evict"], part=part)
    return findings
