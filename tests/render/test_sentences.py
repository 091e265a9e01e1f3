"""The sentence on a claim: the phrase of its verdict, our number with interval and unit, and the paper's."""

from __future__ import annotations

import pytest
from support.projects import EXPERIMENT
from support.toy_claims import claim

from kvlab import papers
from kvlab.render.sentences import of_claims, of_figure, sentence
from kvlab.workbench.store import database, tracking

PHRASES = {"met": "A gains.", "missed": "A loses.", "undecided": "Whether A gains is open."}


def said(value: float, low: float, high: float, **changes) -> str:
    toy = claim(**{"phrases": PHRASES, "unit": "nats", **changes})
    return sentence(toy, papers.judge(toy, {"m": value, "m/low": low, "m/high": high}))


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((0.61, 0.55, 0.66), "A gains: 0.610 (0.550 to 0.660), nats; the paper prints 0.6."),
        ((0.12, 0.1, 0.14), "A gains: 0.120 (0.100 to 0.140), nats; the paper prints 0.6."),
        ((-0.2, -0.3, -0.1), "A loses: −0.200 (−0.300 to −0.100), nats; the paper prints 0.6."),
        ((0.001, 0.00074, 0.00126), "A gains: 0.00100 (0.00074 to 0.00126), nats; the paper prints 0.6."),
        ((1.5e-8, 1e-8, 2e-8), "A gains: 1.50×10⁻⁸ (1.00×10⁻⁸ to 2.00×10⁻⁸), nats; the paper prints 0.6."),
        ((0.1, -0.1, 0.3), "Whether A gains is open: 0.100 (−0.100 to 0.300), nats; the paper prints 0.6."),
    ],
)
def test_the_phrase_follows_the_verdict(numbers, says):
    assert said(*numbers) == says


def test_a_number_of_another_unit_is_not_set_beside_ours():
    other = {"kind": "not_compared", "because": "a score against a loss"}
    assert said(0.2, 0.1, 0.3, size=other) == "A gains: 0.200 (0.100 to 0.300)."
    assert said(0.2, 0.1, 0.3, paper_value=None, size={"kind": "at_least", "value": 0.1}) == (
        "A gains: 0.200 (0.100 to 0.300), nats."
    )


def test_without_phrases_the_summary_stands_with_its_verdict():
    assert said(-0.2, -0.3, -0.1, phrases=None, summary="A gains by 0.6.") == (
        "Fails: A gains by 0.6; here −0.200 (−0.300 to −0.100), nats; the paper prints 0.6."
    )


def test_a_recomputed_claim_that_fails_denies_the_papers_sentence_not_its_direction():
    recomputed = {"kind": "recomputed", "size": {"kind": "prints_as", "decimals": 1}, "summary": "A gains by 0.6."}
    assert said(0.66, 0.66, 0.66, **recomputed) == (
        "The paper's own numbers do not agree: A gains by 0.6; they give 0.660 (0.660 to 0.660), nats; "
        "the paper prints 0.6."
    )
    assert said(0.61, 0.61, 0.61, **recomputed).startswith("A gains: 0.610")


def test_what_was_not_measured_has_its_reason():
    toy = claim(phrases=PHRASES, summary="A gains.", lacking={"m": "the model has one head"})
    assert sentence(toy, papers.judge(toy, {"other": 1.0})) == "Not measured: A gains. The model has one head (no m)."


def test_claims_that_are_not_measured_for_one_reason_are_counted():
    toys = [claim(id=f"p.{name}", metric=name, phrases=PHRASES) for name in ("late", "m", "later")]
    wait = papers.Verdict(value=0.1, verdict=papers.UNMEASURED, why="the log holds no signal")
    gains = papers.judge(toys[1], {"m": 0.6})
    assert of_claims(zip(toys, (wait, gains, wait), strict=True)) == [
        "A gains: 0.600; the paper prints 0.6.",
        "2 claims are not measured. The log holds no signal.",
    ]
    assert of_claims([(toys[0], wait)]) == ["Not measured: s. The log holds no signal."]


@pytest.fixture
def two(monkeypatch):
    """Two claims of one figure, and one of another."""
    made = [
        claim(id="p.late", metric="late", figure="curve", phrases=PHRASES),
        claim(id="p.early", metric="early", figure="curve", phrases=PHRASES | {"met": "B gains."}),
        claim(id="p.other", metric="early", figure="other", phrases=PHRASES),
    ]
    monkeypatch.setattr(papers, "claims", lambda experiment=None, paper=None: made)
    return made


def test_a_figure_has_the_sentences_of_its_claims_that_are_measured(two):
    assert of_figure(EXPERIMENT, "curve", {"early": 0.6}) == ["B gains: 0.600; the paper prints 0.6."]
    assert [text[0] for text in of_figure(EXPERIMENT, "curve", {"early": 0.6, "late": 0.6})] == ["A", "B"]
    assert of_figure(EXPERIMENT, "curve", {}) == of_figure(EXPERIMENT, "none", {"early": 0.6}) == []


def test_a_run_adds_the_sentences_as_their_numbers_come(two, project):
    tags = {"kvlab.kind": "job", "model": "toy@0"}
    run = tracking.create_run(database.client(), EXPERIMENT, {}, tags, "toy")
    run.log({"early": 0.6})
    shown = run.record("curve", text=["It rises.", "", " How far is open. "])
    assert shown and shown.data == "It rises. How far is open.\n\n- B gains: 0.600; the paper prints 0.6."
    assert run.record("nothing") is None
    run.log({"late": 0.6})
    run.finish()
    (kept,) = run.client.list_artifacts(run.id, "story")
    assert (project / "mlruns").exists() and kept.path == "story/curve.md"
    with open(run.client.download_artifacts(run.id, kept.path), encoding="utf-8") as file:
        assert file.read() == (
            "It rises. How far is open.\n\n"
            "- A gains: 0.600; the paper prints 0.6.\n- B gains: 0.600; the paper prints 0.6.\n"
        )
