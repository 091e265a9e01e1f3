"""Which findings are quoted is data, and what a paper's file quotes is there and measured."""

from __future__ import annotations

import pytest
from support.refusals import one_sentence

from kvlab import papers

PAPER = """name: x
label: X
title: T
experiment: e
quoted: [{quoted}]
claims:
  - {{id: a, where: w, summary: s, metric: m, paper_value: 1, {more}direction: {test}, size: {test}}}
"""
TEST = "{kind: at_least, value: 0}"


@pytest.mark.parametrize(
    ("quoted", "more", "match"),
    [
        ("b", "", "unknown measured finding in `quoted` 'b'; known are: a"),
        ("a, a", "", "the finding 'a' is quoted twice"),
        ("a", "kind: timing, ", "unknown measured finding in `quoted` 'a'"),
        ("a", "experiment: null, untested: too large, ", "unknown measured finding in `quoted` 'a'"),
        ("a", "finding: both, ", "did you mean|known are: both"),
    ],
)
def test_what_is_no_measured_finding_cannot_be_quoted(tmp_path, quoted, more, match):
    path = tmp_path / "x.yaml"
    path.write_text(PAPER.format(quoted=quoted, more=more, test=TEST))
    with one_sentence(match):
        papers.load_file(path)


def test_each_paper_quotes_one_finding_at_least_and_the_quick_profile_measures_each():
    quoted = papers.quoted()
    assert len({claim.fact for claim in quoted}) == sum(len(paper.quoted) for paper in papers.papers())
    assert {claim.paper for claim in quoted} == {paper.name for paper in papers.papers()}
    assert {claim.kind for claim in quoted} <= {*papers.SAMPLED} and {claim.profile for claim in quoted} == {"quick"}
