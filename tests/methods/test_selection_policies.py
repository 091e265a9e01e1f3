"""Quest, SparQ, hybrid attention, RocketKV and SnapKV++: step by step against the plain loops, and their promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.cases import SHAPES, named
from support.refusals import refusal
from support.stepwise import HEAD_DIM, LAYERS, SELECTING, agrees, decided, inputs, never_comes_back, tensor, watched
from support.tensors import exact, layer, sets, shaken, with_attention

import kvlab
from kvlab.errors import KvlabError

CASES = [
    ("snapkv_pp", dict(budget=36)),
    ("snapkv_pp", dict(budget=20, window=8, kernel=5)),
    ("snapkv_pp", dict(budget=20, window=8, short=3, long=9, threshold=100)),
    ("quest", dict(budget=24)),  # pages as wide as all that is read
    ("quest", dict(budget=40, page=4)),
    ("quest", dict(budget=60, page=3)),  # a prompt of 40 is read whole at first
    ("quest", dict(budget=41, page=1, last="cut")),  # the last page in part
    ("sparq", dict(budget=24)),
    ("sparq", dict(budget=31, rank=5)),
    ("sparq", dict(budget=60)),
    ("hybrid", dict(budget=24)),
    ("hybrid", dict(budget=31, page=3, rank=6)),
    ("hybrid", dict(budget=60)),
    ("rocketkv", dict(budget=24, window=8, short=5)),
    ("rocketkv", dict(budget=24, window=8, short=5, split="adaptive")),
    ("rocketkv", dict(budget=60, window=8, kernel=3)),
    ("rocketkv", dict(budget=24, window=8, short=5, turns="multi")),
    ("rocketkv", dict(budget=40, window=8, kernel=3, turns="multi")),
]

LONG = [
    ("snapkv_pp", dict(budget=128)),
    ("quest", dict(budget=128)),
    ("quest", dict(budget=100, page=1, last="cut")),
    ("sparq", dict(budget=200)),
    ("hybrid", dict(budget=128)),
    ("rocketkv", dict(budget=128)),
    ("rocketkv", dict(budget=128, split="adaptive")),
]


def run_of(policy, prompt):
    """The policy's oracle as a function of queries, keys and values of one layer."""
    return lambda *arrays: getattr(oracles, f"oracle_{policy.name}")(*arrays, prompt, **dict(policy))


def holds(policy, seed, heads, kv_heads, prompt, steps, size=1e-5):
    tensors = inputs(seed, heads, kv_heads, prompt, steps)
    result, watch = watched(policy, tensors, prompt)
    for index in range(LAYERS):
        agrees(result, watch, index, decided(run_of(policy, prompt), [t[index] for t in tensors], size))
        never_comes_back(result, index, steps)


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("prompt", [40, 150])
def test_fifty_steps_go_as_the_oracle_says(case, heads, kv_heads, prompt):
    holds(kvlab.policy(case[0], **case[1]), prompt + heads + kv_heads, heads, kv_heads, prompt, 50, size=1e-6)


@pytest.mark.parametrize("case", LONG, ids=named)
def test_a_prompt_of_1500(case):
    holds(kvlab.policy(case[0], **case[1]), 3, 4, 2, 1500, 50, size=5e-7)


@pytest.mark.parametrize("case", [c for c in CASES + LONG if c[0] == "rocketkv"], ids=named)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_keep_of_a_batch_is_the_first_stage(case, heads, kv_heads):
    policy, prompt, new = kvlab.policy(case[0], **case[1]), 160, 40
    first_stage = {name: value for name, value in policy if name != "turns"}
    tensors = inputs(heads + kv_heads, heads, kv_heads, prompt, new)
    kept = policy.keep(*(t[:, :, :prompt] for t in tensors), max_new_tokens=new)
    for row in range(2):
        arrays = exact(*(t[row] for t in tensors[:2]))
        expected = [oracles.rocketkv_kept(*a, prompt, **first_stage) for a in (arrays, shaken(*arrays))]
        assert sets(kept[row]) == expected[0] == expected[1]


