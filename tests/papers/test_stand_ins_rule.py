"""What a verdict becomes where the measure that it rests on does not predict answers."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT
from support.toy_claims import claim

from kvlab import papers
from kvlab.papers.stand_ins import LEAST_DOCUMENTS, LEAST_RHO, Prediction, outcome_of, weighed

BY = {"stands_in": "recall, for scores", "stand_in": "recall"}


def predictions(rho, low=None, high=None, documents=LEAST_DOCUMENTS, stand_in="recall", outcome="answer"):
    ends = rho - 0.1 if low is None else low, rho + 0.1 if high is None else high
    return {(stand_in, outcome): Prediction(stand_in, outcome, rho, *ends, documents)}


def judged(value, interval, known, **changes):
    asked = claim(**{**BY, **changes})
    return weighed(asked, papers.judge(asked, {"m": value}, {"m": interval}), known)


@pytest.mark.parametrize(
    ("value", "interval", "strong", "weak"),
    [
        (0.6, (0.5, 0.7), papers.HOLDS, papers.WEAK),
        (0.2, (0.1, 0.3), papers.DIRECTION, papers.WEAK),
        (-0.2, (-0.3, -0.1), papers.FAILS, papers.UNDECIDED),
        (0.1, (-0.1, 0.3), papers.UNDECIDED, papers.UNDECIDED),
    ],
)
def test_a_weak_stand_in_speaks_neither_for_a_paper_nor_against_it(value, interval, strong, weak):
    assert judged(value, interval, predictions(0.7)).verdict == strong
    found = judged(value, interval, predictions(0.3))
    assert found.verdict == weak
    if weak != strong:
        assert "By a weak stand-in: recall" in found.why and "0.30 (0.20 to 0.40)" in found.why


@pytest.mark.parametrize(
    ("known", "weak"),
    [
        (predictions(0.5), False),
        (predictions(0.49), True),
        (predictions(0.6, low=-0.01), True),
        (predictions(0.6, low=0.01), False),
        (predictions(-0.8), True),
        (predictions(0.1, documents=LEAST_DOCUMENTS - 1), False),
        (predictions(0.1, stand_in="mass_lost"), False),
        (predictions(0.1, outcome="kl"), False),
        ({}, False),
    ],
)
def test_what_is_weak(known, weak):
    assert (judged(0.6, (0.5, 0.7), known).verdict == papers.WEAK) is weak


def test_what_the_rule_leaves_alone():
    assert judged(0.6, (0.5, 0.7), predictions(0.1), stand_in=None).verdict == papers.HOLDS
    assert judged(0.6, (0.5, 0.7), predictions(0.1), kind="control").verdict == papers.HOLDS
    assert judged(0.6, (0.5, 0.7), predictions(0.1), kind="question").verdict == papers.WEAK
    assert papers.judge(claim(**BY), {}, {}).verdict == papers.UNMEASURED
    assert weighed(claim(**BY), papers.judge(claim(**BY), {}), predictions(0.1)).verdict == papers.UNMEASURED
    assert outcome_of("likelihood") == "right" and outcome_of("output_error") == "answer"


def test_a_stand_in_says_what_it_replaces():
    with pytest.raises(ValueError, match="say in `stands_in` what it replaces"):
        claim(stand_in="recall")


def test_a_claims_stand_in_is_the_measure_that_its_metric_names():
    """Where the metric's name tells: a claim on recall rests on recall."""
    told = {"kept": "mass_lost", "mass": "mass_lost", "lost": "mass_lost", "error": "output_error"}
    told |= {name: name for name in ("recall", "step_recall", "mass_lost", "output_error")}
    seen = set()
    for entry in papers.claims():
        named = {told[part] for part in entry.metric.split("/") if part in told}
        if named and entry.stands_in and entry.kind in papers.SAMPLED and not entry.untested:
            assert entry.stand_in in named, entry.id
            seen |= named
    assert seen == set(told.values())


def test_the_page_has_the_numbers_of_the_rule():
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    rule = re.search(r"### Weak stand-ins\n.*?(?=\n### )", page, re.S)[0]
    assert f"below {LEAST_RHO:g}" in rule and LEAST_DOCUMENTS == 8 and "fewer than eight documents" in rule
    assert papers.WEAK in re.sub(r"\s+", " ", rule)
