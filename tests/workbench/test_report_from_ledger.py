"""The report of a kept ledger: without a run, without a store, and with what the runs told."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
from support.commands import call, complaint
from support.paths import ROOT
from support.projects import EXPERIMENT
from support.report_pages import CLAIM, Page, slug
from support.runs import job

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench.report import ledger, snapshots
from kvlab.workbench.report import page as report
from kvlab.workbench.report.evidence import evidence
from kvlab.workbench.report.provenance import Origin
from kvlab.workbench.store import database, tracking

KEPT = ROOT / "docs" / "ledger"


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """The working directory is empty, and no store is named."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    folder = tmp_path / "nowhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def two_kept(project, tmp_path, nowhere, monkeypatch):
    """A folder with the ledgers of two models, one of which has an interval."""
    monkeypatch.chdir(project)
    job(0.3, model="small", parameters=135_000_000, tables="none")
    tags = {"kvlab.kind": "job", "kvlab.profile": "quick", "model": "large", "parameters": 8_000_000_000}
    run = tracking.create_run(database.client(), EXPERIMENT, {}, tags, "toy")
    run.log({"reduction/0.20": 0.6}, {"reduction/0.20": (0.5, 0.7)})
    run.finish()
    folder = tmp_path / "kept"
    snapshots.keep(folder)
    in_store = report.ledger()
    monkeypatch.chdir(nowhere)
    return folder, in_store


def test_kvlabs_own_ledgers_have_a_name(nowhere, tmp_path):
    assert snapshots.place(Path("kept")) == KEPT and snapshots.place(KEPT) == KEPT and snapshots.place(None) is None
    (nowhere / "kept").mkdir()
    assert snapshots.place(Path("kept")) == Path("kept"), "a folder goes before the name"


def test_the_report_of_kept_ledgers_is_that_of_their_store(two_kept, nowhere, capsys):
    folder, in_store = two_kept
    code, out, _ = call(capsys, "report", "--from", str(folder), "--out", "page")
    assert code == 0 and "page/claims.csv" in out
    assert sorted(path.name for path in nowhere.iterdir()) == ["page"], "no store is made"
    again = pandas.read_csv(nowhere / "page" / "claims.csv")
    same = [name for name in ledger.COLUMNS if name not in ("run_id", "machine")]
    pandas.testing.assert_frame_equal(again[same], in_store[same].replace("", None), check_dtype=False)
    assert again["run_id"].isna().all()
    pages = {path.name: path.read_text() for path in (nowhere / "page").glob("*.html")}
    assert set(pages) == {"report.html", "model-small.html", "model-large.html"}
    assert "0.600 (0.500 to 0.700), share of the error of eviction." in pages["model-large.html"]
    assert "8B" in pages["report.html"] and "127.0.0.1" not in "".join(pages.values())
    assert all("figures and logs, are not here" in text and "Figures and runs" not in text for text in pages.values())
    assert "with the numbers of its runs, without figures" in pages["report.html"]
    parsed = {name: Page(text) for name, text in pages.items()}
    for name, page in parsed.items():
        assert len(page.ids) == len(set(page.ids))
        for address in page.addresses:
            if address.startswith("data:") or address == "claims.csv":
                continue
            file, _, place = address.partition("#")
            assert not place or place in parsed[file or name].ids, (name, address)


def test_models_and_profiles_narrow_what_is_kept(two_kept, nowhere, capsys):
    folder, _ = two_kept
    assert {entry.model for entry in snapshots.kept(folder)} == {"small", "large"}
    assert [entry.model for entry in snapshots.kept(folder, "large@1") if entry.measured] == ["large"]
    for narrow in ({"model": "none"}, {"profile": "full"}):
        with pytest.raises(KvlabError, match=r"it has: large \(quick profile\), small \(quick profile\)"):
            snapshots.kept(folder, **narrow)
    assert "holds no kept ledger; `kvlab report --keep" in complaint(capsys, "report", "--from", "none")
    assert "not at once" in complaint(capsys, "report", "--from", str(folder), "--keep", "x", code=2)


def test_kept_runs_of_two_commits_stand_apart():
    """Each is said to be kept of its own commit, though texts and parameters were the same."""
    judged = papers.Verdict(value=0.5, verdict="holds", why="")
    origins = [Origin("quick", "same", commit) for commit in ("a1", "b2")]
    shown = evidence(ledger.Entry(papers.claims()[0], judged, None, "toy@0", origin) for origin in origins)
    assert [(item.kept.commit, len(item.entries)) for item in shown.values()] == [("a1", 1), ("b2", 1)]


def test_the_ledger_of_this_project_has_a_report(nowhere):
    page = report.save(snapshots.kept(KEPT), nowhere / "page")
    text = page.read_text()
    for claim in papers.claims():
        assert text.count(f'id="{slug(claim.id)}"') == 1
    assert CLAIM in text
    of_models = list(page.parent.glob("model-*.html"))
    assert len(of_models) == len(list(KEPT.glob("*.csv"))) > 1
    assert all("kept of commit" in path.read_text() for path in of_models)
