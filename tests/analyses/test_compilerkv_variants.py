"""CompilerKV's variants on small random traces: what each keeps, against scores computed one query at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from support.compilerkv import (
    CELLS,
    KV_HEADS,
    LAYERS,
    PROMPT,
    SHARE,
    TRACES,
    WEIGHTS,
    best,
    kept,
    window_attention,
)
from support.measured_files import table_file

from kvlab.analyses.compilerkv import variants
from kvlab.methods import policy


def test_variants_keep_what_their_words_say():
    """Without tables, against scores computed one query at a time."""
    trace, budget = TRACES[0], 40
    attention = window_attention(trace)
    model = attention.mean((0, 1))
    assert kept(trace, policy("compilerkv", budget=budget, norms="none")) == [[best(model, budget)] * KV_HEADS] * LAYERS
    by_layer = [[best(rows.mean(0), budget)] * KV_HEADS for rows in attention]
    assert kept(trace, variants.LayerMean(budget=budget)) == by_layer
    largest = [[best(rows.max(0), budget)] * KV_HEADS for rows in attention]
    assert kept(trace, variants.RawAttention(budget=budget)) == largest
    groups = attention.reshape(LAYERS, KV_HEADS, -1, PROMPT).sum(2)
    assert kept(trace, variants.GroupSets(budget=budget)) == [[best(row, budget) for row in rows] for rows in groups]


def test_raw_attention_is_weighted_and_gated(tmp_path):
    trace, budget = TRACES[0], 40
    scores = (window_attention(trace) * WEIGHTS[..., None]).max(1)
    path = table_file(tmp_path, "gate", heads=WEIGHTS, risk=np.full((LAYERS, *CELLS), 0.5))
    passing = [np.flatnonzero(row >= 0.5 * row.max()).tolist() for row in scores]
    assert all(0 < len(row) < budget for row in passing)
    assert kept(trace, variants.RawAttention(budget=budget, tables=path)) == [[row] * KV_HEADS for row in passing]


def test_steps_to_snapkv_store_the_same_and_end_there():
    steps = variants.ladder(SHARE)
    found = [kept(TRACES[1], method) for method in steps.values()]
    assert {len(kept_set) for rows in found for layer_sets in rows for kept_set in layer_sets} == {72}
    assert found[-1] == kept(TRACES[1], policy("snapkv", budget=72)) and found[1] == kept(
        TRACES[1], policy("compilerkv", budget=72)
    )
    assert all(a != b for a, b in pairwise(found))
