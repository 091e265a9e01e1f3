"""ZSMerge's theorem 1, an identity, and what its residual slots hold once a response has been merged into them."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from kvlab.analyses.findings import Findings
from kvlab.core import attention
from kvlab.core.store import LayerStore
from kvlab.methods import Policy, policy
from kvlab.methods._base.clock import decode
from kvlab.traces.trace import Trace

VIOLATIONS = "{moment}/violations"
SMALLEST_MARGIN = "{moment}/smallest_margin"
MERGES = "{moment}/merges"
AFTER_PREFILL, WHILE_DECODING = "theorem1", "theorem1_decoding"
FULLEST = "{moment}/fullest_slot"
EVEN = "{moment}/even_slot"

ROUNDING = 1e-12
"""A weight in double precision may fall by this much."""


@torch.inference_mode()
def theorem_1(traces: Iterable[Trace], zsmerge: Policy | None = None, steps: int = 0) -> Findings:
    """Check theorem 1: with alpha <= 1 no unmerged entry gets less attention than in the full cache.

    The check is on the decoding query after `steps` others, of every layer and head, in double precision. Only an
    arithmetic error can make it fail.

    Args:
        zsmerge: the policy; with a fifth of the prompt unless given.
        steps: decoding steps that have evicted and merged before.

    Returns:
        Table with columns document, layer, head, smallest_margin, entries (unmerged), merges. merges are the tokens in
        the KV head's slots less the slots; one of its group's heads counts them. Metrics, as `theorem1_decoding/...`
        after decoding steps:
        - `theorem1/violations`: entries whose attention fell by more than rounding.
        - `theorem1/smallest_margin` and `theorem1/merges`.
        Where there are two slots or more there are also:
        - `theorem1/fullest_slot`: the share of the merged tokens in the fullest slot of a KV head, with its interval
          over documents.
        - `theorem1/even_slot`: that share if all slots had as many.
    """
    zsmerge = policy("zsmerge", budget=0.2) if zsmerge is None else zsmerge
    moment = WHILE_DECODING if steps else AFTER_PREFILL
    rows, violations = [], 0
    # In double precision, so on the CPU: Apple's GPUs have none.
    for trace in (captured.to("cpu") for captured in traces):
        store = _decoded(trace, zsmerge, steps)
        query, new = _appended(trace, store, steps)
        full = attention.weights(query, trace.keys[:, :, : new + 1].double(), trace.softmax)[:, :, 0]
        bias = zsmerge.bias(store)
        bias = None if bias is None else attention.to_query_heads(bias, trace.heads)[:, :, None]
        compensated = attention.weights(query, store.keys, trace.softmax, bias=bias)[:, :, 0]
        where = attention.to_query_heads(store.positions, trace.heads)
        counts = store.fusion_counts
        unmerged = attention.to_query_heads(counts, trace.heads) == 1
        margin = (compensated - full.gather(-1, where)).masked_fill(~unmerged, torch.inf)
        violations += int((margin < -ROUNDING).sum())
        smallest, group = margin.amin(-1), trace.heads // trace.kv_heads
        merged = (counts - 1).sum(-1)
        rows += [
            {
                "document": trace.document,
                "layer": layer,
                "head": head,
                "smallest_margin": float(smallest[row, head]),
                "entries": int(unmerged[row, head].sum()),
                "merges": 0 if head % group else int(merged[row, head // group]),
                **_slots(store, row, head // group),
            }
            for row, layer in enumerate(trace.layers)
            for head in range(trace.heads)
        ]
    findings = Findings(pd.DataFrame(rows))
    findings.set(VIOLATIONS, violations, moment=moment)
    findings.set(SMALLEST_MARGIN, min(findings.table["smallest_margin"]), moment=moment)
    findings.set(MERGES, sum(findings.table["merges"]), moment=moment)
    several = findings.table.loc[findings.table["slots"] > 1].assign(even=lambda table: 1 / table["slots"])
    if len(several):
        means = several.groupby("document")[["fullest", "even"]].mean()
        findings.add(FULLEST, means["fullest"], moment=moment)
        findings.set(EVEN, means["even"].mean(), moment=moment)
    return findings


def _decoded(trace: Trace, zsmerge: Policy, steps: int) -> LayerStore:
    """The store of all layers after the prefill and so many decoding steps, in double precision."""
    store = LayerStore(trace.prompt_keys.double(), trace.prompt_values.double())
    zsmerge.compress(store, trace.prompt)
    for step in range(steps):
        now = slice(trace.prompt_length + step, trace.prompt_length + step + 1)
        query = trace.response_queries[:, :, step : step + 1].double()
        entry = trace.keys[:, :, now].double(), trace.values[:, :, now].double()
        attended = decode(zsmerge, store, query, *entry, trace.softmax, weigh=True)
        zsmerge.step(store, attended.weights)
    return store


def _appended(trace: Trace, store: LayerStore, step: int) -> tuple[Tensor, int]:
    """Appends the next token; its query `[layers, heads, 1, head_dim]` and its position."""
    new = trace.prompt_length + step
    store.append(trace.keys[:, :, new : new + 1].double(), trace.values[:, :, new : new + 1].double())
    return trace.response_queries[:, :, step : step + 1].double(), new


def _slots(store: LayerStore, row: int, kv_head: int) -> dict[str, float]:
    """How many residual slots a KV head has, and the share of the tokens in them that the fullest holds."""
    counts = store.fusion_counts[row, kv_head][store.column("residual")[row, kv_head]]
    return {"slots": len(counts), "fullest": float(counts.max() / counts.sum()) if len(counts) else float("nan")}


def theorem_1_in_words(findings: Findings, moment: str = AFTER_PREFILL) -> str:
    """Describe the result of `theorem_1` in one line."""
    entries, merges = findings.table["entries"].sum(), findings.table["merges"].sum()
    violations = findings.row(VIOLATIONS, moment=moment).value
    margin = findings.row(SMALLEST_MARGIN, moment=moment).value
    return (
        f"{entries:,} unmerged entries after {merges:,} merges, {violations:.0f} violations, "
        f"smallest margin {margin:.1e}"
    )
