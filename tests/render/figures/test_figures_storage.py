"""Figures of policies and storages at equal stored bytes."""

from __future__ import annotations

import pandas as pd
import pytest
from support import drawing
from support.storing import FEW

from kvlab.analyses.findings import Findings
from kvlab.analyses.together import storing
from kvlab.render import theme
from kvlab.render.figures import plots
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


def test_differences_have_a_panel_for_each_question_and_a_row_for_each_pair_of_answers():
    found = storing.findings(FEW, [0.2])
    figure = draw.differences(found)
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert [drawing.title(ax) for ax in shown] == ["Evict, or quantise?", "Evict, or evict less and quantise?"]
    evict, both = shown
    assert drawing.ticks(evict, "y") == ["rounded, 30%"] and drawing.ticks(both, "y") == ["rounded, 20%"]
    assert all("KL of the next token, nats" in ax.get_xlabel() for ax in shown), "the axis says its quantity and unit"
    assert drawing.legend(figure) == ["one", "two"]
    note = figure.get_supxlabel()
    assert "n = 2 documents" in note and "95 % intervals of paired differences" in note


def test_a_difference_is_a_mark_in_its_policy_s_look_filled_where_it_is_decided():
    found = Findings(pd.DataFrame({"document": ["a", "b", "c"], "measure": ["kl", "kl", "needles_lost"]}))
    found.set(storing.SIZE, 0.5, storage="int8")
    ends = {"snapkv": (0.1, 0.3), "kvzip": (-0.1, 0.3)}
    for policy, interval in ends.items():
        keys = {"storage": "int8", "policy": policy, "measure": "kl"}
        found.set(storing.EVICT, sum(interval) / 2, interval, **keys)
        found.set(storing.BOTH, sum(interval) / 2, interval, other="kivi-4", **keys)
    figure = draw.differences(found)
    assert figure.get_supxlabel().startswith("n = 2 documents"), "those of this measure alone"
    evict, both = (ax for ax in figure.axes if ax.get_visible())
    marks = {line.get_marker(): line for line in evict.lines if len(line.get_xdata()) == 1}
    snapkv, kvzip = (marks[theme.look(policy).marker] for policy in ends)
    assert snapkv.get_markerfacecolor() == snapkv.get_color() == theme.look("snapkv").colour
    assert kvzip.get_markerfacecolor() == "white" and kvzip.get_color() == theme.look("kvzip").colour
    assert drawing.ticks(both, "y") == ["int8, or kivi-4, 50%"]
    turned = [line.get_xdata()[0] for line in both.lines if len(line.get_xdata()) == 1]
    assert turned == pytest.approx([-0.2, -0.1]), "above zero, evicting as well loses less"
