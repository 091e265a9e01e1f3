"""Budgets by layer and by head: what each layer gets and keeps, against the oracles, through replay and `keep`."""

import itertools
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import oracles
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods import Prompt
from kvlab.methods.budgets import share_out
from kvlab.methods.snapkv import SnapKV

SHAPES = [(8, 2), (4, 4), (4, 1)]  # grouped-query, multi-head, multi-query
SMALL = dict(window=8, kernel=5)
CASES = [
    ("pyramidkv", dict(budget=20, **SMALL)),
    ("pyramidkv", dict(budget=31, window=4, kernel=1, beta=3)),
    ("pyramidkv", dict(budget=37, **SMALL)),  # the first layer's share exceeds the shortest prompt
    ("zigzagkv", dict(budget=20, **SMALL)),
    ("zigzagkv", dict(budget=30, window=3, kernel=3, mass=0.5, floor=0.6)),
    ("zigzagkv", dict(budget=37, **SMALL)),
    ("dynamickv", dict(budget=20, **SMALL)),
    ("dynamickv", dict(budget=20, reach=1.2, **SMALL)),
    ("dynamickv", dict(budget=37, **SMALL)),
    ("lacache", dict(budget=16)),
    ("lacache", dict(budget=21, sinks=2, recent=0.5, span=0.5, overlap=0.0)),
]
SEES_ALL_LAYERS = ("zigzagkv", "dynamickv")
SHARES = ("pyramidkv", "zigzagkv", "dynamickv")


def named(case):
    return "-".join([case[0], *(f"{k}{v}" for k, v in case[1].items())])


def model(seed, heads=8, kv_heads=2, prompt=60, layers=4, new=0, n=None):
    """Tensors of several layers whose attention is ever sharper, so that what they need differs."""
    queries, keys, values = layer(seed, heads, kv_heads, prompt=prompt, layers=layers, new=new, n=n)
    return queries * torch.linspace(0.3, 2, layers)[:, None, None, None], keys, values


def replayed(tensors, prompt, name, **parameters):
    return kvlab.replay(kvlab.Trace.from_tensors(*tensors, prompt), kvlab.policy(name, **parameters))


def kept_sets(result, step=0):
    return [sets(result.kept(index, step)) for index in range(result.trace.n_layers)]


def decided(name, tensors, prompt, **parameters):
    """The oracle's sets, [layer][kv_head]; the input must decide clearly, so the same with a little noise."""
    oracle, arrays = getattr(oracles, f"oracle_{name}"), exact(*tensors)
    kept = oracle(*arrays, prompt, **parameters)
    assert oracle(*shaken(*arrays), prompt, **parameters) == kept, "the test's input has near-ties"
    return kept


# Against the oracles


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("length", [40, 90])
def test_every_layer_keeps_what_the_oracle_keeps(case, heads, kv_heads, length):
    name, parameters = case
    tensors = model(length + heads + kv_heads, heads, kv_heads, length)
    found = kept_sets(replayed(tensors, length, name, **parameters))
    assert found == decided(name, tensors, length, **parameters)


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("pyramidkv", dict(budget=48)),
        ("zigzagkv", dict(budget=48)),
        ("dynamickv", dict(budget=48)),
        ("lacache", dict(budget=48)),
        ("dynamickv", dict(budget=0.4)),
    ],
)
def test_with_the_default_parameters(name, parameters):
    tensors = model(3, 4, 2, 120, layers=5, n=32)
    entries = dict(parameters, budget=48)
    assert kept_sets(replayed(tensors, 120, name, **parameters)) == decided(name, tensors, 120, **entries)


@pytest.mark.parametrize("name", ["pyramidkv", "zigzagkv", "dynamickv"])
@pytest.mark.parametrize("length, budget", [(600, 100), (1500, 256)])
def test_a_long_prompt(name, length, budget):
    tensors = model(length + 1, 4, 1, length, layers=3, n=8)
    parameters = dict(budget=budget, window=8)
    assert kept_sets(replayed(tensors, length, name, **parameters)) == decided(name, tensors, length, **parameters)


