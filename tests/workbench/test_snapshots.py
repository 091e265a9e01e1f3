"""Ledgers that are kept as data: what is written is what is read, and pages quote what is kept."""

from __future__ import annotations

import re

import pandas
import pytest
from support.paths import ROOT
from support.report_pages import CLAIM
from support.runs import job

from kvlab.errors import KvlabError
from kvlab.papers import many_claims
from kvlab.workbench.report import page as report
from kvlab.workbench.report import snapshots
from kvlab.workbench.report.ledger import Tally, entries

KEPT = ROOT / "docs" / "ledger"


def test_a_kept_ledger_reads_as_the_store_does(project, tmp_path):
    run_id = job(0.6)
    path = snapshots.keep(tmp_path / "ledger")[0].path
    line = pandas.read_csv(path).set_index("claim").loc[CLAIM]
    assert line["verdict"] == report.ledger().set_index("id").loc[CLAIM]["verdict"] and line["seconds"] >= 0
    assert run_id not in path.read_text()
    fresh, again = entries(), snapshots.read(path)
    assert [entry.claim.id for entry in again] == [entry.claim.id for entry in fresh]
    for ours, theirs in zip(again, fresh, strict=True):
        assert ours.verdict.verdict == theirs.verdict.verdict and ours.verdict.why == theirs.verdict.why
        assert ours.verdict.value == (None if theirs.verdict.value is None else pytest.approx(theirs.verdict.value))
    assert Tally.of(again) == Tally.of(fresh)


def test_intervals_over_genres_are_kept_and_ledgers_without_them_are_read(project, tmp_path):
    job(0.6, more={"reduction/0.20/genre_low": -0.25, "reduction/0.20/genre_high": 1.5})
    path = snapshots.keep(tmp_path)[0].path
    entry = next(entry for entry in snapshots.read(path) if entry.claim.id == CLAIM)
    assert (entry.verdict.genre_low, entry.verdict.genre_high) == (-0.25, 1.5)
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    assert list(frame.columns[-2:]) == ["genre_low", "genre_high"]
    frame.drop(columns=["genre_low", "genre_high"]).to_csv(path, index=False)
    entry = next(entry for entry in snapshots.read(path) if entry.claim.id == CLAIM)
    assert entry.verdict.genre_low is None and entry.verdict.value == 0.6
    snapshots.keep(tmp_path)
    entry = next(entry for entry in snapshots.read(path) if entry.claim.id == CLAIM)
    assert (entry.verdict.genre_low, entry.verdict.genre_high) == (-0.25, 1.5)


def test_q_is_computed_on_reading_among_the_tests_of_a_profile(project):
    """Lines of a kept file, which has no column for it: all that a profile tested count, on one model."""
    found = snapshots.every(KEPT, "smollm2-135m")
    for profile in ("quick", "full"):
        mine = [entry for entry in found if entry.origin.profile == profile]
        tested = [entry for entry in mine if entry.q is not None]
        # The largest q of all is the largest p: no other test is behind it.
        largest = max(many_claims.p_value(entry.claim, entry.verdict) for entry in tested)
        assert len(tested) > 100 and max(entry.q for entry in tested) == pytest.approx(largest)
        assert all(entry.q >= many_claims.p_value(entry.claim, entry.verdict) - 1e-12 for entry in tested)
        assert {entry.claim.kind for entry in tested} == {"finding", "question"}
    assert {entry.tested for entry in found if entry.by_chance} <= set(many_claims.DECIDED)
    assert "q" not in pandas.read_csv(KEPT / "smollm2-135m.csv").columns


def test_a_quick_line_of_what_only_the_full_profile_measures_is_not_read(tmp_path):
    """As of a claim that the quick profile measured once, in another regime."""
    name = "morphkv.table5.same_tokens"
    frame = pandas.read_csv(KEPT / "smollm2-135m.csv", dtype=str, keep_default_na=False)
    line = frame[(frame["claim"] == name) & (frame["profile"] == "full")]
    pandas.concat([line.assign(profile="quick"), frame[frame["claim"] != name]]).to_csv(tmp_path / "a.csv", index=False)
    entry = next(entry for entry in snapshots.read(tmp_path / "a.csv") if entry.claim.id == name)
    assert entry.state == "not measured" and entry.full_only


