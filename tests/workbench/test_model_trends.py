"""An effect against the size of models: which way it goes, and where everything of the small plot lies."""

from __future__ import annotations

import math

import pytest
from support.toy_claims import claim

from kvlab import papers
from kvlab.workbench.report import ledger, model_trends
from kvlab.workbench.report.ledger_models import Subject


def row(*values, paper=0.6, direction=None, finding="", **changes) -> model_trends.Row:
    """A claim with (parameters, value, half of the interval's width or None) on each model."""
    sized = {"size": {"kind": "at_least", "value": -9}, "direction": direction or {"kind": "greater", "than": 0.0}}
    tested = claim(paper_value=paper, finding=finding, **{**sized, **changes})
    sizes, found = [], []
    for parameters, value, half in values:
        ends = (None, None) if half is None else (value - half, value + half)
        verdict = papers.Verdict(value=value, low=ends[0], high=ends[1], verdict="holds", why="")
        sizes.append(Subject(f"of {parameters}", parameters))
        found.append(ledger.Entry(tested, verdict, None, sizes[-1].name))
    return next(iter(model_trends.rows(found, sizes)), model_trends.Row(tested, []))


@pytest.mark.parametrize(
    ("values", "trend"),
    [
        ([(1e8, 0.1, 0.05), (1e9, 0.5, 0.05)], model_trends.TOWARDS),
        ([(1e8, 0.1, 0.05), (5e8, 0.9, 0.01), (1e9, 0.5, 0.05)], model_trends.TOWARDS),
        ([(1e8, 0.1, 0.05), (5e8, 0.3, 0.2), (1e9, 0.5, 0.05)], model_trends.TOWARDS),
        ([(1e8, 0.1, 0.05), (5e8, 0.55, 0.05), (1e9, 0.3, 0.05)], model_trends.MIXED),
        ([(1e8, 0.1, 0.05), (5e8, 0.5, 0.05), (1e9, 0.3, 0.3)], model_trends.MIXED),
        ([(1e8, 0.3, 0.3), (5e8, 0.5, 0.05), (8e8, 0.1, 0.05), (1e9, 0.3, 0.3)], model_trends.MIXED),
        ([(1e8, 0.5, 0.05), (5e8, 1.5, 0.05), (1e9, 0.3, 0.05)], model_trends.MIXED),
        ([(1e8, 0.5, 0.05), (5e8, 0.3, 0.3), (1e9, 0.1, 0.05)], model_trends.AWAY),
        ([(1e8, 0.5, 0.05), (1e8, 0.1, 0.05), (1e9, 0.3, 0.3)], model_trends.LEVEL),
        ([(1e9, 0.5, 0.05), (1e8, 0.1, 0.05)], model_trends.TOWARDS),
        ([(1e8, 0.5, 0.05), (1e9, 0.1, 0.05)], model_trends.AWAY),
        ([(1e8, 0.5, 0.05), (1e9, 1.5, 0.05)], model_trends.AWAY),
        ([(1e8, 0.1, 0.3), (1e9, 0.5, 0.2)], model_trends.LEVEL),
        ([(1e8, 0.1, None), (1e9, 0.11, None)], model_trends.TOWARDS),
        ([(1e8, 0.1, None), (1e9, 0.1, None)], model_trends.LEVEL),
        ([(1e8, 0.1, 0.05)], None),
        ([(1e8, 0.1, 0.05), (1e8, 0.5, 0.05)], None),
        ([(1e8, 0.1, 0.05), (None, 0.5, 0.05)], None),
        ([(1e8, 0.1, 0.05), (1e9, None, None)], None),
    ],
)
def test_whether_an_effect_comes_nearer_to_the_papers(values, trend):
    assert row(*values).trend == trend
    assert row(*values, paper=None, direction={"kind": "greater", "than": 0.0}).trend is None


def test_trends_are_counted_of_findings_alone():
    towards = row((1e8, 0.1, 0.01), (1e9, 0.5, 0.01))
    check = row((1e8, 0.1, 0.01), (1e9, 0.5, 0.01))
    other = model_trends.Row(towards.claim.model_copy(update={"id": "other"}), towards.entries, towards.points)
    for entry in check.entries:
        entry.claim = entry.claim.model_copy(update={"kind": "control"})
    assert model_trends.trends([towards, other, check, row((1e8, 0.1, 0.01))]) == {model_trends.TOWARDS: 2}


def test_a_finding_whose_claims_go_different_ways_is_in_no_order_of_size():
    towards = row((1e8, 0.1, 0.01), (1e9, 0.5, 0.01), finding="one")
    away = row((1e8, 0.5, 0.01), (1e9, 0.1, 0.01), finding="one")
    level = row((1e8, 0.5, 0.01), (1e9, 0.5, 0.01), finding="one")
    assert model_trends.trends([towards, towards]) == {model_trends.TOWARDS: 1}
    assert (
        model_trends.trends([towards, away]) == model_trends.trends([towards, away, level]) == {model_trends.MIXED: 1}
    )
    assert model_trends.trends([towards, level]) == {model_trends.LEVEL: 1}