@pytest.mark.parametrize("name, parameters", [c for c in CASES if c[0] in ("pyramidkv", "lacache")])
def test_one_layer_at_a_time_is_the_replay_of_all(name, parameters):
    tensors = model(5, prompt=70)
    found = kept_sets(replayed(tensors, 70, name, **parameters))
    policy = kvlab.policy(name, **parameters)
    for index in range(4):
        twice = [torch.stack([t[index], t[index]]) for t in tensors]  # a batch of two
        kept = policy.keep(*twice, layer=index, n_layers=4)
        assert kept.dtype == torch.int64
        assert [sets(k) for k in kept] == [found[index]] * 2


@pytest.mark.parametrize("name", SEES_ALL_LAYERS)
def test_one_layer_alone_cannot_decide(name):
    queries, keys, values = layer(6, prompt=80, layers=1)
    with pytest.raises(KvlabError, match="replay") as caught:
        kvlab.policy(name, budget=40).keep(queries, keys, values, layer=0, n_layers=4)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*SHARES, "lacache"])
def test_every_generated_token_stays(name):
    tensors = model(7, prompt=60, new=5)
    result = replayed(tensors, 60, name, budget=40)
    first = kept_sets(result)
    for t in range(1, 6):
        grown = [[kept + list(range(60, 60 + t)) for kept in heads] for heads in first]
        assert kept_sets(result, t) == grown
        assert [sets(result.stored(index, t)) for index in range(4)] == grown


@pytest.mark.parametrize("name, parameters", [*CASES[:1], CASES[3], CASES[6], CASES[9]])
def test_measures_and_bytes_of_a_replay(name, parameters):
    prompt, steps, budget = 60, 6, parameters["budget"]
    tensors = model(24, prompt=prompt, new=steps)
    result, kept = replayed(tensors, prompt, name, **parameters), decided(name, tensors, prompt, **parameters)
    expected, window_recalls = [], []
    for arrays, sets_of in zip(zip(*exact(*tensors)), kept):
        run = oracles.simulate(*arrays, prompt, lambda g: oracles.taken(*arrays[1:], g, sets_of[g]))
        expected.append(oracles.replay_measures(*arrays, prompt, run, budget))
        window_recalls += oracles.window_recall(*arrays[:2], prompt, budget, window=8)
    for measure in ("recall", "step_recall", "mass_lost", "output_error"):
        assert result.summary[measure] == pytest.approx(np.mean([e[measure] for e in expected]), abs=1e-5), measure
    if name in SHARES:
        assert result.summary["window_recall"] == pytest.approx(np.mean(window_recalls), abs=1e-6)
    entries = [4 * 2 * (budget + t) * 2 * 16 * 4 for t in range(1, steps + 1)]
    assert result.stored_bytes.tolist() == result.read_bytes.tolist() == entries


def test_policies_on_one_trace_leave_each_other_alone():
    """What they share on a trace is what is the same for them."""
    tensors = model(25, prompt=70)
    policies = [kvlab.policy(name, **p) for name, p in CASES]
    results = kvlab.replay(kvlab.Trace.from_tensors(*tensors, 70), policies, progress=False)
    for (name, p), result in zip(CASES, results):
        assert kept_sets(result) == kept_sets(replayed(tensors, 70, name, **p)), name


@pytest.mark.parametrize("name, parameters", [CASES[3], CASES[6]])
def test_sequences_of_a_batch_are_planned_for_apart(name, parameters):
    """As in a live run: surveys of one layer after the other, each of two sequences, then one plan."""
    sequences = [model(seed, prompt=70) for seed in (26, 27)]
    policy = kvlab.policy(name, **parameters)
    prompts = [
        Prompt(*(torch.stack([one[part][index] for one in sequences]) for part in range(3)), (index, index), 4)
        for index in range(4)
    ]
    plan = policy.plan(torch.stack([policy.survey(prompt) for prompt in prompts]), prompts[0])
    found = [policy.prefill(prompt.with_plan(plan[index])) for index, prompt in enumerate(prompts)]
    for row, tensors in enumerate(sequences):
        assert [sets(kept[row]) for kept in found] == kept_sets(replayed(tensors, 70, name, **parameters))