@pytest.mark.parametrize("case", [c for c in CASES + LONG if c[0] == "snapkv_pp"], ids=named)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_keep_of_a_batch_is_snapkv_pps_choice(case, heads, kv_heads):
    policy, tensors = kvlab.policy(case[0], **case[1]), inputs(heads + kv_heads, heads, kv_heads, 160)
    kept = policy.keep(*tensors)
    for row in range(2):
        assert sets(kept[row]) == decided(run_of(policy, 160), [t[row] for t in tensors])[0]["stored"]


@pytest.mark.parametrize("name", ["quest", "sparq", "hybrid"])
def test_keep_of_a_policy_without_a_first_stage_is_everything(name):
    kept = kvlab.policy(name, budget=20).keep(*inputs(1, 4, 2, 70), max_new_tokens=10)
    assert kept.dtype == torch.int64 and sets(kept[1]) == [list(range(70))] * 2


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    length=st.integers(20, 150),
    kernel=st.sampled_from([1, 3, 9, 63]),
    budgets=st.lists(st.integers(9, 160), min_size=2, max_size=4),
)
def test_snapkv_pp_sets_are_nested_as_the_budget_grows(seed, length, kernel, budgets):
    tensors = layer(seed, 4, 2, 8, length, layers=1)
    kept = [
        sets(kvlab.policy("snapkv_pp", budget=b, window=8, kernel=kernel).keep(*tensors)[0]) for b in sorted(budgets)
    ]
    for smaller, larger in zip(kept, kept[1:]):
        assert all(set(a) <= set(b) for a, b in zip(smaller, larger))


def test_snapkv_pp_chooses_its_kernel_by_the_prompts_length():
    tensors = inputs(4, 4, 2, 120)
    for threshold, kernel in [(121, 5), (120, 31)]:
        adaptive = kvlab.policy("snapkv_pp", budget=40, window=8, short=5, long=31, threshold=threshold)
        fixed = kvlab.policy("snapkv_pp", budget=40, window=8, kernel=kernel)
        assert adaptive.keep(*tensors).equal(fixed.keep(*tensors))


# What is read


def spends_at_most_its_budget(policy, tensors, prompt):
    result, watch = watched(policy, tensors, prompt)
    for t in range(1, result.trace.steps + 1):
        read, stored = (
            sum(len(p) for index in range(len(tensors[1])) for p in sets(verb(index, t)))
            for verb in (result.kept, result.stored)
        )
        heads = tensors[1].shape[0] * tensors[1].shape[1]
        spent = read + watch.overhead[t - 1] / watch.entry_bytes
        assert spent <= policy.budget * heads, f"step {t}: {read} entries, {watch.overhead[t - 1]} bytes to find them"
        assert (watch.overhead[t - 1] > 0) == (read < stored), "finding costs, and only where something is left out"


@pytest.mark.parametrize("case", [c for c in CASES + LONG if c[0] in SELECTING], ids=named)
def test_finding_and_reading_together_stay_within_the_budget(case):
    prompt = 1200 if case in LONG else 130
    spends_at_most_its_budget(kvlab.policy(case[0], **case[1]), inputs(5, 4, 2, prompt, 30), prompt)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(SELECTING),
    shape=st.sampled_from([(1, 1), (6, 2), (4, 1)]),
    seed=st.integers(0, 99),
    prompt=st.integers(10, 300),
    steps=st.integers(1, 40),
    budget=st.integers(16, 150),
)
def test_no_budget_is_overdrawn(name, shape, seed, prompt, steps, budget):
    """From 16 on: SparQ loads a dimension of all keys at least, here up to 340 / 32 entries' worth."""
    tensors = layer(seed, *shape, head_dim=HEAD_DIM, prompt=prompt, new=steps, layers=1)
    parameters = dict(window=8, short=5) if name == "rocketkv" else {}
    spends_at_most_its_budget(kvlab.policy(name, budget=budget, **parameters), tensors, prompt)


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("budget", [100, 101, 1000])
def test_a_budget_of_everything_reads_everything_directly(name, budget):
    """For RocketKV this is a compression of 1: full attention."""
    tensors = inputs(6, 4, 2, 80, 20)
    result, watch = watched(kvlab.policy(name, budget=budget), tensors, 80)
    for t in range(21):
        assert sets(result.kept(1, t)) == sets(result.stored(1, t)) == [list(range(80 + t))] * 2
    assert watch.overhead == [0] * 20
    assert result.mass_lost.max() < 1e-6 and result.output_error.max() < 1e-6


