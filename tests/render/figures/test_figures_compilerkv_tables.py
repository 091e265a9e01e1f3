"""CompilerKV's figures A2 and A3 of the published tables, and what learnt weights are worth."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from support import drawing

from kvlab.analyses.compilerkv import marginal, printed
from kvlab.analyses.findings import Findings
from kvlab.methods._base.lookup import PUBLISHED_TABLES, DecisionTables
from kvlab.render.figures import compilerkv_tables as draw

pytestmark = pytest.mark.usefixtures("headless")


def test_the_published_tables_by_layer_and_by_entropy():
    tables = DecisionTables.load(PUBLISHED_TABLES)
    left, right = draw.published_tables(tables, printed.published_tables(tables)).axes
    assert list(left.lines[0].get_ydata()) == pytest.approx(np.array(tables.heads).mean(1))
    span = left.patches[0]
    assert (span.get_x(), span.get_x() + span.get_width()) == (12, 20)
    curves = drawing.curves(right)
    assert list(curves) == [*(f"perplexity, bin {n} of 4" for n in (1, 2, 3, 4)), "paper: falls (no numbers)"]
    third = curves["perplexity, bin 3 of 4"]
    assert third.y == pytest.approx(np.array(tables.risk)[:, :, 2].mean(0)) and third.x[0] == pytest.approx(2.2)
    _, (first, last) = curves["paper: falls (no numbers)"]
    assert first > last


def test_gains_have_a_row_for_each_budget_with_its_interval_in_percentage_points():
    found = Findings(pd.DataFrame({"document": ["a", "b"]}))
    for budget in (64, 1024):
        found.set(marginal.GAIN, budget / 1e5, (budget / 1e5 - 0.002, budget / 1e5 + 0.004), budget=budget)
    found.set(marginal.CHANGED, 0.25, budget=1024)
    figure = draw.per_head_gains(found)
    (ax,) = figure.axes
    assert drawing.ticks(ax, "y") == ["64 entries", "1,024 entries\nlearnt for 25 % of heads"]
    assert drawing.titles(figure) == ["Learnt weights over equal ones"] and "n = 2 documents" in figure.get_supxlabel()
    assert list(ax.lines[0].get_xdata()) == pytest.approx([0.064, 1.024])
    assert drawing.texts(ax) == ["+0.06 (-0.14 to +0.46)", "+1.02 (+0.82 to +1.42)"]


def test_a_gain_of_nothing_has_an_axis_all_the_same():
    found = Findings(pd.DataFrame())
    found.set(marginal.GAIN, 0.0, (0.0, 0.0), budget=128)
    (ax,) = draw.per_head_gains(found).axes
    low, high = ax.get_xlim()
    assert low == pytest.approx(-1.3 * draw.LEAST) and high == pytest.approx(2.2 * draw.LEAST)