@pytest.mark.parametrize("name, parameters", [*CASES[:1], CASES[3], CASES[6]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name, parameters, dtype):
    tensors = [t.to(dtype) for t in model(28, prompt=70)]
    found = kept_sets(replayed(tensors, 70, name, **parameters))
    assert found == decided(name, [t.float() for t in tensors], 70, **parameters)


# What is spent


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(SHARES),
    layers=st.integers(1, 6),
    kv_heads=st.sampled_from([1, 2]),
    length=st.integers(1, 60),
    budget=st.integers(5, 70),
    seed=st.integers(0, 99),
)
def test_all_layers_together_spend_layers_times_budget(name, layers, kv_heads, length, budget, seed):
    tensors = model(seed, 2, kv_heads, length, layers)
    kept = kept_sets(replayed(tensors, length, name, budget=budget, window=4))
    sizes = [{len(row) for row in heads} for heads in kept]
    assert all(len(of_layer) == 1 for of_layer in sizes)
    sizes = [of_layer.pop() for of_layer in sizes]
    assert sum(sizes) == layers * min(budget, length)
    assert min(sizes) >= min(4, length) and max(sizes) <= length


def test_what_a_layer_cannot_use_goes_to_the_others():
    tensors = model(8, prompt=60, layers=4)
    sizes = {
        budget: [len(heads[0]) for heads in kept_sets(replayed(tensors, 60, "pyramidkv", budget=budget, **SMALL))]
        for budget in (20, 50)
    }
    assert sizes[20] == oracles.pyramidkv_shares(4, 60, 20, 8) == [31, 24, 16, 9]
    assert sizes[50][0] == 60 and sum(sizes[50]) == 4 * 50
    assert sizes[50] == oracles.pyramidkv_shares(4, 60, 50, 8)


def test_the_pyramid_falls_linearly_to_a_twentieth():
    tensors = model(9, 2, 1, 200, layers=3, n=8)
    sizes = [len(heads[0]) for heads in kept_sets(replayed(tensors, 200, "pyramidkv", budget=48, **SMALL))]
    assert sizes == [8 + 78, 8 + 40, 8 + 2]


@settings(max_examples=100, deadline=None)
@given(layers=st.integers(1, 32), budget=st.integers(9, 70), length=st.integers(10, 90), beta=st.integers(1, 40))
def test_the_pyramid_of_any_model(layers, budget, length, beta):
    queries, keys, values = layer(10, 1, 1, head_dim=2, prompt=length, n=8, layers=1)
    policy = kvlab.policy("pyramidkv", budget=budget, beta=beta, **SMALL)
    sizes = [policy.keep(queries, keys, values, layer=i, n_layers=layers).shape[-1] for i in range(layers)]
    if length <= budget:
        assert sizes == [length] * layers
    else:
        assert sizes == oracles.pyramidkv_shares(layers, length, budget, 8, beta)
        assert sum(sizes) == layers * budget and sizes == sorted(sizes, reverse=True)


def test_the_floor_holds_where_one_layer_takes_nearly_all():
    """Layers that look at few tokens, beside one that spreads over everything."""
    queries, keys, values = model(11, 2, 1, 100, layers=4)
    queries = queries * torch.tensor([8.0, 4.0, 2.0, 0.01])[:, None, None, None]
    for floor, least in ((0.0, 4), (0.52, 15), (0.9, 27)):
        parameters = dict(budget=30, window=4, floor=floor)
        kept = kept_sets(replayed((queries, keys, values), 100, "zigzagkv", **parameters))
        sizes = [len(heads[0]) for heads in kept]
        assert min(sizes) >= least and sum(sizes) == 120
        assert kept == decided("zigzagkv", (queries, keys, values), 100, **parameters)


