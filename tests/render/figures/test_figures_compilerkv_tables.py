"""CompilerKV's figures A2 and A3 of the tables that come along, and what learnt tables are worth."""

from __future__ import annotations

import pandas as pd
import pytest
from support import drawing

from kvlab.analyses.compilerkv import held_out, marginal, tables
from kvlab.analyses.findings import Findings
from kvlab.methods._base.lookup import DecisionTables
from kvlab.render.figures import compilerkv_tables as draw
from kvlab.render.figures import plots

pytestmark = pytest.mark.usefixtures("headless")


@pytest.fixture(scope="module")
def shipped():
    return DecisionTables.load("smollm2-135m")


def test_figure_a2_has_every_head_and_marks_the_papers_middle_layers(shipped):
    structure = tables.structure(shipped)
    left, right, _ = draw.figure_a2(shipped, structure).axes
    assert left.collections[0].get_array().shape == (30, 9) and drawing.titles(left.figure)[0].startswith("Figure A2")
    assert list(right.lines[0].get_ydata()) == pytest.approx(structure.table["weight"].tolist())
    span = right.patches[0]
    assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((12 / 31 * 29, 20 / 31 * 29))
    assert drawing.legend(right) == ["paper: low weights here (relative depth)"]


def test_figure_a3_has_a_curve_for_each_perplexity_that_was_seen(shipped):
    left, right, _ = draw.figure_a3(shipped).axes
    grid = tables.mean_thresholds(shipped)
    shown = left.collections[0].get_array()
    assert shown.shape == grid.shape and shown.count() == grid.notna().sum().sum()
    seen = grid.dropna(axis=1, how="all")
    curves = drawing.curves(right)
    assert list(curves) == [*(f"perplexity about {column}" for column in seen), "paper: falls (no numbers)"]
    for column in seen:
        assert curves[f"perplexity about {column}"].y == seen[column].dropna().tolist()
    _, (first, last) = curves["paper: falls (no numbers)"]
    assert first == grid.max().max() > last == grid.min().min()


def test_alpha_has_a_curve_for_each_log_and_table():
    rows = [
        {"log": log, "table": table, "alpha": alpha, "spread": spread, "neutral": 0.5}
        for log, scale in (("even_log", 1), ("neutral_log", 2))
        for table in ("heads", "risk")
        for alpha, spread in ((0, 0.1 * scale), (1, 0.2 * scale))
    ]
    left, right = draw.alpha(Findings(pd.DataFrame(rows))).axes
    curves = drawing.curves(left)
    assert list(curves) == [
        f"{table}, {words}" for words in ("evenly tried", "neutral preferred") for table in ("heads", "risk")
    ]
    assert curves["risk, neutral preferred"] == ([3e-4, 1], [0.2, 0.4])
    assert drawing.curves(right)["heads, evenly tried"].y == [0.5, 0.5] and left.get_yscale() == "log"


def test_comparisons_on_held_out_text_stand_in_their_order():
    findings = Findings(pd.DataFrame())
    for measure, sign in (("nll", 1), ("mass", -1)):
        for number, comparison in enumerate(held_out.COMPARED):
            value = sign * (number + 1)
            ends = sorted((value - 0.5, value + 0.5))
            findings.set(held_out.GAIN, value, tuple(ends), measure=measure, comparison=comparison)
    left, right = draw.held_out(findings).axes
    assert drawing.ticks(left, "y") == list(held_out.COMPARED.values())[::-1]
    assert [list(line.get_xdata()) for line in left.lines if line.get_marker() == "o"] == [list(range(9, 0, -1))]
    ends = [segment[:, 0].tolist() for bars in right.collections for segment in bars.get_segments()]
    assert ends[0] == [-9.5, -8.5] and left.lines[0].get_color() == plots.COLOURS[0]


def test_alone_has_a_point_for_each_budget_with_its_interval():
    found = Findings(pd.DataFrame())
    for number, comparison in enumerate(marginal.COMPARED):
        for budget in (64, 128):
            value = 0.01 * number + budget / 1e5
            found.set(marginal.GAIN, value, (value - 0.002, value + 0.004), comparison=comparison, budget=budget)
    figure = draw.per_head_gains(found)
    assert len(figure.axes) == 3 and drawing.ticks(figure.axes[0]) == ["64", "128"]
    assert list(figure.axes[1].lines[0].get_ydata()) == pytest.approx([0.01064, 0.01128])
    assert drawing.titles(figure)[0] == "learnt weights,\nover equal ones"


def test_penalty_has_a_curve_for_each_log():
    rows = [
        {"log": log, "penalty": penalty, "threshold": penalty * scale, "neutral": 1 - penalty, "slope": -penalty}
        for log, scale in (("joint", 1), ("alone", 2))
        for penalty in (0, 0.01)
    ]
    left, middle, right = draw.penalty(Findings(pd.DataFrame(rows))).axes
    assert drawing.curves(left) == {"joint": ([0, 0.01], [0, 0.01]), "alone": ([0, 0.01], [0, 0.02])}
    assert list(middle.lines[1].get_ydata()) == [1, 0.99] and list(right.lines[0].get_ydata()) == [0, -0.01]