def test_every_way_is_said():
    assert set(model_trends.SAID) == set(model_trends.TRENDS)


def test_the_small_plot_puts_everything_where_it_is():
    """x by the logarithm of the size, over all models of the page; y from the least to the most of what is drawn."""
    found = row((1e8, 0.2, 0.1), (1e9, 0.4, 0.1))
    page = [Subject("a", 10**8), Subject("b", 10**9), Subject("c", 10**10)]
    at = model_trends.plot(found, page)
    assert at is not None
    left, right = (model_trends.LEFT + 12, model_trends.RIGHT - 12)
    assert [mark.x for mark in at.marks] == [left, (left + right) / 2]

    def height(value: float) -> float:
        return pytest.approx(model_trends.BOTTOM - value / 0.6 * (model_trends.BOTTOM - model_trends.TOP), abs=0.06)

    assert [(mark.y, mark.low, mark.high) for mark in at.marks] == [
        (height(0.2), height(0.1), height(0.3)),
        (height(0.4), height(0.3), height(0.5)),
    ]
    assert [(line.kind, line.y, line.label) for line in at.lines] == [
        ("paper", height(0.6), "0.600"),
        ("turn", height(0.0), "0"),
    ]
    assert [label for _, label in at.sizes] == ["100M", "1B", "10B"]
    assert model_trends.plot(row((1e8, 0.2, 0.1)), page) is None


def test_labels_that_would_touch_are_left_out():
    found = row((1e8, 0.01, None), (1e9, 100.0, None), paper=0.5)
    paper, turn, most = model_trends.plot(found, [Subject("a", 10**8), Subject("b", 10**9)]).lines
    assert (paper.label, turn.label, most.label) == ("0.500", "", "100")
    assert (most.kind, most.y) == ("end", model_trends.TOP), "the axis' other end lies at the turn"
    crowd = [Subject(str(n), n * 10**8) for n in (1, 2, 3, 90, 100)]
    labels = [label for _, label in model_trends.plot(found, crowd).sizes]
    assert labels[0] == "100M" and labels[-1] == "10B" and "9B" not in labels


def test_the_turn_of_a_test_of_several_is_that_of_its_own_metric():
    tests = [{"kind": "greater", "metric": "other", "than": 5.0}, {"kind": "greater", "metric": "m", "than": 0.25}]
    found = row((1e8, 0.1, None), (1e9, 0.5, None), paper=None, direction={"kind": "all_of", "tests": tests})
    lines = model_trends.plot(found, [Subject("a", 10**8), Subject("b", 10**9)]).lines
    assert [(line.kind, line.label) for line in lines] == [("turn", "0.250"), ("end", "0.100"), ("end", "0.500")]


PAPERS = {"model": {"name": "LLaMA-2 7B", "parameters": 10**10}}


def test_the_papers_number_stands_at_the_size_of_its_model():
    """One axis for all plots: up to the largest model that any of them marks."""
    found, page = row((1e8, 0.2, 0.1), (1e9, 0.4, 0.1), **PAPERS), [Subject("a", 10**8), Subject("b", 10**9)]
    left, right = model_trends.LEFT + 12, model_trends.RIGHT - 12
    at = model_trends.plot(found, page)
    assert at.goal == model_trends.Goal(right, "LLaMA-2 7B", at.lines[0].y) and at.lines[0].kind == "paper"
    assert [mark.x for mark in at.marks] == [left, (left + right) / 2]
    further = model_trends.plot(found, page, reach=10**12)
    assert (further.goal.x, further.marks[1].x) == ((left + right) / 2, left + (right - left) / 4)
    assert model_trends.plot(row((1e8, 0.2, 0.1), (1e9, 0.4, 0.1)), page).goal is None
    larger = model_trends.plot(found, [*page, Subject("c", 10**11)])
    assert left < larger.goal.x < right, "a model of ours may be larger than the paper's"


def test_where_the_papers_number_has_another_unit_only_its_model_is_marked():
    other = {"size": {"kind": "not_compared", "because": "units"}}
    at = model_trends.plot(row((1e8, 0.2, 0.1), (1e9, 0.4, 0.1), **PAPERS, **other), [Subject("a", 10**8)])
    assert at.goal.name == "LLaMA-2 7B" and at.goal.y is None


def test_the_axis_reaches_the_models_of_what_was_measured():
    measured, other = row((1e8, 0.2, 0.1), **PAPERS), row((1e8, 0.2, 0.1))
    larger = row(model={"name": "13B", "parameters": 13 * 10**9})
    recomputed = row((1e8, 0.2, 0.1), kind="recomputed", model={"name": "14B", "parameters": 14 * 10**9})
    assert model_trends.reach([measured, other, larger, recomputed]) == 10**10 and model_trends.reach([other]) == 0


def test_distances_are_measured_from_the_papers_number():
    """The same two values, with the paper's number on either side."""
    values = [(1e8, 0.2, 0.01), (1e9, 0.4, 0.01)]
    assert (
        row(*values, paper=0.0 + math.pi).trend == model_trends.TOWARDS
        and row(*values, paper=0.0).trend == model_trends.AWAY
    )
