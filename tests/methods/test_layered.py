"""Layer budgets from a list, around any score."""

from __future__ import annotations

import pytest
from support import oracles
from support.layer_budgets import kept_sets, model, replayed
from support.refusals import refusal
from support.tensors import exact

import kvlab


@pytest.mark.parametrize(
    ("shares", "budget", "length", "entries"),
    [
        ((), 20, 60, [20, 20, 20, 20]),
        ((1, 1, 1, 1), 20, 60, [20, 20, 20, 20]),
        ((4, 2, 1, 1), 24, 60, [48, 24, 12, 12]),
        ((0, 1, 1, 2), 24, 60, [9, 22, 22, 43]),  # the first gets what its scorer needs; 87 by 1, 1, 2
        ((8, 1, 1, 1), 30, 50, [50, 24, 23, 23]),  # what exceeds the prompt goes to the others
    ],
)
def test_every_layer_keeps_its_share_of_the_best(shares, budget, length, entries):
    tensors = model(5, 4, 2, length, layers=4)
    policy = dict(budget=budget, shares=shares, scorer=kvlab.policy("snapkv", budget=budget, window=8, kernel=5))
    found = kept_sets(replayed(tensors, length, "layered", **policy))
    assert [len(layer[0]) for layer in found] == entries
    for queries, keys, own, kept in zip(*exact(*tensors[:2]), entries, found, strict=True):
        importance = oracles.snapkv_importance(queries, keys, 8, 5)
        assert [oracles.top_positions(head, own) for head in importance] == kept


def test_a_list_of_another_length_and_bad_numbers_are_refused(trace_of_two):
    assert "3 shares, and this model compresses 2 layers" in refusal(
        kvlab.replay, trace_of_two, kvlab.policy("layered", budget=40, shares=[1, 2, 3])
    )
    for shares in ([-1, 2], [float("inf"), 1], ["a"]):
        refusal(kvlab.policy, "layered", budget=40, shares=shares)
    assert kvlab.policy("layered", budget=40, shares=[1, 2]) == kvlab.policy("layered", budget=40, shares=(1.0, 2.0))


@pytest.fixture
def trace_of_two(tiny):
    return kvlab.capture(tiny("tiny-llama-gqa"), list(range(3, 80)), 2)
