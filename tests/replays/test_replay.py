"""Replay over many decoding steps against the oracles: retained positions, outputs, lost mass, and the summary."""

import numpy as np
import pytest
import torch
from support import oracles
from support.cases import named
from support.replaying import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PROMPT,
    STEPS,
    agrees_on_one_layer,
    from_table,
    key,
    measured_by_oracle,
    oracle,
    replayed,
    tensors,
    trace,
)
from support.spread import students
from support.tensors import exact, sets

import kvlab
from kvlab.errors import KvlabError

CASES = [
    ("full", {}),
    ("streamingllm", dict(budget=12)),
    ("streamingllm", dict(budget=60)),  # fills up while decoding
    ("snapkv", dict(budget=40)),
    ("snapkv", dict(budget=20, window=8, kernel=5)),
    ("dapq", dict(budget=16)),
    ("zsmerge", dict(budget=16)),
    ("zsmerge", dict(budget=16, residual=0)),
    ("zsmerge", dict(budget=16, alpha=0.0)),
    ("zsmerge", dict(budget=20, residual=0.3, window=4, decay=0.5, alpha=0.5)),
    ("zsmerge", dict(budget=60)),
    ("zsmerge", dict(budget=60, residual=0.1)),
    ("zsmerge", dict(budget=50, residual=0.2)),  # fits, but its older part exceeds the context's share
    ("zsmerge", dict(budget=20, residual=3, initial="similarity")),
    ("zsmerge", dict(budget=18, residual=2, newcomer="displaces")),
    ("morphkv", dict(budget=16, window=6)),
    ("morphkv", dict(budget=16, window=6, fusion="max")),
    ("morphkv", dict(budget=40)),
    ("morphkv", dict(budget=60, window=20)),
    ("morphkv", dict(budget=10, window=2, fusion="max")),
    ("morphkv", dict(budget=16, window=6, aggregation="max")),
    ("morphkv", dict(budget=16, window=6, aggregation="logits")),
    ("morphkv", dict(budget=16, window=6, renormalise=True)),
    ("morphkv", dict(budget=16, window=6, aggregation="max", renormalise=True)),
    ("morphkv", dict(budget=24, window=8, aggregation="max", renormalise=True, fusion="max")),
    ("morphkv", dict(budget=16, window=6, aggregation="logits", renormalise=True)),
]
ROLLING = {"streamingllm", "zsmerge", "morphkv"}  # these bound what is stored while decoding


@pytest.mark.parametrize("case", CASES, ids=named)
def test_positions_at_every_step(case):
    result = replayed(*key(*case))
    for index, steps in enumerate(oracle(*key(*case))):
        for t in range(STEPS + 1):
            assert sets(result.kept(index, t)) == [list(p) for p in steps[t]["read"]], f"read at layer {index} step {t}"
            assert sets(result.stored(index, t)) == [list(p) for p in steps[t]["stored"]], f"stored after step {t}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_lost_mass_and_output_error_at_every_step(case):
    result = replayed(*key(*case))
    for index in range(LAYERS):
        expected = measured_by_oracle(*key(*case), index)
        for measure in ("mass_lost", "output_error"):
            found = from_table(result, measure, index, "head")
            assert found.shape == (STEPS, HEADS)
            np.testing.assert_allclose(found, expected[measure], atol=1e-5, err_msg=f"{measure}, layer {index}")
        found = from_table(result, "step_recall", index, "kv_head")
        np.testing.assert_allclose(found, expected["step_recall"], atol=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in ("full", "snapkv", "morphkv")], ids=named)
def test_policies_of_different_budgets_are_asked_for_one_top(case):
    """Each policy's own budget is no measure of recall beside others: six of the top 6 against six of the top 20."""
    name, parameters = case
    for k in (6, PROMPT + STEPS):
        asked = kvlab.replay(trace(), kvlab.policy(name, **parameters), k=k)
        expected = []
        for index in range(LAYERS):
            arrays = [a[index] for a in exact(*tensors())]
            steps = oracle(*key(*case))[index]
            expected.append(oracles.replay_measures(*arrays[:3], PROMPT, steps, k))
        for measure in ("recall", "step_recall"):
            mean = np.mean([layer[measure] for layer in expected])
            assert asked.summary[measure] == pytest.approx(mean, abs=1e-5), measure
        (row,) = kvlab.replay([trace()], [kvlab.policy(name, **parameters)], k=k).summary.to_dict("records")
        assert row["step_recall"] == pytest.approx(asked.summary["step_recall"], abs=1e-6)


