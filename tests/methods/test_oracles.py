"""The oracles themselves, on examples small enough to check by hand."""

import numpy as np
import pytest
from support import oracles
from support.tensors import exact, layer, with_attention


def test_attention_is_uniform_for_a_query_of_zeros_and_causal():
    attention = oracles.attention_over_prompt(np.zeros((2, 2, 4)), np.ones((1, 5, 4)), positions=[1, 3])
    np.testing.assert_allclose(attention[0], [[0.5, 0.5, 0, 0, 0], [0.25, 0.25, 0.25, 0.25, 0]])


def test_crafted_attention_is_what_was_asked_for():
    rows = [[1, 0, 0], [0.4, 0.6, 0], [0.2, 0.3, 0.5]]
    queries, keys = with_attention(rows)
    np.testing.assert_allclose(oracles.attention_over_prompt(queries, keys, [0, 1, 2])[0], rows, atol=1e-12)


def test_top_positions_prefers_the_earlier_of_equals():
    assert oracles.top_positions([1, 3, 2, 3, 2], 3) == [1, 2, 3]
    assert oracles.lowest([0.2, 0.1, 0.1, 0.5]) == 2


def test_entropy_and_error_by_hand():
    assert oracles.entropy([0.25] * 4) == pytest.approx(np.log(4))
    assert oracles.output_error(np.array([[3.0, 4.0]]), np.array([[3.0, 3.0]]))[0] == pytest.approx(0.2)
    assert oracles.mass_lost([[0.5, 0.3, 0.2]], [[0, 2]])[0] == pytest.approx(0.3)


def test_streamingllm_rolls():
    queries, keys, values = exact(*layer(0, prompt=10, new=3))
    steps = oracles.oracle_streamingllm(queries, keys, values, 10, budget=6)
    assert [step["read"][0] for step in steps] == [
        [0, 1, 2, 3, 8, 9],
        [0, 1, 2, 3, 8, 9, 10],
        [0, 1, 2, 3, 9, 10, 11],
        [0, 1, 2, 3, 10, 11, 12],
    ]
    assert steps[3]["stored"][0] == [0, 1, 2, 3, 11, 12]


def test_snapkv_pools_with_zeros_counted():
    """Window of 2 over 6 tokens: raw scores .7 .1 .2 .4 of the older ones; pooled by 3: .8 1 .7 .6 (all over 3)."""
    rows = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    rows[4] = [0.4, 0.1, 0.1, 0.1, 0.3, 0]
    rows[5] = [0.3, 0, 0.1, 0.3, 0.2, 0.1]
    queries, keys = with_attention(rows)
    kept = {
        budget: oracles.oracle_snapkv(queries, keys, keys, 6, budget, window=2, kernel=3)[0]["read"][0]
        for budget in (3, 4, 6)
    }
    # an average over the true neighbours only would put token 0 first (.8 / 2)
    assert kept == {3: [1, 4, 5], 4: [0, 1, 4, 5], 6: list(range(6))}


def test_morphkv_walk_through_of_section_3_2():
    """Old tokens me, today's; recent ones weather, The. Fused scores 0.1 and 0.6; with C = 1 today's stays."""
    me, today, weather, the = range(4)
    queries, keys = with_attention([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.05, 0.30, 0.65, 0], [0.05, 0.30, 0.35, 0.30]])
    attention = oracles.attention_over_prompt(queries, keys, range(4))[0]
    assert attention[[weather, the], today].sum() == pytest.approx(0.6)
    assert attention[[weather, the], me].sum() == pytest.approx(0.1)
    for fusion in ("sum", "max"):
        steps = oracles.oracle_morphkv(queries, keys, keys, 3, budget=3, window=2, fusion=fusion)
        assert steps[0]["stored"] == [[me, today, weather]]
        assert steps[1]["read"] == [[me, today, weather, the]]
        assert steps[1]["stored"] == [[today, weather, the]]


def test_morphkv_sum_and_max_differ_where_they_should():
    """Token 0 gets .2 + .2 of the window, token 1 gets .35 + 0: the sum keeps the former, the maximum the latter."""
    queries, keys = with_attention([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.35, 0.45, 0], [0.2, 0, 0.4, 0.4]])
    kept = {
        fusion: oracles.oracle_morphkv(queries, keys, keys, 3, budget=3, window=2, fusion=fusion)[1]["stored"][0]
        for fusion in ("sum", "max")
    }
    assert kept == {"sum": [0, 2, 3], "max": [1, 2, 3]}


