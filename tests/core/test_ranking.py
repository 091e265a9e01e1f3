"""Rankings against sorting in plain Python, and NumPy's way against torch's own, which other devices and types take."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import pretend_gpu
from support.device_watch import watched

from kvlab.core import ranking

SCORES = st.one_of(st.integers(-3, 3).map(float), st.floats(width=32, allow_nan=False))


def best_first(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda position: (-scores[position], position))


@st.composite
def tables(draw) -> tuple[list[list[float]], list[int]]:
    """Scores of some rows, and how many are wanted of each."""
    length = draw(st.integers(1, 12))
    rows = draw(st.lists(st.lists(SCORES, min_size=length, max_size=length), min_size=1, max_size=4))
    return rows, draw(st.lists(st.integers(0, length + 2), min_size=len(rows), max_size=len(rows)))


WAYS = {"NumPy": ranking._reaching_by_numpy, "torch": ranking._reaching_by_torch}
in_both_ways = pytest.mark.parametrize("way", WAYS)


def by(way: str):
    """On this machine, rank as a device without NumPy would."""
    return mock.patch.object(ranking, "_reaching_by_numpy", WAYS[way])


@given(tables())
@example(([[0.0, -0.0, 1.0]], [2]))
@example(([[math.inf, -math.inf, math.inf], [-math.inf] * 3], [1, 2]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@in_both_ways
def test_the_best_of_every_row_ascending_and_from_the_best_on(way, dtype, drawn):
    rows, counts = drawn
    scores = torch.tensor(rows, dtype=dtype)
    for k in sorted(set(counts)):
        wanted = [best_first(row)[:k] for row in rows]
        with by(way):
            assert ranking.top_positions(scores, k).tolist() == [sorted(best) for best in wanted]
            assert ranking.best_first(scores, k).tolist() == wanted


@given(tables())
@in_both_ways
def test_rows_may_want_different_numbers(way, drawn):
    rows, counts = drawn
    widest = min(max(counts), len(rows[0]))
    wanted = [sorted(best_first(row)[:k]) for row, k in zip(rows, counts, strict=True)]
    padded = [best + [ranking.PAD] * (widest - len(best)) for best in wanted]
    with by(way):
        assert ranking.top_positions(torch.tensor(rows), torch.tensor(counts)).tolist() == padded


@given(tables())
@example(([[0.0, -0.0, 1.0]], [2]))
@example(([[math.nan, 1.0, math.nan, 1.0], [math.inf, -math.inf, math.inf, 0.0]], [1, 2, 3]))
def test_a_gpu_ranks_as_the_cpu_and_is_not_waited_for(drawn):
    rows, counts = drawn
    scores = torch.tensor(rows, dtype=torch.float32)
    with pretend_gpu.present() as device:
        there = scores.to(device)
        for k in sorted({min(count, len(rows[0])) for count in counts}):
            with watched() as seen:
                found = ranking.top_positions(there, k), ranking.best_first(there, k)
            assert [x.tolist() for x in found] == [
                ranking.top_positions(scores, k).tolist(),
                ranking.best_first(scores, k).tolist(),
            ]
            assert not seen.waits


@pytest.mark.parametrize("k", [1, 3, 5])
@in_both_ways
def test_nan_ranks_highest_and_mixes_up_no_rows(way, k):
    """A row that is short of scores to compare with and one with more of them than are wanted add up."""
    scores = torch.tensor([[1.0, math.nan, 2.0, 3.0, 0.0, -1.0], [1.0, 0.5, 0.0, 1.0, 0.0, 0.0]])
    wanted = [[1, 3, 2, 0, 4, 5], [0, 3, 1, 2, 4, 5]]
    with by(way):
        assert ranking.top_positions(scores, k).tolist() == [sorted(best[:k]) for best in wanted]


@in_both_ways
def test_what_is_ranked_may_be_differentiated_strided_and_of_many_dimensions(way):
    scores = torch.rand(2, 9, 3, generator=torch.Generator().manual_seed(0)).requires_grad_().transpose(1, 2)
    wanted = [[sorted(best_first(row)[:4]) for row in rows] for rows in scores.tolist()]
    with by(way):
        assert ranking.top_positions(scores, 4).tolist() == wanted
        assert ranking.top_positions(scores, torch.full((2, 3), 4)).tolist() == wanted


def test_half_precision_ranks_as_well():
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0]], dtype=torch.bfloat16)
    assert ranking.top_positions(scores, 3).tolist() == [[1, 2, 3]]
    assert ranking.best_first(scores, 3).tolist() == [[1, 3, 2]]