@pytest.mark.parametrize(("k", "message"), [(0, "not for the top 0"), (2.5, "must be a whole number, and is 2.5")])
def test_a_top_that_is_none_is_refused(k, message):
    with pytest.raises(KvlabError, match=message):
        kvlab.replay(trace(), kvlab.policy("full"), k=k)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_summary_is_the_mean_of_the_definitions(case):
    summary = replayed(*key(*case)).summary
    layers = [measured_by_oracle(*key(*case), index) for index in range(LAYERS)]
    for measure in ("recall", "step_recall", "mass_lost", "output_error"):
        assert summary[measure] == pytest.approx(np.mean([m[measure] for m in layers]), abs=1e-5), measure


@pytest.mark.parametrize(
    "name, parameters, seen",
    [
        ("snapkv", dict(budget=20, window=8, kernel=5), dict(window=8)),
        ("snapkv", dict(budget=40), dict(window=32)),
        ("dapq", dict(budget=16), dict(pseudo=True)),
    ],
)
def test_window_recall_uses_raw_scores(name, parameters, seen):
    expected = []
    for queries, keys, _, pseudo in zip(*exact(*tensors())):
        how = dict(pseudo=pseudo) if "pseudo" in seen else seen
        expected += oracles.window_recall(queries, keys, PROMPT, parameters["budget"], **how)
    found = kvlab.replay(trace(), kvlab.policy(name, **parameters)).summary["window_recall"]
    assert found == pytest.approx(np.mean(expected), abs=1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c[0] in ROLLING], ids=named)
def test_the_budget_bounds_what_is_stored_after_every_step(case):
    result = replayed(*key(*case))
    budget = case[1]["budget"]
    for index in range(LAYERS):
        for t in range(1, STEPS + 1):
            own = PROMPT + t - 1
            for read, stored in zip(sets(result.kept(index, t)), sets(result.stored(index, t))):
                assert len(stored) == min(budget, PROMPT + t) and own in stored
                assert read[-1] == own
                assert len(read) == min(budget + 1, PROMPT + t) or (case[0] == "morphkv" and t == 1)


def test_sinks_survive_every_eviction():
    result = replayed(*key("streamingllm", dict(budget=12)))
    for t in range(STEPS + 1):
        for kept in sets(result.stored(1, t)):
            assert kept[:4] == [0, 1, 2, 3]


def test_prefill_only_policies_keep_every_generated_token():
    for case in [("snapkv", dict(budget=40)), ("dapq", dict(budget=16)), ("random", dict(budget=16, seed=3))]:
        result = replayed(*key(*case))
        first = sets(result.kept(0, 0))
        assert all(len(kept) == case[1]["budget"] for kept in first)
        for t in range(1, STEPS + 1):
            expected = [kept + list(range(PROMPT, PROMPT + t)) for kept in first]
            assert sets(result.kept(0, t)) == expected and sets(result.stored(0, t)) == expected


def test_merging_errs_less_than_its_eviction_twin():
    """On average, with alpha = 1 (the direction of the paper's figure 4)."""
    merge = replayed(*key("zsmerge", dict(budget=16)))
    twin = replayed(*key("zsmerge", dict(budget=16, residual=0)))
    assert merge.summary["output_error"] < twin.summary["output_error"]


# Bytes


def test_bytes_of_the_full_cache_and_of_a_rolling_one():
    entry = 2 * HEAD_DIM * 4 * KV_HEADS * LAYERS  # key and value, float32
    full = replayed(*key("full", {})).summary
    mean_length = PROMPT + (STEPS + 1) / 2
    assert full["stored_bytes"] == pytest.approx(entry * mean_length)
    assert full["read_bytes"] == pytest.approx(entry * mean_length)
    rolling = replayed(*key("streamingllm", dict(budget=12))).summary
    assert rolling["stored_bytes"] == pytest.approx(entry * 12)
    assert rolling["read_bytes"] == pytest.approx(entry * 13)
    merge = replayed(*key("zsmerge", dict(budget=16))).summary
    twelve_more = 16 * KV_HEADS * LAYERS * 4  # at least one number beside each entry: its score
    assert entry * 16 + twelve_more <= merge["stored_bytes"] <= entry * 16 * 1.3


