"""What a policy needs is one object, and a method around another policy asks for all that the other one asks for."""

import copy
from dataclasses import fields
from functools import cached_property
from types import FunctionType

import pytest
import torch

import kvlab
from kvlab.core import ranking
from kvlab.methods import Budget
from kvlab.methods._base.needs import NOTHING, VERBS, Needs
from kvlab.methods._base.repeating import Repetition
from kvlab.methods._base.scorer import OWN, Wrapper

AROUND = ["adakv", "criticalkv", "chunkkv"]
REPETITION = Repetition(chunk=40, sinks=2, plus=True)


class Greedy(kvlab.Policy):
    """Scores tokens by all that there is to know of a prompt."""

    name = "greedy"
    paper = None
    budget: Budget = 20

    observes = 8  # pyright: ignore
    accumulates = True  # pyright: ignore
    reads_perplexity = 6  # pyright: ignore
    pseudo_key = "greedy"  # pyright: ignore
    minimum = 3  # pyright: ignore
    from_files = "a file"  # pyright: ignore
    needs = Needs(  # pyright: ignore
        projection=True, rotation=True, pre_queries=True, hidden=True, repetitions=(REPETITION,), origin=True
    )

    def pseudo_tokens(self, prompt, vocabulary, encode):
        return prompt[:5]

    def scores(self, prompt):
        scores = prompt.window_scores(8) + prompt.accumulated(self).unflatten(1, (prompt.kv_heads, -1)).sum(2)
        scores = scores + prompt.repeated(self, REPETITION) + prompt.perplexity(self)[:, None, None]
        asking = torch.cat([prompt.pseudo(self), prompt.pre_queries(self)], 2).square().mean((1, 2, 3))
        weights = torch.stack([weight.float().norm() for weight in prompt.projection(self)])
        assert len(prompt.rotation(self)) == prompt.rows
        assert prompt.origin(self)[0].shape[1] == prompt.length
        asking = asking + prompt.hidden(self).square().mean((1, 2))
        return scores + (asking + weights)[:, None, None]

    def choose(self, prompt, budget):
        return ranking.top_positions(self.scores(prompt), budget)


class Stepping(Greedy):
    def step(self, store, weights):
        raise AssertionError("a method around a scorer keeps every generated token")


def around(name):
    return kvlab.policy(name, budget=20, scorer=Stepping())


@pytest.mark.parametrize("name", [*AROUND, "think"])
def test_a_method_around_a_scorer_asks_for_all_that_the_scorer_asks_for(name):
    inner, outer = Greedy().needs, (kvlab.policy(name, scorer=Greedy()) if name == "think" else around(name)).needs
    for each in fields(Needs):
        if each.name not in (*VERBS, "queries", "response"):  # a scorer that sees the response runs in replays alone
            assert getattr(outer, each.name) == getattr(inner, each.name) != getattr(NOTHING, each.name), each.name
    assert name == "think" or kvlab.policy(name, budget=20, scorer="oracle_attention").needs.response
    assert outer.queries == (32 if name == "think" else 8)
    assert outer.pseudo.tokens(torch.arange(9), 0, torch.as_tensor).tolist() == [0, 1, 2, 3, 4]
    assert not outer.steps and not outer.acts_while_decoding


@pytest.mark.parametrize("name", AROUND)
def test_a_scorer_that_needs_everything_gets_it_in_a_replay_and_live(tiny, name):
    lm, policy, ids = tiny(), around(name), torch.arange(3, 63)[None]
    assert (policy.minimum, policy.from_files) == (3, "a file")
    result = kvlab.replay(kvlab.capture(lm, ids, new_tokens=3, pseudo=(), policies=[policy]), policy)
    with kvlab.compress(lm, policy) as session:
        lm.model.generate(ids, max_new_tokens=3)
    assert all(session.kept_after_prefill(layer).equal(result.kept(layer)) for layer in result.trace.layers)


POINTS = sorted(
    name
    for name, point in vars(kvlab.Policy).items()
    if isinstance(point, FunctionType | property | classmethod) and not name.startswith("_")
)


class Answers:
    """Gives the name of whatever it is asked for, and what it was asked with."""

    needs = NOTHING

    def __getattr__(self, name):
        return name if isinstance(vars(kvlab.Policy)[name], property) else lambda *args, **named: (name, args, named)


class Plain(Wrapper):
    name = "plain"
    _inner = cached_property(lambda self: Answers())  # pyright: ignore


@pytest.mark.parametrize("point", POINTS)
def test_every_override_point_is_a_wrappers_own_or_answered_by_the_policy_inside(point):
    if point in OWN:
        assert point == "needs" or getattr(Plain, point) == getattr(kvlab.Policy, point) or point == "scores_tokens"
    elif isinstance(vars(kvlab.Policy)[point], property):
        assert getattr(Plain(), point) == point
    else:
        assert getattr(Plain(), point)(1, more=2) == (point, (1,), {"more": 2})


def test_a_wrappers_own_points_are_points_and_all_verbs():
    assert set(POINTS) >= OWN and len(POINTS) > 25
    assert set(VERBS.values()) <= OWN
    assert {"scores", "importance", "minimum", "from_files", "entries", "asked", "pseudo_tokens"}.isdisjoint(OWN)


def test_needs_are_those_that_a_class_says_and_those_of_its_verbs():
    class Further(Stepping):
        name = "further"
        observes = None  # pyright: ignore

        @property
        def needs(self):
            return Needs(queries=3)

        def select(self, store, queries, scaling):
            return None

    found = Further().needs
    assert found.queries is None and found.every_query and found.accumulated and found.perplexity == 6
    assert found.chooses and found.steps and found.selects and not (found.biases or found.amends or found.surveys)
    assert not found.projection and Greedy().needs.projection
    assert found.inputs == Needs(None, True, 6, found.pseudo) and not Further().needs.inputs.acts_while_decoding


def test_either_of_two_needs():
    one, other = Greedy().needs, Needs(queries=40, amends=True, repetitions=(REPETITION,))
    assert (one | other).queries == 40 and (one | other).repetitions == (REPETITION,)
    assert (one | other).amends and (one | other).pseudo is one.pseudo
    assert (one | NOTHING) == one == (NOTHING | one) and (Needs(queries=None) | one).queries is None


def test_copies_of_a_policy_need_the_same():
    policy = kvlab.policy("dapq", budget=20, window=8)
    needs, ids = policy.needs, torch.arange(30)
    other = copy.deepcopy(policy)
    assert other == policy and other.needs == needs
    assert other.needs.pseudo.tokens(ids, 50, None).equal(needs.pseudo.tokens(ids, 50, None))
    assert policy.replace(window=4).needs.pseudo != needs.pseudo
