"""Figures of what predicts the answer."""

from __future__ import annotations

import pytest
from support import drawing
from support.stand_ins import made

from kvlab.analyses.stand_ins import correlations
from kvlab.papers.stand_ins import OUTCOMES
from kvlab.render.figures import stand_ins as draw

pytestmark = pytest.mark.usefixtures("headless")


@pytest.fixture(scope="module")
def found():
    return correlations.findings(made())


def test_a_panel_for_each_outcome_with_the_best_stand_in_first(found):
    figure = draw.ranking(found)
    assert [title.rpartition(", ")[0] for title in drawing.titles(figure)] == list(OUTCOMES.values())
    names = drawing.ticks(figure.axes[2], "y")
    assert names[0] == "output error" and names[-1] == "recall" and "window recall" not in names
    assert "n = 6" in drawing.titles(figure)[2] and "n = 0" in drawing.titles(figure)[0]


def test_both_ways_and_every_budget(found):
    (ax,) = draw.within_and_across(found).axes
    assert drawing.legend(ax) == [
        "across policies, at one budget on one prompt",
        "within a policy, over budgets and prompts",
    ]
    (ax,) = draw.by_budget(found).axes
    assert drawing.ticks(ax) == ["64", "128"] and "output error" in drawing.legend(ax)


def test_every_policy_is_named_beside_its_means():
    mass, error = draw.policies(made(), 64).axes
    assert set(drawing.texts(error)) >= {f"p{number}" for number in range(6)}
    assert drawing.titles(error.figure)[1] == "output error: 1.00 between the means"
    assert mass.get_ylabel() == draw.ANSWER
