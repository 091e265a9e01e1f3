"""Figures of policies and storages at equal stored bytes."""

from __future__ import annotations

import pytest
from support import drawing
from support.storing import FEW

from kvlab.analyses.together import storing
from kvlab.render.figures import many_policies, plots
from kvlab.render.figures import storage as draw

pytestmark = pytest.mark.usefixtures("headless")


def test_a_panel_for_each_loss_with_the_full_cache_s_storages_by_name():
    figure = draw.pareto(FEW)
    assert drawing.titles(figure) == list(storing.MEASURES.values())
    for ax in figure.axes:
        assert "rounded" in drawing.texts(ax) and "as_is" not in drawing.texts(ax)
        squares = [line for line in ax.lines if line.get_marker() == "s"]
        assert [(*line.get_xdata(), *line.get_ydata()) for line in squares] == [pytest.approx((0.3, 0.15))]
    assert {"one", "two", "evicted, kept as it is", "evicted, kept in rounded"} <= set(drawing.legend(figure))


def test_a_policy_has_one_colour_and_a_storage_one_dash():
    ax = draw.pareto(FEW).axes[0]
    two = [line for line in ax.lines if line.get_color() == plots.COLOURS[0]]
    assert sorted(line.get_linestyle() for line in two) == ["-", "--"], "the best by KL has the first colour"


def test_differences_have_a_heading_for_each_question():
    figure = draw.differences(storing.findings(FEW, [0.2]))
    (ax,) = figure.axes
    assert {
        "Evict, or quantise to rounded? at 30%",
        "Evict alone, or evict less and keep in rounded? at 20%",
    } <= set(drawing.texts(ax))
    assert drawing.ticks(ax, "y") == ["one", "two", "two"]
    assert many_policies.BETTER in {line.get_color() for line in ax.lines}
