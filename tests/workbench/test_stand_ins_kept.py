"""How well stand-ins predict, from a run to a kept table, and what a ledger then says."""

from __future__ import annotations

import pandas
import pytest
from support.runs import job

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.papers.claim import Claim
from kvlab.papers.stand_ins import ACROSS, DOCUMENTS, EXPERIMENT
from kvlab.render.sentences import sentence
from kvlab.workbench.report import ledger, snapshots, stand_ins
from kvlab.workbench.store import database, tracking

CLAIM = "zsmerge.figure4.reduction_20"


@pytest.fixture
def by_error(monkeypatch):
    """The claim rests on a stand-in."""
    every = ledger.claims()
    changed = [
        Claim.model_validate({**claim.model_dump(), "stands_in": "error, for scores", "stand_in": "output_error"})
        if claim.id == CLAIM
        else claim
        for claim in every
    ]
    monkeypatch.setattr(ledger, "claims", lambda: changed)
    monkeypatch.setattr(snapshots, "claims", lambda: changed)


def measured(rho, model="toy@1", profile="full", documents=8):
    tags = {"kvlab.kind": "job", "kvlab.profile": profile, "kvlab.commit": "abc", "model": model}
    run = tracking.create_run(database.client(), EXPERIMENT, {}, tags, "toy")
    keys = {"stand_in": "output_error", "outcome": "answer"}
    name = ACROSS.format(**keys)
    run.log({name: rho, f"{name}/64": -1.0, DOCUMENTS.format(**keys): documents}, {name: (rho - 0.1, rho + 0.1)})
    run.finish()


def state(entries):
    return next(entry.state for entry in entries if entry.claim.id == CLAIM)


def test_a_weak_stand_in_changes_what_is_shown_and_not_what_is_kept(project, tmp_path, by_error):
    job(0.6)
    assert state(ledger.entries()) == papers.DIRECTION
    measured(0.3)
    (entry,) = [entry for entry in ledger.entries() if entry.claim.id == CLAIM]
    assert entry.state == papers.WEAK and entry.verdict.verdict == papers.DIRECTION
    assert ledger.frame([entry]).verdict.tolist() == [papers.WEAK]
    assert sentence(entry.claim, entry.verdict, entry.weak).endswith("; the stand-in is weak.")
    (kept,) = snapshots.keep(tmp_path)
    line = pandas.read_csv(kept.path).set_index("claim").loc[CLAIM]
    assert line["verdict"] == papers.DIRECTION
    assert state(snapshots.read(kept.path)) == papers.DIRECTION, "no table of stand-ins is kept yet"
    (path,) = stand_ins.keep_store(tmp_path)
    assert path == tmp_path / "stand_ins" / "toy.csv"
    assert state(snapshots.read(kept.path)) == papers.WEAK == state(snapshots.kept(tmp_path))


def test_a_table_has_a_line_for_each_profile_and_the_most_thorough_one_counts(project, tmp_path):
    measured(0.2, profile="quick")
    stand_ins.keep_store(tmp_path)
    measured(0.7, profile="full", documents=12)
    (path,) = stand_ins.keep_store(tmp_path)
    table = pandas.read_csv(path)
    assert table.columns.tolist() == stand_ins.COLUMNS and sorted(table["profile"]) == ["full", "quick"]
    assert table.set_index("profile")["n"].to_dict() == {"full": 12, "quick": 8}
    found = stand_ins.read(tmp_path)["toy"]["output_error", "answer"]
    assert (found.rho, found.documents) == (0.7, 12) and not found.weak
    path.write_text(path.read_text().replace("0.7000", "much"))
    with pytest.raises(KvlabError, match="stand-ins of toy@1 has no readable numbers"):
        stand_ins.read(tmp_path)
