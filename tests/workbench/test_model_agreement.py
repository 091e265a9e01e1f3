"""Findings across models: what holds on every one, what only on larger or smaller ones, and what stays open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.toy_claims import claim

from kvlab import papers
from kvlab.papers.stand_ins import Prediction
from kvlab.workbench.report import model_agreement, paper_summary
from kvlab.workbench.report.ledger import Entry
from kvlab.workbench.report.ledger_models import Subject
from kvlab.workbench.report.provenance import Origin

SIZES = [Subject("small", 10**8), Subject("middle", 10**9), Subject("large", 10**10)]


def stands(*states: str) -> list[Entry]:
    """One finding as it stands on each of the models, the smallest first; without a state it was not measured."""
    return [
        Entry(
            claim(paper="dapq", finding="toy's finding"),
            papers.Verdict(verdict=state, value=0.5, why=""),
            None,
            size.name,
            Origin(),
        )
        for size, state in zip(SIZES, states, strict=False)
        if state
    ]


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        (("holds", "holds in direction only"), model_agreement.EVERY),
        (("fails", "holds"), model_agreement.LARGER),
        (("fails", "undecided", "holds in direction only"), model_agreement.LARGER),
        (("fails", "fails", "holds"), model_agreement.LARGER),
        (("holds", "holds", "fails"), model_agreement.SMALLER),
        (("holds", "fails", "holds"), model_agreement.MIXED),
        (("fails", "fails"), model_agreement.NONE),
        (("fails", "undecided"), model_agreement.OPEN),
        (("undecided", "undecided", "holds"), model_agreement.OPEN),
        (("", "holds", "holds"), model_agreement.EVERY),
    ],
)
def test_how_a_finding_stands_across_models(states, kind):
    found = model_agreement.across(stands(*states), SIZES)
    assert [name for name, mine in found.items() if mine] == [kind]


@pytest.mark.parametrize(
    ("weighed", "kind"),
    [
        ((), model_agreement.SMALLER),
        (("small",), model_agreement.OPEN),
        (("small", "large"), model_agreement.SMALLER),
        (("large",), model_agreement.SMALLER),
    ],
)
def test_a_failure_by_a_stand_in_that_only_another_model_weighed_is_no_turn(weighed, kind):
    by_stand_in = claim(paper="dapq", finding="toy's finding", stand_in="mass_lost", stands_in="mass lost, for scores")
    found = Prediction("mass_lost", "answer", rho=0.9, low=0.8, high=1.0, documents=8)
    entries = [
        replace(
            entry, claim=by_stand_in, predictions={("mass_lost", "answer"): found} if entry.model in weighed else {}
        )
        for entry in stands("holds", "", "fails")
    ]
    assert [name for name, mine in model_agreement.across(entries, SIZES).items() if mine] == [kind]
    turning = "These hold on some models and fail on others: toy's finding." in paper_summary.digest(
        entries, SIZES[::2]
    )
    assert turning is (kind != model_agreement.OPEN), "a paper's summary and the lists across models agree"


def test_a_finding_of_one_model_says_nothing_across_models():
    assert not any(model_agreement.across(stands("holds", "not measured"), SIZES).values())


def test_a_finding_says_where_it_stands_how_if_models_differ():
    (same,) = model_agreement.across(stands("holds", "holds"), SIZES)[model_agreement.EVERY]
    (grows,) = model_agreement.across(stands("fails", "holds"), SIZES)[model_agreement.LARGER]
    assert str(same).endswith(": toy's finding (measured on small and middle)")
    (whole,) = model_agreement.across(stands("fails", "fails", "fails"), SIZES)[model_agreement.NONE]
    assert str(whole).endswith(": toy's finding")
    assert str(grows).endswith(": toy's finding (small: fails, middle: holds)")


@pytest.mark.parametrize(
    ("shown", "alike", "kind"),
    [
        (("fails", "holds"), ("fails", "holds"), model_agreement.LARGER),
        (("fails", "holds"), ("undecided", "holds"), model_agreement.OPEN),
        (("fails", "holds"), ("holds", "holds"), model_agreement.OPEN),
        (("fails", "holds"), ("holds", "fails"), model_agreement.OPEN),
        (("holds", "fails", "holds"), ("holds", "fails", "fails"), model_agreement.MIXED),
        (("holds", "fails", "holds"), ("holds in direction only", "fails", "undecided"), model_agreement.MIXED),
        (("holds", "holds"), ("fails", "holds"), model_agreement.EVERY),
    ],
)
def test_it_turns_only_where_it_does_by_the_same_profile_too(shown, alike, kind):
    judged = stands(*shown)
    for entry, other in zip(judged, stands(*alike), strict=True):
        entry.alike = other
    assert [*model_agreement.across(judged, SIZES)] == [kind]
