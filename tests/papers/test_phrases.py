"""The phrases of claims: one short sentence for each way that the numbers can come out."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support.refusals import refusal

from kvlab import papers

PHRASED = ("compilerkv", "dapq", "morphkv", "rocketkv", "zsmerge")
"""The papers whose measured claims all have phrases."""

UNWANTED = re.compile(r"\b(told|beside|held|taken|calm|settle|moments)\b", re.IGNORECASE)

PAPER = """name: mine
label: Mine
title: My paper
experiment: try
claims:
  - id: mine.gain
    where: table 1
    summary: It gains.
    metric: gain
    paper_value: 0.5
    phrases:
      met: {met}
      missed: It loses.
      undecided: It may gain or lose.
    direction: {{kind: greater, than: 0.0}}
    size: {{kind: within, of: factor, tolerance: 2}}
"""


def load(folder, met: str) -> papers.Paper:
    path = folder / "mine.yaml"
    path.write_text(PAPER.format(met=met))
    return papers.load_file(path)


def test_a_claim_without_phrases_is_one(tmp_path):
    path = tmp_path / "mine.yaml"
    text = PAPER.format(met="It gains.")
    start, end = text.index("    phrases"), text.index("    direction")
    path.write_text(text[:start] + text[end:])
    assert papers.load_file(path).claims[0].phrases is None


def test_25_words_are_enough_and_26_too_many(tmp_path):
    assert load(tmp_path, f"It{' gains' * 24}.").claims[0].phrases
    said = refusal(load, tmp_path, f"It{' gains' * 25}.")
    assert "phrases.met" in said and "at most 25 words; this one has 26" in said


@pytest.mark.parametrize("met", ["it gains.", "It gains", "''"])
def test_a_phrase_is_a_sentence(tmp_path, met):
    assert "a capital first, a full stop last" in refusal(load, tmp_path, met)


def sentences(paper: str) -> list[str]:
    """All phrases of a paper's claims."""
    found = [claim.phrases for claim in papers.claims(paper=paper) if claim.phrases]
    return [sentence for phrases in found for sentence in (phrases.met, phrases.missed, phrases.undecided)]


@pytest.mark.parametrize("paper", PHRASED)
def test_the_measured_claims_have_phrases_and_no_others(paper):
    claims = papers.claims(paper=paper)
    assert [claim.id for claim in claims if claim.phrases] == [claim.id for claim in claims if claim.experiment]


@pytest.mark.parametrize("paper", PHRASED)
def test_no_two_phrases_are_the_same(paper):
    assert not [sentence for sentence, times in Counter(sentences(paper)).items() if times > 1]


@pytest.mark.parametrize("paper", PHRASED)
def test_phrases_use_the_fields_words(paper):
    assert not [sentence for sentence in sentences(paper) if UNWANTED.search(sentence)]
