"""The ledger picks the right runs, and the report is whole, safe and needs nothing else."""

from __future__ import annotations

import re

import pandas
import pytest
from matplotlib.figure import Figure
from support.projects import EXPERIMENT
from support.report_pages import CLAIM, Page, slug
from support.runs import job
from support.toy_claims import claim as toy_claim

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench.report import ledger
from kvlab.workbench.report import page as report
from kvlab.workbench.store import database, tracking

COLUMNS = [
    "id",
    "paper",
    "where",
    "claim",
    "metric",
    "paper_value",
    "value",
    "low",
    "high",
    "verdict",
    "model",
    "run_id",
    "kind",
    "finding",
    "power",
    "q",
    "genre_low",
    "genre_high",
    "machine",
    "why",
]


def entry(**narrow) -> pandas.Series:
    return report.ledger(**narrow).set_index("id").loc[CLAIM]


def test_without_a_store_everything_is_not_measured_and_none_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    frame = report.ledger()
    assert list(frame.columns) == COLUMNS and len(frame) == len(papers.claims())
    assert set(frame["verdict"]) == {"not measured"} and list(tmp_path.iterdir()) == []


def test_the_newest_finished_job_counts(project):
    job(0.1)
    newest = job(0.6)
    job(-1.0, status="FAILED")
    job(-1.0, status="RUNNING")
    job(-1.0, kind="interactive")
    job(-1.0, metric="reduction/0.10")
    found = entry()
    assert (found.run_id, found.value, found.verdict, found.model) == (newest, 0.6, "holds in direction only", "toy@0")
    assert (found.low, found.high) == (0.5, 0.7)


def test_model_and_profile_narrow_the_runs(project):
    small, full = job(0.6), job(0.2, profile="full", model="big@1")
    assert entry(profile="quick").run_id == entry(model="toy").run_id == small
    assert entry(profile="full").run_id == entry(model="big").run_id == full
    assert entry(model="big@1").verdict == "holds in direction only"
    assert entry(model="none").verdict == "not measured"


def test_a_run_with_all_that_a_claim_needs_goes_before_a_newer_one_without(project):
    run = tracking.create_run(database.client(), EXPERIMENT, {}, {"kvlab.kind": "job", "model": "toy"}, "complete")
    run.log({"reduction/0.50": 0.9, "growth/0.20_to_0.50": 0.3}, {"growth/0.20_to_0.50": (0.2, 0.4)})
    run.finish()
    job(0.9, metric="reduction/0.50", model="toy")
    found = report.ledger().set_index("id").loc["zsmerge.figure4.reduction_50"]
    assert (found.run_id, found.verdict) == (run.id, "holds in direction only")


def test_the_page_is_self_contained_and_escapes_what_runs_say(project):
    run_id = job(0.6, figure=True)
    page = report.write()
    assert page == project / "report" / "report.html"
    text = page.read_text()
    parsed = Page(text)
    assert parsed.tags.count("script") == 1 and "<script>alert" not in text and "&lt;script&gt;" in text
    elsewhere = {
        address
        for address in parsed.addresses
        if not address.startswith(("data:image/webp;base64,", "data:,", "#", "claims.csv"))
    }
    (experiment,) = {run.info.experiment_id for run in runs()}
    assert elsewhere == {f"http://127.0.0.1:5000/#/experiments/{experiment}/runs/{run_id}"}
    assert sum(address.startswith("data:image/webp") for address in parsed.addresses) == 1
    assert "@import" not in text and not re.search(r"url\(\s*['\"]?http", text)
    assert run_id in text and "error curves" in text and "60.5 %" in text
    for claim in papers.claims():
        assert text.count(f'id="{slug(claim.id)}"') == 1
        assert re.split("[`'&<\"]", claim.untested)[0] in text
    anchors = {address[1:] for address in parsed.addresses if address.startswith("#")}
    assert anchors <= set(parsed.ids) and len(parsed.ids) == len(set(parsed.ids))


def runs() -> list:
    """All runs of the toy experiment."""
    client = database.client()
    return client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])


def with_figure(name: str, *ids: str):
    """The papers with these claims shown by a figure of that name, and the others by one that nobody draws."""
    return tuple(
        paper.model_copy(
            update={
                "claims": [
                    claim.model_copy(update={"figure": name if claim.id in ids else "never drawn"})
                    for claim in paper.claims
                ]
            }
        )
        for paper in papers.papers()
    )


def test_a_thumbnail_leads_to_the_figure_which_is_embedded_once(project, monkeypatch):
    """Two claims share a figure; what the run has not drawn is simply not shown."""
    two = (CLAIM, "zsmerge.figure4.reduction_10")
    changed = with_figure("error curves", *two)
    monkeypatch.setattr(papers, "of_project", lambda: changed)
    run = tracking.create_run(database.client(), EXPERIMENT, {}, {"kvlab.kind": "job", "model": "toy"}, "both")
    run.log({"reduction/0.20": 0.6, "reduction/0.10": 0.4})
    picture = Figure(figsize=(3, 2))
    picture.subplots().plot([1, 2, 3])
    run.figure("error curves", picture)
    run.tell("error curves", ["Merging removes 0.6 of the error <here>.", "How far is open."])
    run.tell("a table", ["It has no figure."])
    run.finish()
    text = report.write().read_text()
    parsed, anchor = Page(text), f"{run.id[:8]}-error_curves"
    assert parsed.addresses.count(f"#{anchor}") == 3, "from two claims, and from the paper in short"
    assert parsed.ids.count(anchor) == 1
    large = [address for address in parsed.addresses if address.startswith("data:image/webp")]
    small = re.findall(r'background-image: url\("(data:[^"]+)"\)', text)
    assert len(large) == len(small) == 1 and len(small[0]) < len(large[0]) and text.count(large[0]) == 1
    figure = text[text.index("<figure ") : text.index("</figure>")]
    assert "Merging removes 0.6 of the error &lt;here&gt;. How far is open." in figure
    assert "It has no figure." in text[text.index("<b>a table</b>") :]
    caption = text[text.index("<figcaption>") : text.index("</figcaption>")]
    assert all(f'href="#{slug(name)}"' in caption for name in two)