EVICTING = [(name, dict(budget=24)) for name in ("streamingllm", "scissorhands", "h2o", "keyformer")]


@pytest.mark.parametrize("case", [c for c in CASES if c[0] in SELECTING] + EVICTING, ids=named)
def test_exact_topk_loses_least_of_all_that_read_as_many(case):
    tensors = inputs(7, 8, 2, 130, 50)
    gathered = [oracles.accumulated_attention(*exact(q, k), 130) for q, k in zip(*tensors[:2])]
    result, _ = watched(kvlab.policy(case[0], **case[1]), tensors, 130, accumulated=tensor(gathered))
    most = max(result.kept(0, t).shape[1] for t in range(1, 51))
    best, _ = watched(kvlab.policy("exact_topk", budget=most), tensors, 130)
    lost, least = (r.mass_lost.unflatten(1, (2, 4)).sum(2) for r in (result, best))
    assert (least <= lost + 1e-5).all()


# The equations' numbers


@pytest.mark.parametrize(
    "length, page, rank",
    [(100, 1, 64), (120, 1, 53), (400, 2, 32), (900, 3, 21), (1000, 4, 25), (10000, 10, 6), (6400, 8, 8)],
)
def test_page_and_dimensions_of_hybrid_attention(length, page, rank):
    """Finding loads 1 / page x rank / d of the keys, about 1 / c2 of them, and never more; the budget is 100."""
    assert oracles.hybrid_settings(length, 100, 64) == (page, rank)
    assert rank / 64 / page <= 100 / length


def test_hybrid_scores_by_hand():
    """Two heads, the larger dimension, pages of two: the sign of the sum picks the maximum, here 3 and 1."""
    queries, keys = np.array([[2.0, 0.1], [-1.0, 0.3]]), np.array([[3.0, 9], [-5, 9], [1, 9], [-1, 9]])
    found = oracles.hybrid_token_scores(queries, keys, page=2, rank=1)
    rows = [np.exp(q[0] * np.array([3, 3, 1, 1]) / np.sqrt(2 * abs(q[0]) / abs(q).sum())) for q in queries]
    np.testing.assert_allclose(found, sum(row / row.sum() for row in rows) / 2)
    assert oracles.top_positions(found, 3) == [0, 1, 2]


def test_snapkv_pp_pools_by_maximum_by_hand():
    """As SnapKV's example, raw scores .7 .1 .2 .4 of the older ones: by a maximum over three .7 .7 .4 .4."""
    rows = np.eye(6)
    rows[4] = [0.4, 0.1, 0.1, 0.1, 0.3, 0]
    rows[5] = [0.3, 0, 0.1, 0.3, 0.2, 0.1]
    queries, keys = with_attention(rows)
    kept = {
        budget: oracles.oracle_snapkv_pp(queries, keys, keys, 6, budget, window=2, kernel=3)[0]["read"][0]
        for budget in (3, 4, 5)
    }
    assert kept == {3: [0, 4, 5], 4: [0, 1, 4, 5], 5: [0, 1, 2, 4, 5]}


