"""Budgets by layer: what each layer gets and keeps, against the oracles, through replay and `keep`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.cases import SHAPES, named
from support.layer_budgets import SHARES, SMALL, decided, kept_sets, model, replayed
from support.refusals import one_sentence
from support.tensors import exact, layer, sets

import kvlab
from kvlab.methods import Prompt
from kvlab.methods.snapkv import SnapKV

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
    ("cake", dict(budget=20, **SMALL)),
    ("cake", dict(budget=30, window=3, kernel=3, gamma=2.5, tau1=0.4, tau2=2.3)),
    ("cake", dict(budget=37, **SMALL)),
    ("lacache", dict(budget=16)),
    ("lacache", dict(budget=21, sinks=2, recent=0.5, span=0.5, overlap=0.0)),
]

SEES_ALL_LAYERS = ("zigzagkv", "dynamickv", "cake")

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
        ("cake", dict(budget=48)),
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
    with one_sentence("replay") as caught:
        kvlab.policy(name, budget=40).keep(queries, keys, values, layer=0, n_layers=4)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [*SHARES, "lacache"])
def test_every_generated_token_stays(name):
    tensors = model(7, prompt=60, new=5)
    result = replayed(tensors, 60, name, budget=40)
    first = kept_sets(result)
    for t in range(1, 6):
        grown = [[kept + list(range(60, 60 + t)) for kept in heads] for heads in first]
        assert kept_sets(result, t) == grown
        assert [sets(result.stored(index, t)) for index in range(4)] == grown


@pytest.mark.parametrize("name, parameters", [CASES[0], CASES[3], CASES[6], CASES[12]])
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
