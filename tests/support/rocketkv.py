"""What the tests of RocketKV's analyses share: small random traces, and their attention counted by hand, slowly."""

from __future__ import annotations

import numpy as np

from kvlab.traces.trace import Trace
from support import oracles
from support.tensors import layer

PROMPT, STEPS, LAYERS, HEADS, KV_HEADS, DIM = 900, 8, 3, 4, 2, 16
TOTAL = PROMPT + STEPS
GROUP = HEADS // KV_HEADS


def random_trace(seed: int, prompt: int = PROMPT, steps: int = STEPS) -> Trace:
    trace = Trace.from_tensors(*layer(seed, HEADS, KV_HEADS, DIM, prompt, steps, layers=LAYERS), prompt)
    trace.meta["document"] = f"random/{seed}"
    return trace


def random_traces() -> list[Trace]:
    return [random_trace(seed) for seed in (3, 5, 8)]


def attention(trace, layer_index, head, step):
    """Full attention of one query head at a step, from 1, in float64."""
    query = trace.response_queries[layer_index, head, step - 1].double().numpy()
    keys = trace.keys[layer_index, head // GROUP, : trace.prompt_length + step].double().numpy()
    return oracles.attention_weights(query, keys)


def every(trace):
    return [(i, h, t) for i in range(LAYERS) for h in range(HEADS) for t in range(1, trace.steps + 1)]


def top_of_group(trace, layer_index, kv_head, step, k):
    summed = sum(attention(trace, layer_index, kv_head * GROUP + g, step) for g in range(GROUP))
    return set(np.argsort(-summed)[:k].tolist())


def rows_of(found, **where):
    table = found.table
    for column, value in where.items():
        table = table[table[column] == value]
    return table.set_index("document")