def test_sparq_at_full_rank_weighs_by_the_true_attention():
    """With every dimension the approximation is exact: alpha is the mass that was read, and outputs follow."""
    tensors = inputs(10, 4, 2, 100, 10)
    result, watch = watched(kvlab.policy("sparq", budget=80, rank=HEAD_DIM), tensors, 100)
    arrays = exact(*(x[0] for x in tensors))
    weights = oracles.decoding_weights(*arrays[:2], 100, 10)
    for head in range(4):
        read, values = sets(result.kept(0, 10))[head // 2], arrays[2][head // 2]
        pair = weights[head // 2 * 2] + weights[head // 2 * 2 + 1]
        assert read == oracles.top_positions(pair, 80 - 110 // 2)
        alpha = weights[head][read].sum()
        expected = weights[head][read] @ values[read] + (1 - alpha) * values.mean(axis=0)
        np.testing.assert_allclose(watch.outputs[-1][0, head], expected, atol=1e-5)


def test_sparqs_mean_value_helps():
    """Of tokens that share a mean, what is not read is better stood in for than left out."""
    queries, keys, values = inputs(11, 4, 2, 200, 20)
    tensors = 0.5 * queries, keys, values + 2
    sparq, _ = watched(kvlab.policy("sparq", budget=140, rank=HEAD_DIM), tensors, 200)
    plain, _ = watched(kvlab.policy("exact_topk", budget=40), tensors, 200)  # SparQ reads 39 and fewer
    assert sparq.summary["output_error"] < plain.summary["output_error"]


def test_rocketkv_keeps_its_window_and_one_more_where_the_response_takes_all_its_room():
    tensors = inputs(17, 4, 2, 100, 60)
    policy = kvlab.policy("rocketkv", budget=16, window=20, kernel=1)  # sqrt(160 x 16) = 50 < 60
    assert policy.keep(*(t[:, :, :100] for t in tensors), max_new_tokens=60).shape == (2, 2, 21)
    spends_at_most_its_budget(policy, tensors, 100)
    holds(policy, 17, 4, 2, 100, 60, size=1e-6)


@pytest.mark.parametrize("split", ["even", "adaptive"])
def test_rocketkv_stores_its_capacity_at_the_end(split):
    prompt, new, budget = 400, 40, 64
    tensors = inputs(12, 4, 2, prompt, new)
    policy = kvlab.policy("rocketkv", budget=budget, window=8, short=5, split=split)
    result, _ = watched(policy, tensors, prompt)
    capacity = oracles.rocketkv_capacity(prompt + new, new, budget, split)
    assert capacity == {"even": 167, "adaptive": 216}[split]  # sqrt(440 x 64); 440 / 6.875 ** (.2 + .06 x 2.78)
    assert {len(p) for p in sets(result.stored(0, new))} == {capacity}


# What cannot be


def refused(name, **parameters):
    return refusal(lambda: kvlab.policy(name, **parameters).keep(*inputs(13, 4, 2, 90)))


@pytest.mark.parametrize("name", [*SELECTING, "snapkv_pp"])
@pytest.mark.parametrize("budget", [0, 1, -3, 0.0, 1.5, True, "many"])
def test_a_budget_that_is_none(name, budget):
    assert "budget" in refused(name, budget=budget)


@pytest.mark.parametrize("name, parameters, below", [("snapkv_pp", {}, 31), ("snapkv_pp", dict(window=16), 15)])
def test_a_budget_below_the_window(name, parameters, below):
    assert str(below) in refused(name, budget=below, **parameters)


@pytest.mark.parametrize(
    "name, parameters, said",
    [
        ("quest", dict(page=0), "page"),
        ("quest", dict(page="16"), "page"),
        ("sparq", dict(rank=0), "rank"),
        ("sparq", dict(rank=-1), "rank"),
        ("hybrid", dict(page=0), "page"),
        ("hybrid", dict(rank=0), "rank"),
        ("rocketkv", dict(split="odd"), "split"),
        ("rocketkv", dict(window=0), "window"),
        ("rocketkv", dict(kernel=4), "kernel"),
        ("snapkv_pp", dict(kernel=4), "kernel"),
        ("snapkv_pp", dict(short=62), "short"),
        ("snapkv_pp", dict(long=0), "long"),
        ("snapkv_pp", dict(window=-1), "window"),
        ("quest", dict(pages=4), "page"),
    ],
)
def test_bad_parameters_are_named(name, parameters, said):
    assert said in refused(name, budget=64, **parameters)


@pytest.mark.parametrize("name", ["snapkv_pp", "rocketkv"])
def test_too_few_prompt_queries(name):
    queries, keys, values = inputs(14, 4, 2, 200)
    with pytest.raises(KvlabError, match="32"):
        kvlab.policy(name, budget=64).keep(queries[:, :, -31:], keys, values)


# RocketKV-MT


def test_what_rocketkv_masks_for_a_turn_it_still_stores():
    """Bytes: the whole cache, the pages and an index; loaded is what the evicting one loads."""
    tensors, prompt, steps, entry = inputs(23, 8, 2, 150, 12), 150, 12, 2 * HEAD_DIM * 4
    trace = kvlab.Trace.from_tensors(*tensors, prompt)
    own = dict(budget=24, window=8, short=5)
    single, multi = (kvlab.replay(trace, kvlab.policy("rocketkv", turns=turns, **own)) for turns in ("single", "multi"))
    masked = kvlab.policy("rocketkv", **own).keep(*(t[:, :, :prompt] for t in tensors), max_new_tokens=steps).shape[2]
    assert masked < prompt and multi.read_bytes.equal(single.read_bytes) and multi.mass_lost.equal(single.mass_lost)
    for t in range(1, steps + 1):
        evicted = LAYERS * 2 * (prompt - masked)
        assert int(multi.stored_bytes[t - 1] - single.stored_bytes[t - 1]) == evicted * entry + LAYERS * 2 * masked * 8


# The oracle of selection


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("who", ["group", "head"])
def test_exact_topk_selects_for_the_group_or_for_each_query_head(heads, kv_heads, who):
    """Attention of every step from scratch; a set for each query head reads more, and nothing more is stored."""
    prompt, steps, budget, entry = 50, 12, 9, 2 * 16 * 4
    tensors = inputs(21, heads, kv_heads, prompt, steps)
    result = kvlab.replay(
        kvlab.Trace.from_tensors(*tensors, prompt), kvlab.policy("exact_topk", budget=budget, sets=who)
    )
    of_sets = kv_heads if who == "group" else heads
    for t in range(1, steps + 1):
        for index in range(len(tensors[0])):
            queries, keys, _ = exact(*(tensor[index] for tensor in tensors))
            weights = oracles.decoding_weights(queries, keys, prompt, t)
            summed = [sum(weights[h] for h in oracles.heads_of(s, heads, of_sets)) for s in range(of_sets)]
            read = [oracles.top_positions(row, budget) for row in summed]
            assert sets(result.kept(index, t)) == read, f"layer {index} step {t}"
            lost = oracles.mass_lost(weights, read)
            np.testing.assert_allclose(result.mass_lost[index, :, t - 1], lost, atol=1e-5)
        assert int(result.stored_bytes[t - 1]) == len(tensors[0]) * kv_heads * (prompt + t) * entry
        assert int(result.read_bytes[t - 1]) == len(tensors[0]) * of_sets * budget * entry


def test_every_query_head_with_a_set_of_its_own_loses_no_more_than_with_its_groups():
    tensors = inputs(22, 8, 2, 90, 20)
    trace = kvlab.Trace.from_tensors(*tensors, 90)
    group, head = (kvlab.replay(trace, kvlab.policy("exact_topk", budget=9, sets=who)) for who in ("group", "head"))
    assert (head.mass_lost <= group.mass_lost + 1e-6).all() and head.mass_lost.mean() < 0.9 * group.mass_lost.mean()