def test_runs_on_a_tracking_server_link_there_without_a_password(project, monkeypatch):
    run_id = job(0.6)
    (run,) = [run for run in runs() if run.info.run_id == run_id]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@runs.example:8443/")
    assert report.run_link(run) == (f"https://runs.example:8443/#/experiments/{run.info.experiment_id}/runs/{run_id}")


def test_findings_and_checks_are_counted_apart_and_add_up(project):
    job(0.6, metric="published/reduction/40")
    job(0.0, metric="theorem1/violations")
    found = report.entries()
    page = report.write(project / "elsewhere")
    frame = pandas.read_csv(page.parent / "claims.csv")
    assert list(frame.columns) == COLUMNS and len(frame) == len(papers.claims())
    assert (frame["verdict"] == "holds").sum() == 2
    total = ledger.Tally.of(found)
    assert total.findings["holds"] == 1 and total.checks["holds"] == 1 and total.checks_missed == 0
    findings = [claim for claim in papers.claims() if claim.kind == "finding"]
    assert total.findings.total() == len({claim.fact for claim in findings}) < len(findings)
    others = total.questions.total() + total.checks.total() + total.recomputed.total() + total.timings.total()
    assert len(findings) + others == len(papers.claims())
    assert total.recomputed.total() == sum(claim.kind == "recomputed" for claim in papers.claims()) > 0
    untested = {claim.fact for claim in findings if claim.untested}
    assert total.findings["cannot be tested here"] == len(untested - {c.fact for c in findings if not c.untested})

    rows = matrix(page.read_text())
    assert list(rows) == [paper.label for paper in papers.papers()] + ["all findings"]
    for label, mine in ledger.by_paper(found).items():
        assert rows[label] == [ledger.Tally.of(mine).findings[state] for state in ledger.STATES]
    assert rows.pop("all findings") == [sum(column) for column in zip(*rows.values(), strict=True)]


def matrix(text: str) -> dict[str, list[int]]:
    """The table at the top: paper -> findings by state (a dot is none)."""
    table = text[text.index('<table class="matrix"') : text.index("</table>")]
    rows = {}
    for row in re.findall(r'<tr><th scope="row">(.*?)</tr>', table, re.S):
        label, cells = row.split("</th>")
        numbers = re.findall(r"<td[^>]*>([^<]*)(?:<small>[^<]*</small>)?</td>", cells)
        rows[re.sub("<[^>]+>", "", label).strip()] = [0 if cell == "·" else int(cell) for cell in numbers[:-2]]
    return rows


def test_a_check_that_is_not_met_is_shouted(project):
    job(0.0, metric="theorem1/violations")
    assert "not met" not in report.write().read_text()
    job(2.0, metric="theorem1/violations")
    text = report.write().read_text()
    assert "1 of the checks is not met" in text
    assert ledger.Tally.of(report.entries()).checks_missed == 1


def judged(test: dict, value: float | None, low: float | None = None, high: float | None = None, paper=0.6):
    tested = toy_claim(paper_value=paper, direction=test, size={"kind": "at_least", "value": -9})
    return ledger.Entry(tested, papers.Verdict(value=value, low=low, high=high, verdict="holds", why=""))


def test_the_small_axis_puts_everything_where_it_is():
    at = report.scale(judged({"kind": "greater", "than": 0.0}, 0.5, 0.25, 1.0))
    assert at == {"value": 50.0, "low": 28.0, "high": 94.0, "paper": pytest.approx(58.8), "turn": 6.0}
    clearly = report.scale(judged({"kind": "clearly_less", "than": 1.0}, 0.5, paper=None))
    assert (clearly["turn"], clearly["value"], clearly["paper"], clearly["low"]) == (94.0, 6.0, None, None)
    margin = report.scale(judged({"kind": "greater", "than": 1.0, "margin": 0.5}, 0.5, paper=None))
    assert margin["turn"] == 94.0
    for test in ({"kind": "greater", "than": "other"}, {"kind": "greater", "metric": "other", "than": 0.0}):
        assert report.scale(judged(test, 0.5))["turn"] is None
        assert report.scale(judged(test, 0.5, paper=None)) is None
    assert report.scale(judged({"kind": "greater", "than": 0.0}, None)) is None


def test_writing_replaces_whole_files_and_leaves_nothing_else(project, monkeypatch):
    job(0.6)
    first = report.write().read_text()
    assert sorted(path.name for path in (project / "report").iterdir()) == ["claims.csv", "report.html"]

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pandas.DataFrame, "to_csv", full_disk)
    with pytest.raises(KvlabError, match=r"claims\.csv: No space left on device"):
        report.write()
    assert sorted(path.name for path in (project / "report").iterdir()) == ["claims.csv", "report.html"]
    assert (project / "report" / "report.html").read_text() == first


def test_a_file_in_the_way_is_one_sentence(project):
    (project / "taken").write_text("")
    with pytest.raises(KvlabError, match="it is a file"):
        report.write(project / "taken")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (-2.5e-6, "−2.50×10⁻⁶"),
        (0.605, "0.605"),
        (2.72e-4, "2.72×10⁻⁴"),
        (45.0, "45"),
        (-1.0, "−1.000"),
        (0.0, "0"),
        (1.5e6, "1.50×10⁶"),
    ],
)
def test_numbers_read_well(value, text):
    assert report.number(value) == text
