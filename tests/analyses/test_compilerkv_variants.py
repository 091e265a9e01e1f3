"""CompilerKV's variants on small random traces: what each keeps, against scores computed one query at a time."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
from support.compilerkv import (
    CELLS,
    KV_HEADS,
    LAYERS,
    PROMPT,
    RISK,
    SHARE,
    TRACES,
    WEIGHTS,
    best,
    kept,
    tables,
    window_attention,
)
from support.measured_files import table_file

from kvlab.analyses.compilerkv import ablation, variants
from kvlab.methods import policy


def test_variants_keep_what_their_words_say():
    """Without tables(), against scores computed one query at a time."""
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


def test_a_part_taken_away_is_a_table_made_neutral(tmp_path):
    trace, budget = TRACES[0], 300
    alone = policy("compilerkv", budget=budget, tables=table_file(tmp_path, "risk", risk=RISK))
    assert kept(trace, variants.NoHeadTable(budget=budget, tables=tables())) == kept(trace, alone)
    middle = np.sort(RISK.reshape(LAYERS, -1))[:, (RISK[0].size - 1) // 2]
    same = policy(
        "compilerkv",
        budget=budget,
        tables=table_file(tmp_path, "static", heads=WEIGHTS, risk=np.broadcast_to(middle[:, None, None], RISK.shape)),
    )
    assert kept(trace, variants.StaticThreshold(budget=budget, tables=tables())) == kept(trace, same)


def test_a_static_threshold_is_the_one_of_the_contexts_seen(tmp_path):
    """Three contexts in one cell outvote one in each of two others."""
    visited = np.zeros(CELLS, dtype=int)
    visited[3, 1], visited[0, 0], visited[19, 3] = 3, 1, 1
    path = tmp_path / "visited.json"
    path.write_text(json.dumps({"heads": WEIGHTS.tolist(), "risk": RISK.tolist(), "visited": visited.tolist()}))
    same = table_file(tmp_path, "flat", heads=WEIGHTS, risk=np.broadcast_to(RISK[:, 3:4, 1:2], RISK.shape))
    found = kept(TRACES[0], variants.StaticThreshold(budget=300, tables=str(path)))
    assert found == kept(TRACES[0], policy("compilerkv", budget=300, tables=same))


def test_variants_differ_in_what_they_drop():
    found = {name: kept(TRACES[0], method) for name, method in ablation.ablations(300, tables()).items()}
    assert list(found) == ["full", "no_head_table", "static_threshold", "raw_attention", "no_gate"]
    names = list(found)
    for number, name in enumerate(names):
        assert all(found[name] != found[other] for other in names[:number]), name
    for gated, free in zip(found["full"], found["no_gate"], strict=True):
        assert set(gated[0]) < set(free[0]) and len(free[0]) == 300


def test_static_thresholds_need_no_table():
    neutral = policy("compilerkv", budget=40)
    assert kept(TRACES[0], variants.StaticThreshold(budget=40)) == kept(TRACES[0], neutral)


def test_steps_to_snapkv_store_the_same_and_end_there():
    steps = variants.ladder(SHARE)
    found = [kept(TRACES[1], method) for method in steps.values()]
    assert {len(kept_set) for rows in found for layer_sets in rows for kept_set in layer_sets} == {72}
    assert found[-1] == kept(TRACES[1], policy("snapkv", budget=72)) and found[1] == kept(
        TRACES[1], policy("compilerkv", budget=72)
    )
    assert all(a != b for a, b in pairwise(found))