def test_the_table_is_tidy():
    table = replayed(*key("morphkv", dict(budget=16, window=6))).table
    assert {"policy", "budget", "entries", "layer", "kv_head", "head", "step", "measure", "value"} <= set(table.columns)
    assert not table.value.isna().any()
    rows = table[table.measure == "mass_lost"]
    assert len(rows) == LAYERS * HEADS * STEPS
    assert (rows.kv_head == rows["head"] // (HEADS // KV_HEADS)).all()


def test_dtype_of_positions():
    result = replayed(*key("streamingllm", dict(budget=12)))
    assert result.kept(0, 0).dtype == torch.int64 and result.kept(0, 0).shape == (KV_HEADS, 12)


# Other shapes, sizes and numbers


def test_replay_of_a_multi_query_and_a_multi_head_layer():
    for heads, kv_heads in ((4, 1), (3, 3)):
        agrees_on_one_layer(heads, kv_heads, PROMPT, 20, "zsmerge", dict(budget=14))
        agrees_on_one_layer(heads, kv_heads, PROMPT, 20, "morphkv", dict(budget=14, window=5))


@pytest.mark.parametrize("prompt", [1, 3, 9])
@pytest.mark.parametrize(
    "name, parameters",
    [
        ("streamingllm", dict(budget=12)),
        ("zsmerge", dict(budget=16)),
        ("zsmerge", dict(budget=10, residual=2)),
        ("morphkv", dict(budget=16, window=6)),
        ("morphkv", dict(budget=14, window=12, fusion="max")),
        ("morphkv", dict(budget=7, window=6, aggregation="max", renormalise=True)),
        ("morphkv", dict(budget=14, window=12, renormalise=True)),
        ("snapkv", dict(budget=40)),
    ],
)
def test_a_short_prompt_outgrown_by_its_response(prompt, name, parameters):
    agrees_on_one_layer(4, 2, prompt, 30, name, parameters)


@pytest.mark.parametrize(
    "name, parameters",
    [("streamingllm", dict(budget=6)), ("morphkv", dict(budget=16, window=6)), ("zsmerge", dict(budget=16))],
)
def test_attention_with_logits_hundreds_apart(name, parameters):
    agrees_on_one_layer(4, 2, PROMPT, 20, name, parameters, spread=60)


def test_half_precision_traces():
    queries, keys, values, _ = (t.half() for t in tensors())
    result = kvlab.replay(kvlab.Trace.from_tensors(queries, keys, values, PROMPT), kvlab.policy("zsmerge", budget=16))
    for index in range(LAYERS):
        arrays = exact(queries[index], keys[index], values[index])
        steps = oracles.oracle_zsmerge(*arrays, PROMPT, budget=16)
        assert sets(result.stored(index, STEPS)) == steps[STEPS]["stored"]
        expected = oracles.replay_measures(*arrays, PROMPT, steps, 16)
        np.testing.assert_allclose(result.output_error[index].T, expected["output_error"], atol=5e-3)


def test_theorem_1_on_real_slots():
    """No uncompressed token gets less weight than in the full cache; an identity, so it checks the arithmetic."""
    arrays = [a[0] for a in exact(*tensors())]
    for alpha in (1.0, 0.5):
        steps = oracle(*key("zsmerge", dict(budget=20, residual=0.3, window=4, decay=0.5, alpha=0.5)))[0]
        step, t = steps[20], 21
        full = oracles.decoding_weights(arrays[0], arrays[1], PROMPT, t)
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            query = arrays[0][head, arrays[0].shape[1] - STEPS + t - 1]
            slots = step["keys"][group] + [arrays[1][group, PROMPT + t - 1]]
            counts = step["weights"][group] + [1.0]
            weights = oracles.attention_weights(query, slots, counts, alpha)
            for position, weight, count in zip(step["stored"][group] + [PROMPT + t - 1], weights, counts):
                assert count > 1 or weight >= full[head, position] - 1e-12


def test_several_traces_give_means_with_intervals():
    traces = [trace(seed) for seed in (21, 22, 23)]
    several = kvlab.replay(traces, ["streamingllm", "zsmerge"], budgets=[12, 20])
    found = several.intervals.set_index(["policy", "budget", "measure"])
    assert len(found) == 2 * 2 * 7 and set(found.traces) == {3}
    for (name, budget), rows in several.summary.groupby(["policy", "budget"]):
        for measure in ("recall", "mass_lost", "stored_bytes"):
            row = found.loc[name, budget, measure]
            assert row.value == pytest.approx(rows[measure].mean())
            assert (row.low, row.high) == pytest.approx(students(rows[measure]), rel=1e-4, abs=1e-9)