def test_nothing_measured_is_nothing_kept(project, tmp_path):
    with pytest.raises(KvlabError, match="no experiment has finished yet"):
        snapshots.keep(tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


def test_a_file_that_is_no_kept_ledger_is_refused_in_a_sentence(project, tmp_path):
    job(0.6)
    path = snapshots.keep(tmp_path)[0].path
    whole = path.read_text()
    path.write_text(whole.replace("verdict", "judgement", 1))
    with pytest.raises(KvlabError, match="is no kept ledger: it has no column 'verdict'"):
        snapshots.read(path)
    path.write_text(whole.replace(CLAIM, f"{CLAIM}_x"))
    with pytest.raises(KvlabError, match=rf"did you mean '{re.escape(CLAIM)}'"):
        snapshots.read(path)
    path.write_text(whole.replace(",0.6,0.5,", ",much,0.5,"))
    with pytest.raises(KvlabError, match=f"'{re.escape(CLAIM)}' has no readable numbers"):
        snapshots.read(path)
    with pytest.raises(KvlabError, match="has no readable numbers"):
        snapshots.keep(tmp_path)
    assert ",much,0.5," in path.read_text(), "what cannot be read is not written over"
    with pytest.raises(KvlabError, match="cannot read the kept ledger"):
        snapshots.read(tmp_path / "none.csv")


DAPQ_NEEDLE, DAPQ_UNPOOLED = "dapq.abstract.task_needle", "dapq.section3_3.task_same_pooling_needle"
ALL_NEEDLES = "({low:.0f} to {high:.0f} % of them), and both"
FACT_STORED = "morphkv.section6_2.early_fact_stored"
OVER_SNAPKV = "compilerkv.table1.task_filled_over_snapkv"
FILLED_H2O, WIDE_POOLING = "compilerkv.table1.filled_over_h2o", "rocketkv.section3_3.wide_pooling"
SMOLLM2, HALF, LARGEST, GEMMA = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma-3-270m"


@pytest.mark.parametrize(
    ("page", "words", "claim", "model", "profile", "unit"),
    [
        (
            "",
            "{value:.1f} % more of the attention than H2O's on SmolLM2 ({low:.1f} to {high:.1f})",
            FILLED_H2O,
            SMOLLM2,
            "full",
            100,
        ),
        ("", "as much as H2O's on Qwen 0.5B ({low:.1f} to {high:.1f})", FILLED_H2O, HALF, "full", 100),
        ("", "{less:.1f} % less on the 0.5B", FILLED_H2O, HALF, "quick", 100),
        ("", "{less:.1f} on the 1.5B", FILLED_H2O, LARGEST, "quick", 100),
        ("", "{less:.1f} on gemma", FILLED_H2O, GEMMA, "quick", 100),
        (
            "",
            "it is even ({value:.3f}, {low:.3f} to {high:.3f})",
            "dapq.figure6a.ends_beat_random",
            LARGEST,
            "quick",
            1,
        ),
        ("", "{value:.2f} of the recall ({low:.2f} to {high:.2f}", "dapq.figure6a.position_decides", HALF, "full", 1),
        ("", "do not tell ({value:.2f}, {low:.2f} to {high:.2f})", "dapq.figure6a.position_decides", HALF, "quick", 1),
        ("", "it is by {value:.4f} nats", "rocketkv.figure8.task_needle_hybrid", LARGEST, "quick", 1),
        ("/rocketkv", "{value:.3f} on gemma", WIDE_POOLING, GEMMA, "quick", 1),
        ("/rocketkv", "{value:.3f} ({low:.3f} to {high:.3f}) on the 0.5B", WIDE_POOLING, HALF, "full", 1),
        ("/rocketkv", "{value:.3f} on the 1.5B", WIDE_POOLING, LARGEST, "quick", 1),
        ("/rocketkv", ALL_NEEDLES, "rocketkv.figure4.task_needle_c32", HALF, "full", 100),
        ("/rocketkv", ALL_NEEDLES, "rocketkv.figure4.task_needle_c64", HALF, "full", 100),
        ("/dapq", "{value:.1f} nats a token, {low:.1f} to {high:.1f}", "dapq.table3.task_over_snapkv", HALF, "full", 1),
        (
            "/dapq",
            "{value:.0f} % of the digits come out right ({low:.0f} to {high:.0f})",
            DAPQ_NEEDLE,
            HALF,
            "full",
            100,
        ),
        ("/dapq", "{value:.1f} nats a token, {low:.1f} to {high:.1f}", DAPQ_UNPOOLED, HALF, "full", 1),
        (
            "/morphkv",
            "on SmolLM2 (by {less:.1f} % of them, {least:.1f} to {most:.1f})",
            FACT_STORED,
            SMOLLM2,
            "full",
            100,
        ),
        ("/morphkv", "and the 0.5B (by {less:.1f}, {least:.1f} to {most:.1f})", FACT_STORED, HALF, "full", 100),
        ("", "fails on SmolLM2 ({value:.0f} %)", DAPQ_NEEDLE, SMOLLM2, "full", 100),
        ("", "undecided on the 0.5B ({value:.0f} %)", DAPQ_NEEDLE, HALF, "full", 100),
        (
            "/compilerkv",
            "on SmolLM2 (by {less:.1f} nats a token, {least:.1f} to {most:.1f})",
            OVER_SNAPKV,
            SMOLLM2,
            "full",
            1,
        ),
        ("/compilerkv", "0.5B (by {less:.1f}, {least:.1f} to {most:.1f}; ", OVER_SNAPKV, HALF, "full", 1),
        (
            "/compilerkv",
            "{value:.0f} % ({low:.0f} to {high:.0f}; ",
            "compilerkv.figure3.task_filled_needle",
            HALF,
            "full",
            100,
        ),
    ],
)
def test_the_pages_on_disagreements_quote_what_is_kept(page, words, claim, model, profile, unit):
    (entry,) = (one for one in snapshots.read(KEPT / f"{model}.csv", profile) if one.claim.id == claim)
    numbers = {name: unit * getattr(entry.verdict, name) for name in ("value", "low", "high")}
    text = " ".join((ROOT / "docs" / f"disagreements{page}.md").read_text(encoding="utf-8").split())
    turned = {name: -numbers[of] for name, of in (("less", "value"), ("least", "high"), ("most", "low"))}
    assert words.format(**numbers, **turned) in text
