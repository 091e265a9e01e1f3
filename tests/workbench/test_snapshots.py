"""Ledgers that are kept as data: what is written is what is read."""

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
    assert list(frame.columns[-3:]) == ["genre_low", "genre_high", "metric"]
    frame.drop(columns=["genre_low", "genre_high"]).to_csv(path, index=False)
    entry = next(entry for entry in snapshots.read(path) if entry.claim.id == CLAIM)
    assert entry.verdict.genre_low is None and entry.verdict.value == 0.6
    snapshots.keep(tmp_path)
    entry = next(entry for entry in snapshots.read(path) if entry.claim.id == CLAIM)
    assert (entry.verdict.genre_low, entry.verdict.genre_high) == (-0.25, 1.5)


def test_numbers_of_another_metric_are_no_numbers_of_the_claim(project, tmp_path):
    """A claim may ask for another metric after a line was kept; its verdict stays, and says what it is of."""
    job(0.6)
    path = snapshots.keep(tmp_path)[0].path
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    (row,) = frame.index[frame["claim"] == CLAIM]
    before = next(entry for entry in snapshots.read(path) if entry.claim.id == CLAIM)
    assert frame.loc[row, "metric"] == before.claim.metric and before.verdict.value == 0.6
    frame.loc[row, "metric"] = "an/older/one"
    frame.to_csv(path, index=False)
    entry = next(entry for entry in snapshots.read(path) if entry.claim.id == CLAIM)
    assert entry.verdict.verdict == before.verdict.verdict and entry.verdict.value is entry.verdict.low is None
    assert entry.verdict.why.startswith("Judged when the claim asked for an/older/one. ")


def test_a_kept_verdict_rests_on_the_numbers_that_the_claim_asks_for_today():
    """A claim's test may change after a run. A line of the older test would be shown as a verdict of today's."""
    of_a_metric = re.compile(r"(?:\] of |^|[:;] )([\w.-]+(?:/[\w.-]+)+)(?: = | contains)")
    checked = 0
    for entry in snapshots.every(KEPT):
        claim = entry.claim
        asked = {name.removesuffix("/low").removesuffix("/high") for name in claim.metrics}
        named = set(of_a_metric.findall(entry.verdict.why.partition(" Kinds of text")[0]))
        assert named <= asked, (claim.id, entry.model, entry.origin.profile)
        checked += bool(named)
    assert checked > 800


def test_a_profile_without_the_condition_of_a_claim_does_not_hide_one_that_has_it():
    """SmolLM2's cache is too large beside its weights in the full profile of table A1, and not in the quick one."""
    (shown,) = (one for one in snapshots.kept(KEPT, "smollm2-135m") if one.claim.id == "compilerkv.tableA1.memory")
    (full,) = (
        one for one in snapshots.kept(KEPT, "smollm2-135m", "full") if one.claim.id == "compilerkv.tableA1.memory"
    )
    assert full.verdict.verdict == "not measured" and full.verdict.value > 2 * 0.102
    assert shown.origin.profile == "quick" and shown.verdict.verdict == "holds"


def test_a_kept_share_of_budgets_has_no_interval():
    shares = [entry for entry in snapshots.every(KEPT) if entry.claim.metric.startswith("ahead/")]
    assert len(shares) > 20 and all(entry.verdict.low is None for entry in shares)


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
