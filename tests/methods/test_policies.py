"""What each policy keeps after prefill: equal to its oracle, within its budget, and plain about bad parameters."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.cases import named
from support.refusals import refusal
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab import methods
from kvlab.errors import KvlabError

SHAPES = [(6, 2), (4, 4), (4, 1)]  # grouped-query, multi-head, multi-query
CASES = [
    ("streamingllm", dict(budget=9)),
    ("streamingllm", dict(budget=12, sinks=2)),
    ("snapkv", dict(budget=40)),
    ("snapkv", dict(budget=20, window=8, kernel=5)),
    ("snapkv", dict(budget=20, window=8, kernel=1)),
    ("dapq", dict(budget=16)),
    ("zsmerge", dict(budget=16)),
    ("zsmerge", dict(budget=16, residual=0)),
    ("zsmerge", dict(budget=20, residual=0.3, window=4, decay=0.5)),
    ("zsmerge", dict(budget=20, residual=0.28)),  # 2.8 slots are two
    ("zsmerge", dict(budget=20, residual=3)),
    ("zsmerge", dict(budget=20, residual=3, initial="similarity")),
    ("morphkv", dict(budget=16, window=6)),
    ("full", {}),
]
NEEDS = {"full": 1, "random": 1, "streamingllm": 5, "snapkv": 33, "dapq": 1, "zsmerge": 3, "morphkv": 33}


def oracle_kept(name, parameters, queries, keys, values, **more):
    """Step 0 of the oracle; the input must decide clearly, so the same with a little noise."""
    oracle = getattr(oracles, f"oracle_{name}")
    tensors = exact(queries, keys, values)
    if "pseudo" in more:
        more["pseudo"] = exact(more["pseudo"])
    length = keys.shape[1]
    kept = oracle(*tensors, length, **parameters, **more)[0]["read"]
    assert oracle(*shaken(*tensors), length, **parameters, **more)[0]["read"] == kept, "the test's input has near-ties"
    return [list(k) for k in kept]


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("length", [45, 90])
def test_keeps_what_the_oracle_keeps(case, heads, kv_heads, length):
    name, parameters = case
    queries, keys, values = layer(length + kv_heads, heads, kv_heads, prompt=length, layers=2)  # as a batch of two
    pseudo = layer(7, heads, kv_heads, prompt=length, n=12, layers=2)[0]
    more = [dict(pseudo=pseudo[b]) if name == "dapq" else {} for b in range(2)]
    policy = kvlab.policy(name, **parameters)
    kept = policy.keep(queries, keys, values, **(dict(pseudo=pseudo) if name == "dapq" else {}))
    assert kept.dtype == torch.int64
    for b in range(2):
        assert sets(kept[b]) == oracle_kept(name, parameters, queries[b], keys[b], values[b], **more[b])


@pytest.mark.parametrize("name, window", [("snapkv", 32), ("zsmerge", 8)])
def test_the_last_queries_are_enough(name, window):
    queries, keys, values = layer(11, prompt=80, layers=1)
    policy = kvlab.policy(name, budget=48)
    assert policy.keep(queries, keys, values).equal(policy.keep(queries[:, :, -window:], keys, values))
    with pytest.raises((KvlabError, ValueError), match=str(window)):
        policy.keep(queries[:, :, -window + 1 :], keys, values)


def test_random_is_seeded_and_spread():
    queries, keys, values = layer(12, prompt=200, n=32, layers=3)
    kept = kvlab.policy("random", budget=50, seed=1).keep(queries, keys, values)
    assert kept.equal(kvlab.policy("random", budget=50, seed=1).keep(queries, keys, values))
    assert not kept.equal(kvlab.policy("random", budget=50, seed=2).keep(queries, keys, values))
    found = [k for batch in kept for k in sets(batch)]
    assert all(len(k) == 50 for k in found)
    mean = sum(sum(k) for k in found) / 300
    assert 80 < mean < 120  # uniform over 0 .. 199: 99.5, standard error 3


def test_dapq_without_pseudo_queries_says_so():
    queries, keys, values = layer(13, prompt=40, layers=1)
    with pytest.raises((KvlabError, ValueError), match="pseudo"):
        kvlab.policy("dapq", budget=8).keep(queries, keys, values)


# Budgets


@pytest.mark.parametrize("name", sorted(NEEDS))
@pytest.mark.parametrize("length, budget", [(50, 50), (50, 51), (50, 1000), (50, 1.0), (6, 40), (33, 40)])
def test_a_budget_of_the_prompt_or_more_keeps_everything(name, length, budget):
    queries, keys, values = layer(14, prompt=length, layers=1)
    parameters = {} if name == "full" else {"budget": budget}
    kept = kvlab.policy(name, **parameters).keep(queries, keys, values, pseudo=queries[:, :, -4:])
    assert sets(kept[0]) == [list(range(length))] * 2


@pytest.mark.parametrize("name, parameters", [("snapkv", dict(window=32)), ("morphkv", dict(window=32))])
@pytest.mark.parametrize("length", [1, 5, 32])
def test_a_prompt_within_the_window_is_kept_whole(name, parameters, length):
    queries, keys, values = layer(15, prompt=length, layers=1)
    kept = kvlab.policy(name, budget=40, **parameters).keep(queries, keys, values)
    assert sets(kept[0]) == [list(range(length))] * 2


def refused(name, **parameters):
    """The sentence with which the policy refuses, at the latest when it sees a prompt."""
    queries, keys, values = layer(16, prompt=90, layers=1)
    return refusal(lambda: kvlab.policy(name, **parameters).keep(queries, keys, values, pseudo=queries[:, :, -4:]))


@pytest.mark.parametrize("name", [n for n in sorted(NEEDS) if n != "full"])
@pytest.mark.parametrize("budget", [0, -3, 0.0, -0.5, 1.5, 64.5, float("nan"), "many", None, True])
def test_a_budget_that_is_none(name, budget):
    assert "budget" in refused(name, budget=budget)


@pytest.mark.parametrize(
    "name, parameters, below",
    [
        ("streamingllm", {}, 4),
        ("streamingllm", dict(sinks=10), 10),
        ("snapkv", {}, 31),
        ("snapkv", dict(window=16), 15),
        ("morphkv", {}, 31),
        ("morphkv", dict(window=8), 7),
        ("zsmerge", {}, 1),
    ],
)
def test_an_integer_below_what_the_method_needs(name, parameters, below):
    sentence = refused(name, budget=below, **parameters)
    assert str(below) in sentence and (str(below + 1) in sentence or str(below + 2) in sentence)


@pytest.mark.parametrize("name", ["streamingllm", "snapkv", "dapq", "zsmerge", "random"])
def test_a_fraction_is_floored_and_raised_to_what_the_method_needs(name):
    queries, keys, values = layer(17, prompt=99, layers=1)

    def kept(budget):
        return kvlab.policy(name, budget=budget).keep(queries, keys, values, pseudo=queries[:, :, -4:])

    assert kept(0.5).equal(kept(49)) and kept(0.999).equal(kept(98))
    least = kept(0.0001)
    assert least.shape[-1] <= NEEDS[name] and least.equal(kept(least.shape[-1]))
    assert sets(least[0])[0]


@pytest.mark.parametrize(
    "name, parameters, said",
    [
        ("snapkv", dict(windw=8), "window"),
        ("zsmerge", dict(decai=0.9), "decay"),
        ("full", dict(window=8), "window"),
        ("snapkv", dict(window="8"), "window"),
        ("snapkv", dict(window=0), "window"),
        ("snapkv", dict(window=2.5), "window"),
        ("streamingllm", dict(sinks=-1), "sinks"),
        ("snapkv", dict(kernel=4), "kernel"),
        ("snapkv", dict(kernel=0), "kernel"),
        ("zsmerge", dict(decay=1.5), "decay"),
        ("zsmerge", dict(alpha=-1), "alpha"),
        ("zsmerge", dict(residual=1.5), "residual"),
        ("zsmerge", dict(residual=-1), "residual"),
        ("morphkv", dict(fusion="mean"), "fusion"),
        ("morphkv", dict(window=-1), "window"),
        ("random", dict(seed="x"), "seed"),
    ],
)
def test_bad_parameters_are_named(name, parameters, said):
    budget = {} if name == "full" else {"budget": 64}
    assert said in refused(name, **budget, **parameters)


def test_unknown_policy_offers_the_nearest():
    with pytest.raises(KvlabError, match="snapkv"):
        kvlab.policy("snapk", budget=64)
    assert set(NEEDS) <= set(kvlab.policies())


MINE = """
from typing import ClassVar

