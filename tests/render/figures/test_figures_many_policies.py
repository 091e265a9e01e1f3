"""Figures of many policies: rows, whiskers and labels stand where they should."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import drawing

from kvlab.render import theme
from kvlab.render.figures import many_policies, plots

pytestmark = pytest.mark.usefixtures("headless")


@given(st.lists(st.floats(0, 1), max_size=15), st.floats(0.01, 0.2))
def test_labels_keep_their_order_and_their_distance(wanted, gap):
    places = many_policies.spread_out(wanted, gap, 0.0, 1.0)
    order = np.argsort(wanted, kind="stable")
    ordered = np.array(places)[order] if len(wanted) else np.array([])
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    room = 1.0 / max(1, len(wanted) - 1)
    assert (np.diff(ordered) >= min(gap, room) - 1e-9).all()
    if len(wanted) > 1 and (np.diff(np.array(wanted)[order]) >= gap).all():
        assert places == pytest.approx(wanted)  # what fits stays where it is


def test_differences_are_coloured_by_which_side_of_zero_they_lie_on():
    rows = pd.DataFrame(
        {
            "paper": ["A", "A", "B"],
            "label": ["up", "across", "down"],
            "value": [1.0, 0.0, -1.0],
            "low": [0.5, -0.5, -1.5],
            "high": [1.5, 0.5, -0.5],
        }
    )
    ax = many_policies.forest(rows, xlabel="gain", title="gains")
    dots = [line.get_color() for line in ax.lines if line.get_marker() == "o"]
    assert dots == ["#0072B2", many_policies.FAINT, "#D55E00"]
    assert drawing.ticks(ax, "y") == ["up", "across", "down"]
    assert {"A", "B"} <= set(drawing.texts(ax))


def test_dots_stand_in_the_order_given():
    rows = pd.DataFrame({"policy": ["quest", "dapq"], "value": [0.25, 0.5], "low": [0.2, 0.4], "high": [0.3, 0.6]})
    ax = many_policies.dots(rows, xlabel="x", title="t", reference=(0.1, "full cache"))
    assert drawing.ticks(ax, "y") == ["quest", "dapq"]
    tints = [label.get_color() for label in ax.get_yticklabels()]
    assert tints == [theme.look("quest").colour, theme.look("dapq").colour]
    assert {"0.25", "0.50", "full cache"} == set(drawing.texts(ax))


def test_whiskers_stand_aside_of_one_another_and_reach_the_interval():
    rows = pd.DataFrame(
        [
            {"policy": name, "budget": budget, "value": 1.0, "low": 0.5, "high": 1.25}
            for name in ("h2o", "dapq", "unnamed")
            for budget in (64, 128)
        ]
    )
    _, ax = plt.subplots()
    many_policies.whiskers(rows, names={"dapq": "DapQ", "h2o": "H2O"}, colours={"dapq": "blue", "h2o": "red"}, ax=ax)
    assert [container.get_label() for container in ax.containers] == ["DapQ", "H2O"]
    first, second = (container.lines[0].get_xdata() for container in ax.containers)
    assert (np.asarray(first) < [64, 128]).all() and (np.asarray(second) > [64, 128]).all()
    assert [segment[:, 1].tolist() for segment in ax.collections[0].get_segments()] == [[0.5, 1.25]] * 2


def test_a_table_of_findings_stands_beside_the_paper():
    rows = pd.DataFrame({"part": ["b", "a"], "value": [0.1, 0.3], "low": [0.0, 0.2], "high": [0.2, 0.4]})
    ax = plots.paper_beside_ours({"a": 20.0}, *plots.by_key(rows, "part", 100), ylabel="loss, %")
    assert drawing.ticks(ax) == ["b", "a"]
    assert drawing.bars(ax, plots.PAPER) == [20.0] and drawing.bars(ax, plots.COLOURS[0]) == pytest.approx([10, 30])
