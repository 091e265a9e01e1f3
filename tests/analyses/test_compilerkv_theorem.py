"""CompilerKV's theorem 4.1: identities, bounds, and heads that break them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.compilerkv import (
    HEADS,
    LAYERS,
    PROMPT,
    TRACES,
    analyses,
    kept,
    lonely_head,
    tables,
    window_attention,
)

from kvlab.analyses.compilerkv import theorem
from kvlab.methods import policy


def test_the_bound_breaks_for_a_lonely_head():
    lonely = lonely_head()

    plain = theorem.theorem_4_1([lonely], [1])
    assert plain.metrics["theorem41/a2_violated"] == pytest.approx(1 / 3)
    head = plain.table.set_index("head")
    assert head.loc[0, "lost"] > 0.9 > head.loc[0, "bound"] and head.loc[1, "lost"] < head.loc[1, "bound"]


@pytest.mark.parametrize("seed", range(5))
def test_l1_is_exactly_twice_the_lost_mass(seed):
    random = np.random.default_rng(seed)
    rows = random.dirichlet(np.full(40, 0.2), size=7)
    stays = random.random((7, 40)) < 0.5
    stays[:, 0] = True
    l1, squares, lost = (x.numpy() for x in theorem.distances(torch.tensor(rows), torch.tensor(stays)))
    for row, keep, *found in zip(rows, stays, l1, squares, lost, strict=True):
        subset = np.where(keep, row, 0) / row[keep].sum()
        mass = row[~keep].sum()
        assert found == pytest.approx([np.abs(row - subset).sum(), ((row - subset) ** 2).sum(), mass], abs=1e-14)
        assert found[0] == pytest.approx(2 * mass, abs=1e-14)
        assert found[1] <= 2 * mass**2 + 1e-14
        # Neither without renormalising nor with the square is it an equality.
        assert np.abs(row - np.where(keep, row, 0)).sum() == pytest.approx(mass, abs=1e-14) != 2 * mass
        assert abs(found[1] - 2 * mass**2) > 1e-6


def test_the_squared_bound_is_met_by_two_entries():
    l1, squares, lost = theorem.distances(torch.tensor([[0.7, 0.3]]).double(), torch.tensor([[True, False]]))
    assert float(squares) == pytest.approx(2 * 0.3**2) and float(l1) == pytest.approx(0.6) == 2 * float(lost)


def test_the_theorem_on_traces():
    metrics, table = analyses()["theorem"].metrics, analyses()["theorem"].table
    assert metrics["theorem41/largest_gap"] < 1e-13 < metrics["theorem41/mean_ratio"]
    assert metrics["theorem41/largest_ratio"] <= 1
    assert len(table) == 3 * 2 * LAYERS * HEADS
    # What a head discards of the window's attention, again by hand.
    stays = kept(TRACES[0], policy("compilerkv", budget=64, tables=tables(), pad="budget"))[1][0]
    gone = np.setdiff1d(np.arange(PROMPT), stays)
    lost = window_attention(TRACES[0])[1, 2, gone].sum() / 32
    row = table.query("document == 'document 1' and budget == 64 and layer == 1 and head == 2")
    assert row["lost"].item() == pytest.approx(lost, abs=1e-6)