def test_dynamickv_reaches_no_further_than_it_may():
    """The last layer looks at nothing but its window: the others get what they may take of its share."""
    queries, keys, values = model(12, 2, 1, 100, layers=4)
    keys[3, :, 99] = 5 * queries[3, :, 99].sum(0)
    for reach, sizes in ((1.2, [24, 24, 24, 8]), (1.0, [20] * 4)):
        parameters = dict(budget=20, window=1, kernel=1, reach=reach)
        kept = kept_sets(replayed((queries, keys, values), 100, "dynamickv", **parameters))
        assert [len(heads[0]) for heads in kept] == sizes
    kept = kept_sets(replayed((queries, keys, values), 100, "dynamickv", budget=20, window=1, kernel=1))
    sizes = [len(heads[0]) for heads in kept]
    assert sizes[3] == 1 and sum(sizes) == 80
    assert kept == decided("dynamickv", (queries, keys, values), 100, budget=20, window=1, kernel=1)


# A budget of the prompt or more, nested sets


@pytest.mark.parametrize("name", [*SHARES, "lacache"])
@pytest.mark.parametrize("length, budget", [(50, 50), (50, 51), (50, 1000), (50, 1.0), (6, 40), (33, 40), (1, 33)])
def test_a_budget_of_the_prompt_or_more_keeps_everything(name, length, budget):
    kept = kept_sets(replayed(model(13, prompt=length), length, name, budget=budget))
    assert kept == [[list(range(length))] * 2] * 4


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["pyramidkv", "dynamickv", "zigzagkv", "snapkv", "snapkv by head"]),
    seed=st.integers(0, 99),
    budgets=st.lists(st.integers(10, 80), min_size=2, max_size=4, unique=True).map(sorted),
)
def test_sets_are_nested_as_the_budget_grows_where_layers_share_alike(name, seed, budgets):
    tensors = [t.expand(3, -1, -1, -1) for t in layer(seed, 4, 2, prompt=80, n=8, layers=1)]  # three equal layers
    uniform = {"pyramidkv": dict(beta=1), "snapkv by head": dict(sets="head")}.get(name, {})
    found = [kept_sets(replayed(tensors, 80, name.split()[0], budget=b, **SMALL, **uniform)) for b in budgets]
    for smaller, larger in zip(found, found[1:]):
        for index in range(3):
            assert all(set(a) < set(b) or len(a) == 80 for a, b in zip(smaller[index], larger[index]))


# Shares


def around(weights, total, ceiling, floor):
    """The real shares c * weight within [floor, ceiling], c found by bisection; positive weights."""
    total, low, high = min(total, len(weights) * ceiling), 0.0, 1e9
    for _ in range(200):
        c = (low + high) / 2
        found = [min(max(c * w, floor), ceiling) for w in weights]
        low, high = (c, high) if sum(found) < total else (low, c)
    return found


shares = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 30), min_size=n, max_size=n), st.integers(0, 24), st.integers(0, 7), st.integers(0, 3)
    )
)


@settings(max_examples=300, deadline=None)
@given(shares)
def test_shares_are_the_whole_numbers_nearest_to_the_proportional_ones(given_shares):
    weights, total, ceiling, floor = given_shares
    floor = min(floor, ceiling)
    assume(total >= len(weights) * floor)
    found = share_out(torch.tensor(weights, dtype=torch.float64), total, ceiling, floor).tolist()
    ideal = around(weights, total, ceiling, floor)

    def distance(whole):
        return sum((a - b) ** 2 for a, b in zip(whole, ideal))

    possible = [
        whole
        for whole in itertools.product(range(floor, ceiling + 1), repeat=len(weights))
        if sum(whole) == min(total, len(weights) * ceiling)
    ]
    nearest = min(map(distance, possible))
    best = max(whole for whole in possible if distance(whole) < nearest + 1e-6)  # ties to the earlier one
    assert found == list(best) == oracles.share_out(weights, total, ceiling, floor)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.integers(0, 10**4).map(lambda w: w / 8), min_size=1, max_size=40),
    total=st.integers(0, 5000),
    ceiling=st.integers(1, 300),
    floor=st.integers(0, 20),
)
def test_shares_sum_exactly_and_grow_with_the_weights(weights, total, ceiling, floor):
    floor = min(floor, ceiling)
    assume(total >= len(weights) * floor)
    found = share_out(torch.tensor(weights, dtype=torch.float64), total, ceiling, floor)
    assert found.dtype == torch.int64 and found.shape == (len(weights),)
    found = found.tolist()
    assert sum(found) == min(total, len(weights) * ceiling)
    assert floor <= min(found) and max(found) <= ceiling
    for i, j in itertools.combinations(range(len(weights)), 2):
        if weights[i] > weights[j]:
            assert found[i] >= found[j]
        elif weights[i] < weights[j]:
            assert found[i] <= found[j]
        else:
            assert found[j] <= found[i] <= found[j] + 1


