"""SnapKV with a set for each query head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.layer_budgets import SMALL, replayed
from support.tensors import exact, layer, sets, shaken

import kvlab


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "length, parameters", [(45, dict(budget=20, **SMALL)), (90, dict(budget=40)), (1000, dict(budget=100, window=4))]
)
def test_snapkv_by_query_head_keeps_what_the_oracle_keeps(heads, kv_heads, length, parameters):
    queries, keys, values = layer(length + kv_heads, heads, kv_heads, prompt=length, layers=2)
    kept = kvlab.policy("snapkv", sets="head", **parameters).keep(queries, keys, values)
    assert kept.dtype == torch.int64 and kept.shape == (2, heads, parameters["budget"])
    for b in range(2):
        arrays = exact(queries[b], keys[b], values[b])
        expected = oracles.oracle_snapkv_by_head(*arrays, length, **parameters)[0]["read"]
        assert oracles.oracle_snapkv_by_head(*shaken(*arrays), length, **parameters)[0]["read"] == expected
        assert sets(kept[b]) == [list(row) for row in expected]


def test_snapkv_by_query_head_is_snapkv_where_every_head_has_its_own_keys():
    tensors = layer(16, 4, 4, prompt=70, layers=2)
    policy = kvlab.policy("snapkv", budget=20, **SMALL)
    assert policy.replace(sets="head").keep(*tensors).equal(policy.keep(*tensors))


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_snapkv_by_query_head_in_a_replay(heads, kv_heads):
    prompt, steps, budget = 50, 12, 20
    tensors = layer(17, heads, kv_heads, prompt=prompt, new=steps, layers=2)
    result = replayed(tensors, prompt, "snapkv", budget=budget, sets="head", **SMALL)
    group, recalls, step_recalls = heads // kv_heads, [], []
    for index in range(2):
        arrays = exact(*(t[index] for t in tensors))
        expected = oracles.oracle_snapkv_by_head(*arrays, prompt, budget, **SMALL)
        for t in range(steps + 1):
            assert sets(result.kept(index, t)) == [list(p) for p in expected[t]["read"]], f"read at step {t}"
            assert sets(result.stored(index, t)) == [list(p) for p in expected[t]["stored"]], f"stored after {t}"
        # Gold sets are those of the group, what is lost and how far outputs move is each head's own.
        by_group = [0] * (steps + 1)
        gold = oracles.gold_topk(arrays[0][:, prompt:], arrays[1][:, :prompt], budget)
        recalls += oracles.recall(expected[0]["read"], [gold[h // group] for h in range(heads)])
        for t in range(1, steps + 1):
            weights = oracles.decoding_weights(arrays[0], arrays[1], prompt, t)
            full = [oracles.attention_output(weights[h], arrays[2][h // group, : prompt + t]) for h in range(heads)]
            lost = oracles.mass_lost(weights, expected[t]["read"])
            np.testing.assert_allclose(result.mass_lost[index, :, t - 1], lost, atol=1e-5)
            error = oracles.output_error(full, expected[t]["output"])
            np.testing.assert_allclose(result.output_error[index, :, t - 1], error, atol=1e-5)
            own = [
                oracles.top_positions(oracles.summed_over_group(weights, g, kv_heads), budget) for g in range(kv_heads)
            ]
            by_group[t] = oracles.recall(expected[t]["read"], [own[h // group] for h in range(heads)])
            step_recalls += by_group[t]
    assert result.summary["recall"] == pytest.approx(np.mean(recalls), abs=1e-6)
    assert result.summary["step_recall"] == pytest.approx(np.mean(step_recalls), abs=1e-6)


def test_a_set_for_each_query_head_costs_the_group_size():
    tensors = layer(18, 8, 2, prompt=50, new=6, layers=3)
    grouped, by_head = (replayed(tensors, 50, "snapkv", budget=20, sets=how, **SMALL) for how in ("group", "head"))
    entry = 2 * 16 * 4
    for t in range(1, 7):
        assert int(grouped.stored_bytes[t - 1]) == 3 * 2 * (20 + t) * entry
        assert int(by_head.stored_bytes[t - 1]) == 3 * 8 * (20 + t) * entry == int(by_head.read_bytes[t - 1])


@pytest.mark.parametrize("length", [1, 8, 20])
def test_a_prompt_within_the_budget_is_kept_whole_by_every_head(length):
    tensors = layer(19, 8, 2, prompt=length, layers=1)
    kept = kvlab.policy("snapkv", budget=20, sets="head", **SMALL).keep(*tensors)
    assert {tuple(row) for row in sets(kept[0])} == {tuple(range(length))}