from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods.snapkv import SnapKV


class Helper(Policy):
    pass


class Mine(Policy):
    name: ClassVar[str] = "mine"
    budget: Budget
"""


def test_a_policy_is_found_by_its_file_alone(tmp_path, monkeypatch):
    (tmp_path / "added.py").write_text(MINE)
    own = kvlab.policies()
    with monkeypatch.context() as patch:
        patch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
        methods.installed.cache_clear()
        assert kvlab.policies() == sorted([*own, "mine"]), "what has no name, or came by an import, is not one of its"
        assert type(kvlab.policy("mine", budget=3)).__module__ == f"{methods.__name__}.added"
        assert kvlab.policy("mine", budget=3).family == "other"
    methods.installed.cache_clear()
    sys.modules.pop(f"{methods.__name__}.added", None)
    assert kvlab.policies() == own == sorted(own)


@pytest.mark.parametrize(("length", "whole"), [(19, True), (20, True), (21, False)])
def test_a_prompt_within_the_budget_is_kept_whole(length, whole):
    queries, keys, values = layer(3, 4, 2, head_dim=4, prompt=length, layers=1)
    for name in ("snapkv", "streamingllm", "random"):
        policy = kvlab.policy(name, budget=20, **({"window": 4} if name == "snapkv" else {}))
        assert policy.fits(length) == whole
        assert (policy.keep(queries, keys, values).shape[-1] == length) == whole


# Any shape, any budget


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(NEEDS)),
    shape=st.sampled_from([(1, 1), (6, 2), (4, 1)]),
    seed=st.integers(0, 999),
    length=st.integers(1, 70),
    budget=st.one_of(st.integers(33, 80), st.floats(0.01, 1)),
)
def test_what_is_kept_is_a_sorted_set_of_the_prompt_within_the_budget(name, shape, seed, length, budget):
    queries, keys, values = layer(seed, *shape, head_dim=4, prompt=length, layers=1)
    policy = kvlab.policy(name, **({} if name == "full" else {"budget": budget}))
    kept = sets(policy.keep(queries, keys, values, pseudo=queries[:, :, -3:])[0])
    assert len(kept) == shape[1]
    for positions in kept:
        assert positions[0] >= 0 and positions[-1] < length
        if name not in ("full", "morphkv"):
            allowed = budget if isinstance(budget, int) else max(int(budget * length), NEEDS[name])
            assert len(positions) <= min(allowed, length)
            if isinstance(budget, int):
                assert len(positions) == min(budget, length)
        else:
            assert positions == list(range(length))
