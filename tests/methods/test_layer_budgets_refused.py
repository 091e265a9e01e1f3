"""Budgets by layer and by head: what cannot be done, and what is raised to what can."""

from __future__ import annotations

import warnings

import pytest
from support.layer_budgets import kept_sets, model, replayed
from support.refusals import refusal

import kvlab
from kvlab.errors import KvlabError


def refused(name, **parameters):
    return refusal(replayed, model(20, prompt=90), 90, name, **parameters)


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


def test_keep_says_of_how_many_layers_a_layer_is():
    tensors = [x[:1] for x in model(3, prompt=80)]
    for name in ("pyramidkv", "lacache"):
        with pytest.raises(KvlabError, match="layer 3 is outside"):
            kvlab.policy(name, budget=40).keep(*tensors, layer=3)
