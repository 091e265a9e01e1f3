"""Methods that score the prompt's tokens, and those around another's scores: against plain loops, and for any input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.cases import SHAPES
from support.stepwise import LAYERS, inputs, never_comes_back, watched
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods._base.policy import Policy

PLAIN = [
    ("knorm", {}),
    ("keydiff", {}),
    ("keydiff", dict(block=7)),
    ("keydiff", dict(block=1)),
    ("lagkv", dict(sinks=2, lag=16)),
    ("lagkv", dict(sinks=0, lag=30)),
    ("lagkv", dict(lag=8)),
]
WRAPPERS = ["adakv", "chunkkv"]


def agreed(oracle, arrays):
    """What the oracle keeps, and the same under a little noise, so that no decision is a near-tie."""
    expected = oracle(*arrays)
    assert oracle(*shaken(*arrays)) == expected, "the test's input has near-ties"
    return [list(kept) for kept in expected]


@pytest.mark.parametrize("name, parameters", PLAIN)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("budget", [12, 40, 70])
def test_scores_keep_what_the_plain_loops_keep(name, parameters, heads, kv_heads, budget):
    tensors = layer(heads + kv_heads, heads, kv_heads, prompt=100)
    policy = kvlab.policy(name, budget=budget, **parameters)
    oracle = getattr(oracles, f"oracle_{name}")
    expected = agreed(lambda q, k, v: oracle(q, k, v, budget, **parameters), exact(*tensors))
    assert sets(policy.keep(*(t[None] for t in tensors))[0]) == expected


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("budget", [12, 45])
def test_tova_goes_forty_steps_as_the_plain_loop(heads, kv_heads, budget):
    tensors = inputs(heads * kv_heads, heads, kv_heads, 40, 40)
    result, _ = watched(kvlab.policy("tova", budget=budget), tensors, 40)
    for index in range(LAYERS):
        arrays = exact(*(t[index] for t in tensors))
        expected = oracles.oracle_tova(*arrays, 40, budget)
        assert oracles.oracle_tova(*shaken(*arrays), 40, budget) == expected, "the test's input has near-ties"
        for step, (read, stored) in enumerate(expected):
            assert sets(result.kept(index, step)) == [read] * kv_heads, step
            assert sets(result.stored(index, step)) == [stored] * kv_heads, step
        never_comes_back(result, index, 40)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "parameters",
    [dict(budget=24, interval=6), dict(budget=50, interval=1), dict(budget=30, interval=9, mix=0.6)],
    ids=str,
)
def test_rkv_goes_fifty_steps_as_the_plain_loop(heads, kv_heads, parameters):
    tensors = inputs(heads + kv_heads, heads, kv_heads, 40, 50)
    options = dict(window=4, kernel=3, threshold=0.2) | parameters
    result, _ = watched(kvlab.policy("rkv", **options), tensors, 40)
    for index in range(LAYERS):
        arrays = exact(*(t[index] for t in tensors))
        expected = oracles.oracle_rkv(*arrays, 40, **options)
        assert oracles.oracle_rkv(*shaken(*arrays), 40, **options) == expected, "the test's input has near-ties"
        for step, (read, stored) in enumerate(expected):
            assert sets(result.kept(index, step)) == read, step
            assert sets(result.stored(index, step)) == stored, step
            assert all(len(positions) <= parameters["budget"] for positions in stored)
        never_comes_back(result, index, 50)


@pytest.mark.parametrize("name, parameters", [("adakv", {}), ("adakv", dict(floor=0.7)), ("chunkkv", dict(chunk=9))])
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("budget", [13, 30, 80])
def test_around_snapkv_as_the_plain_loops(name, parameters, heads, kv_heads, budget):
    tensors = layer(heads * 3 + kv_heads, heads, kv_heads, prompt=100)
    scorer = kvlab.policy("snapkv", budget=99, window=8, kernel=5)
    policy = kvlab.policy(name, budget=budget, scorer=scorer, **parameters)
    oracle = getattr(oracles, f"oracle_{name}")
    expected = agreed(
        lambda q, k, v: oracle(oracles.snapkv_importance(q, k, 8, 5), budget, **parameters), exact(*tensors)
    )
    kept = sets(policy.keep(*(t[None] for t in tensors))[0])
    assert kept == expected
    assert sum(map(len, kept)) == kv_heads * budget


def test_a_floor_of_one_is_the_scorer_itself():
    tensors = [t[None] for t in layer(3, prompt=90)]
    for scorer in ("snapkv", "knorm", "keydiff"):
        alone = kvlab.policy(scorer, budget=40).keep(*tensors)
        assert kvlab.policy("adakv", budget=40, scorer=scorer, floor=1.0).keep(*tensors).equal(alone)


def test_a_chunk_of_one_is_the_scorer_on_the_sum_of_the_heads():
    queries, keys, values = (t[None] for t in layer(4, prompt=90))
    scores = kvlab.policy("knorm", budget=9).scores(kvlab.methods.Prompt(queries, keys, values, (0,), 1)).sum(1)[0]
    kept = kvlab.policy("chunkkv", budget=30, scorer="knorm", chunk=1).keep(queries, keys, values)[0]
    best = sorted(scores.topk(30).indices.tolist())
    assert sets(kept) == [best] * keys.shape[1]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_budget_is_spent_and_nothing_forced_is_lost(data):
    length = data.draw(st.integers(20, 70))
    budget = data.draw(st.integers(9, length))
    scorer = data.draw(st.sampled_from(["snapkv", "knorm", "keydiff", "lagkv", "tova", "random"]))
    options = {"snapkv": dict(window=8), "lagkv": dict(lag=7)}.get(scorer, {})
    inner = kvlab.policy(scorer, budget=budget, **options)
    name = data.draw(st.sampled_from(WRAPPERS))
    tensors = [t[None] for t in layer(data.draw(st.integers(0, 99)), prompt=length)]
    kept = sets(kvlab.policy(name, budget=budget, scorer=inner).keep(*tensors)[0])
    assert sum(map(len, kept)) == budget * tensors[1].shape[1]
    if scorer == "snapkv":
        assert all(set(range(length - 8, length)) <= set(positions) for positions in kept)


def test_a_scorer_of_ones_own_needs_no_more_than_scores():
    class Late(Policy):
        name = "late"
        budget: kvlab.methods.Budget

        def scores(self, prompt):
            return torch.arange(prompt.length).float().expand(prompt.rows, prompt.kv_heads, prompt.length)

    tensors = [t[None] for t in layer(5, prompt=30)]
    for name in WRAPPERS:
        kept = kvlab.policy(name, budget=10, scorer=Late(budget=3)).keep(*tensors)[0]
        assert sets(kept) == [list(range(20, 30))] * 2


@pytest.mark.parametrize(
    "scorer, why",
    [
        ("streamingllm", "streamingllm does not score tokens; take one that does, such as 'snapkv'"),
        ("full", "full does not score tokens"),
        ("quest", "quest does not score tokens"),
        ("zigzagkv", "zigzagkv shares its budget among layers"),
        ("snapkw", "did you mean 'snapkv'"),
        (kvlab.policy("snapkv", budget=40, sets="head"), "give it sets='group'"),
        (7, "scorer"),
    ],
)
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_cannot_be_a_scorer_is_refused_in_one_sentence(name, scorer, why):
    with pytest.raises(KvlabError, match=why) as told:
        kvlab.policy(name, budget=40, scorer=scorer)
    assert "\n" not in str(told.value)


def test_a_budget_below_the_scorers_minimum_is_refused():
    with pytest.raises(KvlabError, match="below the 33 entries"):
        kvlab.policy("adakv", budget=20)


def test_random_eviction_while_decoding_is_uniform_and_seeded():
    tensors = inputs(1, 4, 2, 30, 30)
    one, again, other = (
        watched(kvlab.policy("random", budget=20, decode=True, seed=seed), tensors, 30)[0] for seed in (1, 1, 2)
    )
    for step in range(31):
        assert one.stored(0, step).shape == (2, 20)
        assert one.stored(0, step).equal(again.stored(0, step))
    assert not one.stored(0, 30).equal(other.stored(0, 30))
    never_comes_back(one, 0, 30)
    survivors = [
        set(
            watched(kvlab.policy("random", budget=20, decode=True, seed=seed), tensors, 30)[0].stored(0, 30)[0].tolist()
        )
        for seed in range(40)
    ]
    # An old token survives thirty draws of one in 21 with (20 / 21) ** 30 = 0.23, the newest its own with 0.95.
    latest = sum(59 in kept for kept in survivors)
    early = sum(len(kept & set(range(30))) for kept in survivors) / (40 * 20)
    assert latest > 30 and 0.15 < early < 0.32


def test_random_eviction_of_the_response_keeps_the_prompt_and_draws_uniformly():
    tensors = inputs(2, 4, 2, 12, 40)
    survivors = []
    for seed in range(60):
        result, _ = watched(kvlab.policy("random", budget=20, region="response", seed=seed), tensors, 12)
        for step in (0, 8, 9, 40):
            for kept in sets(result.stored(0, step)):
                assert kept[:12] == list(range(12)) and len(kept) == min(12 + step, 20)
        assert sets(result.kept(0, 40))[0] == [*sets(result.stored(0, 39))[0], 51]
        survivors.append(sets(result.stored(0, 40))[0][12:])
        never_comes_back(result, 0, 40)
    # Eight places for forty tokens: one that came k steps ago survives k + 1 draws of one in nine.
    latest, early = (sum(p in kept for kept in survivors) / 60 for p in (51, 12))
    assert 0.7 < latest < 1 and early < 0.15
    ages = sum(51 - p for kept in survivors for p in kept) / (60 * 8)
    expected = sum(age * (8 / 9) ** min(age + 1, 32) for age in range(40)) / 8
    assert ages == pytest.approx(expected, rel=0.1)


def test_random_eviction_of_the_response_needs_room_for_the_prompt():
    tensors = [t[None] for t in layer(3, prompt=90)]
    policy = kvlab.policy("random", budget=40, region="response")
    with pytest.raises(KvlabError, match="a budget of 40 has no room for its 90 tokens; give it more") as told:
        policy.keep(*tensors)
    assert "\n" not in str(told.value)
    assert policy.replace(budget=90).keep(*tensors).shape[-1] == 90
