"""An opened claim on the page of several models: why each verdict is what it is, and what each number comes from."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.report_pages import CLAIM, judged_on, opened

from kvlab import papers
from kvlab.papers.tests import NotCompared
from kvlab.workbench.report import page as report
from kvlab.workbench.report.evidence import origin_of
from kvlab.workbench.store.signatures import documents

HALF = "zsmerge.figure4.reduction_50"
"""A claim whose direction is tested on another metric than its own."""


@pytest.fixture
def text(project) -> str:
    """The page of two models, on one of which a claim fails by a number that is not the one that is shown."""
    good, bad = (
        {"reduction/0.50": 0.8, "growth/0.20_to_0.50": growth, "growth/0.20_to_0.50/low": growth - 0.01}
        | {"growth/0.20_to_0.50/high": growth + 0.01}
        for growth in (0.2, -0.037)
    )
    return report.render(judged_on({"small@1": {HALF: good, CLAIM: {"reduction/0.20": 0.6}}, "large@2": {HALF: bad}}))[
        report.MAIN
    ]


def of_model(line: str, label: str) -> str:
    """What an opened claim says of a model."""
    (found,) = re.findall(rf'<li class="model [^"]+" data-model="{label}">.*?</li>', line, re.DOTALL)
    return found


def test_the_number_that_decided_stands_with_each_model(text):
    line = opened(text, HALF)
    assert "growth/0.20_to_0.50 = -0.037, asked to exceed 0" in of_model(line, "large")
    assert "growth/0.20_to_0.50 = 0.2, asked to exceed 0" in of_model(line, "small")
    assert "-0.037" not in of_model(line, "small")


@pytest.mark.parametrize("models", [["small@1"], ["small@1", "large@2"]], ids=["one model", "two models"])
@pytest.mark.parametrize(
    ("changes", "of_paper", "of_ours"),
    [
        ({"size": NotCompared(kind="not_compared", because="units")}, True, False),
        ({"size": NotCompared(kind="not_compared", because="units"), "paper_value": None}, False, True),
        ({}, True, True),
    ],
    ids=["another unit than ours", "no number of the paper", "the same unit"],
)
def test_the_unit_stands_with_the_number_that_has_it(project, models, changes, of_paper, of_ours):
    judged = [
        replace(entry, claim=entry.claim.model_copy(update={"unit": "furlongs", **changes}))
        if entry.claim.id == CLAIM
        else entry
        for entry in judged_on({model: {CLAIM: {"reduction/0.20": 0.6}} for model in models})
    ]
    line = opened(report.render(judged)[report.MAIN])
    (paper,) = re.findall(r'<p class="paper">(.*?)</p>', line)
    assert ("</b> furlongs" in paper) is (of_paper and (len(models) > 1 or not of_ours))
    if len(models) == 1:
        (ours,) = re.findall(r'<p class="here">(.*?)</p>', line, re.DOTALL)
        assert ("furlongs" in ours) is of_ours
    else:
        assert ("ours are: furlongs" in paper) is not of_paper


@pytest.mark.parametrize("verdict", ["not measured", "holds"])
def test_a_number_that_is_not_compared_says_so(project, verdict):
    judged = [
        replace(
            entry,
            claim=entry.claim.model_copy(update={"paper_value": None}),
            verdict=entry.verdict.model_copy(update={"verdict": verdict}),
        )
        if entry.claim.id == CLAIM
        else entry
        for entry in judged_on({"small@1": {CLAIM: {"reduction/0.20": 0.6}}})
    ]
    line = opened(report.render(judged)[report.MAIN])
    assert "The paper prints no number" in line and "0.600" in line
    assert ('class="here unmeasured"' in line) is ("not comparable" in line) is (verdict == "not measured")


def test_each_model_says_what_its_number_comes_from(text):
    line = opened(text)
    assert "quick profile, 3 documents, commit 0123456789, 95 s" in of_model(line, "small")
    assert "commit" not in of_model(line, "large"), "it was not measured there"
    assert "no run has measured reduction/0.20" in of_model(line, "large")


def test_what_nothing_is_known_of_is_left_out(project):
    (entry,) = [entry for entry in judged_on({"small@1": {CLAIM: {"reduction/0.20": 0.6}}}) if entry.measured]
    assert origin_of(entry) == "quick profile, 3 documents, commit 0123456789, 95 s"
    bare = replace(entry.kept, signature="small@1|toy(x=1)|0|kvlab 0.1.0", seconds=None, commit="")
    assert origin_of(replace(entry, kept=bare)) == "quick profile"


GENRES = {"reduction/0.20": 0.1, "reduction/0.20/low": 0.05, "reduction/0.20/high": 0.15} | {
    f"reduction/0.20/genre/{genre}": mean for genre, mean in (("speech", 0.4), ("code", -0.2))
}


def test_kinds_of_text_that_differ_are_marked_and_told_on_every_page(project):
    pages = report.render(judged_on({"small@1": {CLAIM: GENRES}, "large@2": {CLAIM: {"reduction/0.20": 0.6}}}))
    line = opened(pages[report.MAIN])
    assert ">texts differ on 1 of 2</em>" in line and "In <b>1</b> of 2 decided verdicts" in pages[report.MAIN]
    assert "Kinds of text differ in reduction/0.20 by 0.6" in of_model(line, "small")
    assert ">texts differ</em>" in of_model(line, "small") and "texts differ" not in of_model(line, "large")
    assert ">texts differ</em>" in opened(pages["model-small.html"])
    assert "texts differ" not in opened(pages["model-large.html"])
    assert "texts differ" not in pages["model-large.html"]


def test_a_verdict_that_is_undecided_when_clustered_by_genre_is_marked(project):
    clustered = GENRES | {"reduction/0.20/genre_low": -0.4, "reduction/0.20/genre_high": 0.6}
    pages = report.render(judged_on({"small@1": {CLAIM: clustered}, "large@2": {CLAIM: GENRES}}))
    line = opened(pages[report.MAIN])
    assert (
        ">undecided when clustered by genre on 1</em>" in line and "−0.400 to 0.600 with the genre as the unit" in line
    )
    assert "Undecided when clustered by genre: the interval" in of_model(line, "small")
    assert "<b>1</b> of 2 decided verdicts are undecided when the genre is the unit" in pages[report.MAIN]
    assert "clustered by genre" not in pages["model-large.html"]


def test_a_finding_of_one_claim_is_counted_with_no_other(text):
    shared = [claim.fact for claim in papers.claims() if claim.finding]
    alone = [claim for claim in papers.claims() if claim.finding and shared.count(claim.fact) == 1]
    assert alone and not any("Counted once" in opened(text, claim.id) for claim in alone)
    assert "Counted once, as <b>merging against eviction</b>, with <a" in opened(text)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("toy@0|a@1 b@2|toy(x='a|b')|0|kvlab 0.1.0", 2),
        ("toy@0|a (1).txt@2|toy()|0|kvlab 0.1.0", 2),
        ("toy@0|toy(x=1)|0|kvlab 0.1.0", 0),
        ("toy@0|a@1", 0),
        ("", 0),
    ],
)
def test_documents_are_counted_from_a_signature(line, count):
    assert documents(line) == count
