"""The ledger picks the right runs, and the report is whole, safe and needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pandas
import pytest
from matplotlib.figure import Figure
from projects import EXPERIMENT, project  # noqa: F401

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench import report, store, tracking

COLUMNS = "id paper where claim metric paper_value value low high verdict model run_id".split()
CLAIM = "zsmerge.figure4.reduction_20"


def job(value: float, status: str = "FINISHED", kind: str = "job", profile: str = "quick", model: str = "toy@0",
        metric: str = "reduction/0.20", figure: bool = False) -> str:
    """Log a run as the driver would; returns its id."""
    run = tracking.create_run(store.client(), EXPERIMENT, {"seed": 0}, {"kvlab.kind": kind, "kvlab.profile": profile,
                                                                        "model": model}, "toy")
    run.log({metric: value}, {metric: (value - 0.1, value + 0.1)})
    run.tag("signature", f"{model}|<script>alert(1)</script>")
    if figure:
        picture = Figure(figsize=(3, 2))
        picture.subplots().plot([1, 2, 3])
        run.figure("error_curves", picture)
    run.finish(status)
    return run.id


def entry(**narrow) -> pandas.Series:
    return report.ledger(**narrow).set_index("id").loc[CLAIM]


def test_without_a_store_everything_is_not_measured_and_none_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    frame = report.ledger()
    assert list(frame.columns) == COLUMNS and len(frame) == len(papers.claims())
    assert set(frame["verdict"]) == {"not measured"} and list(tmp_path.iterdir()) == []


def test_the_newest_finished_job_counts(project):  # noqa: F811
    job(0.1)
    newest = job(0.6)
    job(-1.0, status="FAILED")
    job(-1.0, status="RUNNING")
    job(-1.0, kind="interactive")
    job(-1.0, metric="reduction/0.10")
    found = entry()
    assert (found.run_id, found.value, found.verdict, found.model) == (newest, 0.6, "holds", "toy@0")
    assert (found.low, found.high) == (0.5, 0.7)


def test_model_and_profile_narrow_the_runs(project):  # noqa: F811
    small, full = job(0.6), job(0.1, profile="full", model="big@1")
    assert entry().run_id == full
    assert entry(profile="quick").run_id == small and entry(model="toy").run_id == small
    assert entry(model="big@1").verdict == "holds in direction only"
    assert entry(model="none").verdict == "not measured"


def test_a_run_with_all_that_a_claim_needs_goes_before_a_newer_one_without(project):  # noqa: F811
    run = tracking.create_run(store.client(), EXPERIMENT, {}, {"kvlab.kind": "job", "model": "toy"}, "complete")
    run.log({"reduction/0.50": 0.9, "reduction/0.20": 0.6})
    run.finish()
    job(0.9, metric="reduction/0.50")
    found = report.ledger().set_index("id").loc["zsmerge.figure4.reduction_50"]
    assert (found.run_id, found.verdict) == (run.id, "holds")


class Page(HTMLParser):
    """The addresses a page asks for, and its text by class of the innermost element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses, self.tags, self.classes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append(tag)
        self.classes += (named.get("class") or "").split()
        self.addresses += [named[key] for key in ("src", "href") if key in named]


def test_the_page_is_self_contained_and_escapes_what_runs_say(project):  # noqa: F811
    run_id = job(0.6, figure=True)
    page = report.write()
    assert page == project / "report" / "report.html"
    text = page.read_text()
    parsed = Page(text)
    assert "script" not in parsed.tags and "link" not in parsed.tags and "&lt;script&gt;" in text
    assert all(address.startswith(("data:image/png;base64,", "#", "claims.csv")) for address in parsed.addresses)
    assert sum(address.startswith("data:image/png") for address in parsed.addresses) == 1
    assert "@import" not in text and not re.search(r"url\(\s*['\"]?http", text)
    assert run_id in text and "error curves" in text and "60.5 %" in text
    for claim in papers.claims():
        assert f'id="{re.sub(r"[^A-Za-z0-9_]+", "-", claim.id)}"' in text


def test_the_counts_are_those_of_the_csv(project):  # noqa: F811
    job(0.6)
    page = report.write(project / "elsewhere")
    frame = pandas.read_csv(page.parent / "claims.csv")
    assert list(frame.columns) == COLUMNS
    shown = dict(re.findall(r'<b>(\d+)</b><span>([a-z ]+)</span>', page.read_text()))
    assert {verdict: int(count) for count, verdict in
            re.findall(r'<b>(\d+)</b><span>([a-z ]+)</span>', page.read_text())} == {
        verdict: int((frame["verdict"] == verdict).sum()) for verdict in papers.VERDICTS}
    assert shown and (frame["verdict"] == "holds").sum() == 1


def test_writing_replaces_whole_files_and_leaves_nothing_else(project, monkeypatch):  # noqa: F811
    first = report.write().read_text()
    assert sorted(path.name for path in (project / "report").iterdir()) == ["claims.csv", "report.html"]

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pandas.DataFrame, "to_csv", full_disk)
    with pytest.raises(KvlabError, match=r"claims\.csv: No space left on device"):
        report.write()
    assert sorted(path.name for path in (project / "report").iterdir()) == ["claims.csv", "report.html"]
    assert (project / "report" / "report.html").read_text() == first


def test_a_file_in_the_way_is_one_sentence(project):  # noqa: F811
    (project / "taken").write_text("")
    with pytest.raises(KvlabError, match="it is a file"):
        report.write(project / "taken")


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"),
    (0.605, "0.605"), (2.72e-4, "2.72×10⁻⁴"), (45.0, "45"), (-1.0, "−1.000"), (0.0, "0"), (1.5e6, "1.50×10⁶")])
def test_numbers_read_well(value, text):
    assert report.number(value) == text
