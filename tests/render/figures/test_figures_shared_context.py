"""Figures of several questions over one compressed context."""

from __future__ import annotations

import pytest
from support import drawing
from support.turning import LOSSES

from kvlab.analyses.shared_context import asking
from kvlab.render.figures import shared_context as draw

pytestmark = pytest.mark.usefixtures("headless")


def test_a_row_for_each_policy_and_what_it_had_read():
    (ax,) = draw.question(asking.findings(LOSSES)).axes
    assert drawing.ticks(ax, "y") == [
        f"{policy}, {read}"
        for policy in ("snapkv", "keydiff")
        for read in ("each question read", "the first one read", "none read")
    ]
    assert drawing.texts(ax)[:3] == ["0.20", "0.45", "1.00"] and "full cache" in drawing.texts(ax)


def test_a_panel_for_each_way_with_a_line_for_each_policy():
    figure = draw.turns(asking.findings(LOSSES))
    each, first, none = figure.axes
    assert drawing.titles(figure) == list(draw.TITLES.values())
    assert drawing.legend(each) == ["snapkv", "keydiff"] and first.get_legend() is None
    curve = next(line for line in first.lines if line.get_label() == "snapkv")
    assert curve.get_xydata().tolist() == [[1, pytest.approx(0.2)], [2, pytest.approx(0.7)]]
    assert drawing.ticks(none) == ["1", "2"]
