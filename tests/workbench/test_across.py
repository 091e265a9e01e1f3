"""Findings across models: what holds on every one, what only on larger or smaller ones, and what stays open."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT
from support.toy_claims import claim

from kvlab import papers
from kvlab.workbench.report import across, kept
from kvlab.workbench.report.ledger import Entry
from kvlab.workbench.report.origins import Origin
from kvlab.workbench.report.subjects import Subject, subjects

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
        (("holds", "holds in direction only"), across.EVERY),
        (("fails", "holds"), across.LARGER),
        (("fails", "undecided", "holds in direction only"), across.LARGER),
        (("fails", "fails", "holds"), across.LARGER),
        (("holds", "holds", "fails"), across.SMALLER),
        (("holds", "fails", "holds"), across.MIXED),
        (("fails", "fails"), across.NONE),
        (("fails", "undecided"), across.OPEN),
        (("undecided", "undecided", "holds"), across.OPEN),
        (("", "holds", "holds"), across.EVERY),
    ],
)
def test_how_a_finding_stands_across_models(states, kind):
    found = across.across(stands(*states), SIZES)
    assert [name for name, mine in found.items() if mine] == [kind]


def test_a_finding_of_one_model_says_nothing_across_models():
    assert not any(across.across(stands("holds", "not measured"), SIZES).values())


def test_a_finding_says_where_it_stands_how_if_models_differ():
    (same,) = across.across(stands("holds", "holds"), SIZES)[across.EVERY]
    (grows,) = across.across(stands("fails", "holds"), SIZES)[across.LARGER]
    assert str(same).endswith(": toy's finding")
    assert str(grows).endswith(": toy's finding (small: fails, middle: holds)")


def test_the_page_on_disagreements_counts_what_is_kept():
    judged = kept.kept(ROOT / "docs" / "ledger")
    found = across.across(judged, subjects(judged))
    text = " ".join((ROOT / "docs" / "disagreements.md").read_text(encoding="utf-8").split())
    numbers = [
        len(found.get(kind, ())) for kind in (across.EVERY, across.NONE, across.LARGER, across.SMALLER, across.OPEN)
    ]
    told = re.search(
        r"Of (\d+) findings that both models measured, (\d+) hold on both, at least in direction, and (\d+) fail on "
        r"both\. (\d+) hold on the larger one alone and (\d+) on the smaller one alone; (\d+) are undecided on one",
        text,
    )
    assert told and [int(number) for number in told.groups()] == [sum(map(len, found.values())), *numbers]