def test_shares_row_by_row():
    weights = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(1)) ** 4
    found = share_out(weights, 100, 40, 2)
    assert found.shape == weights.shape
    for row, expected in zip(found.reshape(-1, 7).tolist(), weights.reshape(-1, 7).tolist()):
        assert row == oracles.share_out(expected, 100, 40, 2)


@pytest.mark.parametrize(
    "weights, total, ceiling, expected",
    [
        ([1, 1, 1], 4, 9, [2, 1, 1]),
        ([1, 1, 1], 5, 9, [2, 2, 1]),
        ([3, 1], 8, 5, [5, 3]),
        ([0, 0, 0], 7, 9, [3, 2, 2]),
        ([1, 2, 3], 100, 10, [10, 10, 10]),
        ([100, 1, 1], 12, 6, [6, 3, 3]),
        ([1, 0, 0], 12, 6, [6, 3, 3]),
    ],
)
def test_shares_by_hand(weights, total, ceiling, expected):
    assert share_out(torch.tensor(weights, dtype=torch.float32), total, ceiling).tolist() == expected


# The ladder


@settings(max_examples=100, deadline=None)
@given(
    layers=st.integers(1, 33),
    budget=st.integers(12, 60),
    length=st.integers(12, 200),
    sinks=st.integers(0, 5),
    recent=st.sampled_from([0.1, 0.25, 0.5]),
    span=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    overlap=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_the_ladder_climbs_from_the_first_token_to_the_last(layers, budget, length, sinks, recent, span, overlap):
    queries, keys, values = layer(14, 1, 1, head_dim=2, prompt=length, n=1, layers=1)
    parameters = dict(sinks=sinks, recent=recent, span=span, overlap=overlap)
    policy = kvlab.policy("lacache", budget=budget, **parameters)
    kept = [sets(policy.keep(queries, keys, values, layer=i, n_layers=layers)[0])[0] for i in range(layers)]
    assert kept == [oracles.lacache_layer(i, layers, length, budget, **parameters) for i in range(layers)]
    last = max(1, int(recent * budget))
    assert all(
        row[:sinks] == list(range(min(sinks, length)))
        and row[-last:] == list(range(length))[-last:]
        and len(row) == min(budget, length)
        for row in kept
    )
    if length > budget:
        starts = [row[sinks] for row in kept]
        assert starts == sorted(starts) and starts[0] == sinks
        rungs = len(set(starts))
        if rungs > 1:
            assert kept[-1][-last - 1] == length - last - 1
        middle, width = length - sinks - last, budget - sinks - last
        if rungs * width >= middle:  # then nothing falls between two rungs
            assert set().union(*kept) == set(range(length))


def test_neighbouring_rungs_overlap():
    tensors = model(15, 1, 1, 100, layers=8, n=1)
    kept = [set(heads[0]) for heads in kept_sets(replayed(tensors, 100, "lacache", budget=40))]
    for lower, upper in zip(kept, kept[1:]):
        assert len(lower & upper) > 4 + 10  # more than the sinks and the recent tokens
        assert lower != upper
    assert set().union(*kept) == set(range(100))


# SnapKV with a set for each query head


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


# What cannot be done


def refused(name, **parameters):
    tensors = model(20, prompt=90)
    with warnings.catch_warnings(), pytest.raises((KvlabError, ValueError)) as caught:
        warnings.simplefilter("ignore")
        replayed(tensors, 90, name, **parameters)
    sentence = str(caught.value)
    assert len(sentence.split()) >= 4 and "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    "name, parameters, least",
    [
        ("pyramidkv", {}, 33),
        ("pyramidkv", dict(window=8), 9),
        ("zigzagkv", {}, 33),
        ("zigzagkv", dict(window=8), 9),
        ("dynamickv", {}, 33),
        ("lacache", {}, 6),
        ("lacache", dict(sinks=0), 2),
        ("duoattention", dict(sinks=4, recent=8), 12),
        ("duoattention", {}, 2),
    ],
)
def test_a_budget_below_what_the_method_needs(name, parameters, least):
    assert str(least) in refused(name, budget=least - 1, **parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert replayed(model(21, prompt=60), 60, name, budget=least, **parameters).budget == least


@pytest.mark.parametrize(
    "name, parameters, said",
    [
        ("pyramidkv", dict(window=0), "window"),
        ("pyramidkv", dict(kernel=4), "kernel"),
        ("pyramidkv", dict(beta=0), "beta"),
        ("pyramidkv", dict(betta=20), "beta"),
        ("pyramidkv", dict(budget=0), "budget"),
        ("zigzagkv", dict(mass=0.0), "mass"),
        ("zigzagkv", dict(mass=1.5), "mass"),
        ("zigzagkv", dict(floor=1.5), "floor"),
        ("zigzagkv", dict(floor=-0.1), "floor"),
        ("zigzagkv", dict(kernel=2), "kernel"),
        ("dynamickv", dict(reach=0.5), "reach"),
        ("dynamickv", dict(kernel=0), "kernel"),
        ("dynamickv", dict(reach=float("nan")), "reach"),
        ("zigzagkv", dict(mass=float("nan")), "mass"),
        ("lacache", dict(sinks=-1), "sinks"),
        ("lacache", dict(recent=1.5), "recent"),
        ("lacache", dict(span=0.0), "span"),
        ("lacache", dict(overlap=1.5), "overlap"),
        ("lacache", dict(span="wide"), "span"),
        ("duoattention", dict(sinks=-1), "sinks"),
        ("duoattention", dict(recent=0), "recent"),
        ("duoattention", dict(heads="nowhere.json"), "nowhere.json"),
        ("snapkv", dict(sets="layer"), "sets"),
    ],
)
def test_bad_parameters_are_named(name, parameters, said):
    assert said in refused(name, **{"budget": 64, **parameters})


@pytest.mark.parametrize("name", ["pyramidkv", "zigzagkv", "dynamickv"])
def test_too_few_prompt_queries(name):
    queries, keys, values = model(22, prompt=80, n=20)
    with pytest.raises(KvlabError, match="32"):
        replayed((queries, keys, values), 80, name, budget=40)


@pytest.mark.parametrize("name", ["pyramidkv", "zigzagkv", "dynamickv", "lacache"])
def test_a_fraction_is_floored_and_raised_to_what_the_method_needs(name):
    tensors = model(23, prompt=99)
    least = {"lacache": 6}.get(name, 33)
    for fraction, entries in ((0.5, 49), (0.999, 98), (0.0001, least)):
        found = replayed(tensors, 99, name, budget=fraction)
        assert found.raised == (entries == least)
        assert kept_sets(found) == kept_sets(replayed(tensors, 99, name, budget=entries))


def test_a_subclass_with_scores_of_its_own_shares_nothing_with_its_base():
    class Least(SnapKV):
        name: ClassVar[str] = "least"

        def scores(self, prompt):
            return -super().scores(prompt)

    tensors = model(3, prompt=80)
    trace = kvlab.Trace.from_tensors(*tensors, 80)
    together = kvlab.replay(trace, [SnapKV(budget=20, window=8), Least(budget=20, window=8)])
    alone = kvlab.replay(kvlab.Trace.from_tensors(*tensors, 80), Least(budget=20, window=8))
    assert together[1].kept(0).equal(alone.kept(0)) and not together[0].kept(0).equal(alone.kept(0))


def test_keep_says_of_how_many_layers_a_layer_is():
    tensors = [x[:1] for x in model(3, prompt=80)]
    for name in ("pyramidkv", "lacache"):
        with pytest.raises(KvlabError, match="layer 3 is outside"):
            kvlab.policy(name, budget=40).keep(*tensors, layer=3)
