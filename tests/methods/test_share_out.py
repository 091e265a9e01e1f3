"""How a total is shared out in whole numbers: nearest to proportional, within a floor and a ceiling."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import oracles

from kvlab.methods._base.budgets import share_out


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