def test_morphkv_renormalises_each_head_before_the_groups_maximum():
    """One head gives .02 + .01 to the older tokens, the other .30 + .50: by itself the first prefers token 0 by .67."""
    rows = np.array([[0.02, 0.01, 0.97], [0.30, 0.50, 0.20]])
    np.testing.assert_allclose(oracles.combined(rows, "max", 2)[:2], [2 / 3, 5 / 8])
    np.testing.assert_allclose(oracles.combined(rows, "sum", 2)[:2], [2 / 3 + 3 / 8, 1 / 3 + 5 / 8])
    np.testing.assert_allclose(oracles.combined(rows, "max")[:2], [0.30, 0.50])


def test_zsmerge_shares():
    assert oracles.zsmerge_shares(512) == (256, 251, 5)
    assert oracles.zsmerge_shares(256) == (128, 126, 2), "2.56 slots are two, as in the authors' code"
    assert oracles.zsmerge_shares(5) == (2, 2, 1)
    assert oracles.zsmerge_shares(16, residual=0) == (8, 8, 0)
    assert oracles.zsmerge_shares(16, residual=3) == (8, 5, 3)


def test_zsmerge_by_hand():
    """Budget 4 = 2 recent + 1 context + 1 residual over six prompt tokens, then one step."""
    rows = np.zeros((7, 7))
    rows[:4, 0] = 1
    rows[4, :5] = [0.1, 0.1, 0.5, 0.1, 0.2]
    rows[5, :6] = [0.1, 0.1, 0.4, 0.2, 0.1, 0.1]
    rows[6] = [0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2]
    queries, keys = with_attention(rows)
    steps = oracles.oracle_zsmerge(queries, keys, keys, 6, budget=4, window=2)
    # scores .198 .198 .89 .298 of the four older ones: 2 is context, 0 1 3 merge into the slot at 0
    assert steps[0]["read"] == [[0, 2, 4, 5]] and steps[0]["weights"] == [[3, 1, 1, 1]]
    np.testing.assert_allclose(steps[0]["keys"][0][0], np.eye(7)[[0, 1, 3]].mean(axis=0))
    # 4 leaves the recent part (.98 x .296 + its weight) and loses against 2, so it merges: the mean of four
    assert steps[1]["read"] == [[0, 2, 4, 5, 6]]
    assert steps[1]["stored"] == [[0, 2, 5, 6]] and steps[1]["weights"] == [[4, 1, 1, 1]]
    np.testing.assert_allclose(steps[1]["values"][0][0], np.eye(7)[[0, 1, 3, 4]].mean(axis=0))


def test_zsmerge_twin_only_evicts_and_theorem_1_holds():
    queries, keys, values = exact(*layer(3, prompt=30, new=6))
    twin = oracles.oracle_zsmerge(queries, keys, values, 30, budget=10, residual=0)
    assert all(w == 1 for step in twin for group in step["weights"] for w in group)
    steps = oracles.oracle_zsmerge(queries, keys, values, 30, budget=10)
    assert all(len(kept) == 10 for step in steps for kept in step["stored"])
    query = queries[0, 30]
    full = oracles.attention_weights(query, keys[0, :30])
    merged = oracles.attention_weights(query, steps[0]["keys"][0], steps[0]["weights"][0], alpha=1.0)
    for position, weight, count in zip(steps[0]["read"][0], merged, steps[0]["weights"][0]):
        assert count > 1 or weight >= full[position]
    assert sum(steps[0]["weights"][0]) == 30


def test_full_loses_nothing():
    queries, keys, values = exact(*layer(4, prompt=20, new=4))
    steps = oracles.oracle_full(queries, keys, values, 20)
    measured = oracles.replay_measures(queries, keys, values, 20, steps, budget=8)
    assert np.abs(measured["mass_lost"]).max() < 1e-12 and np.abs(measured["output_error"]).max() < 1e-12
    assert (measured["recall"] == 1).all() and (measured["step_recall"] == 1).all()
