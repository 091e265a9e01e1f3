"""MorphKV, section 3.3: does a set for each KV head, chosen by its group, serve as well as one for each query head?

The authors' code is measured, too. It combines the rows of a group in other ways, and its softmax runs over
the distant keys alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv.windows import along_steps, gain
from kvlab.lib import progress_bars
from kvlab.methods import policy
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

MEAN = "groups/{measure}/{variant}"
GAIN = "groups/gain/{measure}/{variant}"

SHARED = "shared"
OWN = "own_sets"
VARIANTS: dict[str, dict[str, Any]] = {
    SHARED: {},
    OWN: {},
    "llama_code": {"aggregation": "logits", "renormalise": True},
    "other_code": {"aggregation": "max", "renormalise": True},
}
"""The paper's sum of weights over a group; the same without a group; the authors' code for Llama (logits are summed,
one softmax over the distant keys) and for other models (the largest weight of the group, each head's softmax over the
distant keys)."""
# Recall is of the top of what a set serves, a group or a head, and so not the same question for both.
COMPARED = ("mass_lost", "output_error")


def ungrouped(trace: Trace) -> Trace:
    """The trace as of a model with a KV head for each query head: keys and values repeated, the same attention."""
    group = trace.heads // trace.kv_heads
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (trace.keys, trace.values))
    softmax = {"scaling": trace.scaling, "softcap": trace.softcap, "sinks": trace.sinks}
    repeated = Trace.from_tensors(trace.queries, keys, values, trace.prompt_length, **softmax)
    repeated.layout, repeated.ids, repeated.meta = trace.layout, trace.ids, dict(trace.meta)
    return repeated


def section_3_3(traces: Iterable[Trace], window: int, capacity: int) -> Findings:
    """Check section 3.3 ("performs equally well with both approaches") at one window and capacity, with sum fusion.

    Every set has `capacity` entries. So sets for query heads take as many times the memory as a group has heads. In a
    model without groups both are the same.

    Returns:
        Table with columns document, variant (of VARIANTS), step, measure (of COMPARED), value (mean over layers and
        heads). Metrics, with intervals over documents:
        - `groups/mass_lost/shared` and so on.
        - `groups/gain/mass_lost/own_sets`: relative gains over `shared`.
    """
    frames = []
    for trace in progress_bars.each(traces, "section 3.3", "doc"):
        for variant, parameters in VARIANTS.items():
            result = replay(
                ungrouped(trace) if variant == OWN else trace,
                policy("morphkv", budget=capacity, window=window, **parameters),
            )
            frames += [
                frame.assign(document=trace.document, variant=variant) for frame in along_steps(result, COMPARED)
            ]
    findings = Findings(pd.concat(frames, ignore_index=True))
    means: Any = findings.table.groupby(["measure", "variant", "document"])["value"].mean()
    for measure in COMPARED:
        for variant in VARIANTS:
            values = means.loc[measure, variant]
            findings.add(MEAN, values, measure=measure, variant=variant)
            if variant != SHARED:
                findings.add(GAIN, gain(measure, values, means.loc[measure, SHARED]), measure=measure, variant=variant)
    return findings
