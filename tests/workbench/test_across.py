"""Findings across models: what holds on every one, what only on larger or smaller ones, and what stays open."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT
from support.toy_claims import claim

from kvlab import papers
from kvlab.workbench.report import across, growth, kept, stability
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
    assert str(same).endswith(": toy's finding (measured on small and middle)")
    (whole,) = across.across(stands("fails", "fails", "fails"), SIZES)[across.NONE]
    assert str(whole).endswith(": toy's finding")
    assert str(grows).endswith(": toy's finding (small: fails, middle: holds)")


@pytest.mark.parametrize(
    ("shown", "alike", "kind"),
    [
        (("fails", "holds"), ("fails", "holds"), across.LARGER),
        (("fails", "holds"), ("undecided", "holds"), across.OPEN),
        (("fails", "holds"), ("holds", "holds"), across.OPEN),
        (("fails", "holds"), ("holds", "fails"), across.OPEN),
        (("holds", "fails", "holds"), ("holds", "fails", "fails"), across.MIXED),
        (("holds", "fails", "holds"), ("holds in direction only", "fails", "undecided"), across.MIXED),
        (("holds", "holds"), ("fails", "holds"), across.EVERY),
    ],
)
def test_it_turns_only_where_it_does_by_the_same_profile_too(shown, alike, kind):
    judged = stands(*shown)
    for entry, other in zip(judged, stands(*alike), strict=True):
        entry.alike = other
    assert [*across.across(judged, SIZES)] == [kind]


def test_the_page_on_disagreements_counts_what_is_kept():
    judged = kept.kept(ROOT / "docs" / "ledger")
    found = across.across(judged, subjects(judged))
    page = (ROOT / "docs" / "disagreements.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    numbers = [len(found.get(kind, ())) for kind in across.KINDS if kind != across.OPEN]
    told = re.search(
        r"Of (\d+) findings that two of them measured at least, (\d+) hold on every model, at least in direction; "
        r"(\d+) hold on larger ones and fail on smaller ones, (\d+) the other way round, (\d+) in no order of size; "
        r"(\d+) fail on every model\. The other (\d+) are undecided on one of them at least, or turn only where one "
        r"model was asked more than another; (\d+) of them are undecided on gemma",
        text,
    )
    left = found.get(across.OPEN, ())
    on_gemma = sum(finding.stands.get("gemma-3-270m") == papers.UNDECIDED for finding in left)
    expected = [sum(map(len, found.values())), *numbers, len(left), on_gemma]
    assert told and [int(number) for number in told.groups()] == expected
    assert {subject.label for subject in subjects(judged)} == set(re.findall(r"^\* `([^`]+)`: ", page, re.M))


def test_the_page_on_disagreements_counts_where_effects_go():
    judged = kept.kept(ROOT / "docs" / "ledger")
    found = growth.trends(growth.rows(judged, subjects(judged)))
    text = " ".join((ROOT / "docs" / "disagreements.md").read_text(encoding="utf-8").split())
    told = re.search(
        r"Of (\d+) findings with a number in the paper that ours can be set beside, (\d+) comes? nearer to it as "
        r"models grow, (\d+) moves? away, (\d+) changes? in no order of size, and (\d+) do(?:es)? not change clearly",
        text,
    )
    expected = [found[way] for way in (growth.TOWARDS, growth.AWAY, growth.MIXED, growth.LEVEL)]
    assert told and [int(number) for number in told.groups()] == [found.total(), *expected]


def test_the_page_on_disagreements_counts_what_flips():
    """What `kvlab stability` kept of the default model: how many findings flip, and how many verdicts."""
    mine = [one for one in stability.read(ROOT / "docs" / "ledger") if one.model.startswith("smollm2-135m")]
    text = " ".join((ROOT / "docs" / "disagreements.md").read_text(encoding="utf-8").split())
    told = re.search(r"of (\d+) quoted findings (\d+) flips?\W.*?(\d+) of (\d+) verdicts", text)
    flips = [one for one in mine if one.flips]
    others = [one for each in mine for one in each.others]
    expected = [len(mine), len(flips), sum(len(one.flips) for one in mine), len(others)]
    assert told and [int(number) for number in told.groups()] == expected
