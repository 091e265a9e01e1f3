"""The ledger of several models: which runs count for each, and pages side by side."""

from __future__ import annotations

import re
from pathlib import Path

import pandas
import pytest
from support.report_pages import CLAIM, Page, slug
from support.runs import job

from kvlab import papers
from kvlab.inputs import models as known
from kvlab.workbench.report import ledger
from kvlab.workbench.report import page as report
from kvlab.workbench.report.ledger_models import Subject, in_words, remarks, subjects

SMALL, LARGE = {"model": "small", "parameters": 135_000_000}, {"model": "large", "parameters": 8_000_000_000}


def of_claim(found, claim: str = CLAIM) -> dict[str, ledger.Entry]:
    """Model -> its entry."""
    return {entry.model: entry for entry in found if entry.claim.id == claim}


# ---------------------------------------------------------------- which runs count


def test_for_each_model_its_own_newest_run_counts(project):
    job(0.1, **SMALL)
    newest = job(0.05, **SMALL)
    other = job(0.6, **LARGE)
    job(-1.0, status="FAILED", **LARGE)
    found = report.entries()
    assert len(found) == 2 * len(papers.claims())
    mine = of_claim(found)
    assert list(mine) == ["small", "large"]
    assert [entry.run.info.run_id for entry in mine.values()] == [newest, other]
    assert [entry.state for entry in mine.values()] == ["undecided", "holds in direction only"]
    elsewhere = of_claim(found, "dapq.table1.dc_sp")
    assert {entry.state for entry in elsewhere.values()} <= {"not measured"}


def test_the_table_has_a_row_for_each_claim_and_model(project):
    job(0.3, **SMALL)
    job(0.6, **LARGE)
    frame = pandas.read_csv(report.write().parent / "claims.csv")
    assert frame.groupby("id").model.apply(list).map(tuple).unique().tolist() == [("small", "large")]
    assert set(frame.query("id == @CLAIM").set_index("model").value.items()) == {("small", 0.3), ("large", 0.6)}
    one = report.ledger(model="large")
    assert len(one) == len(papers.claims()) and set(one.model) == {"large"}
    both = report.ledger(model=["small", "large@1"])
    assert len(both) == 2 * len(one)


def test_a_model_that_measured_no_claim_is_no_part_of_it(project):
    job(0.3, **SMALL)
    job(0.6, metric="nobody/asked", **LARGE)
    assert {entry.model for entry in report.entries()} == {"small"}
    assert report.write().name == "report.html" and not list((project / "report").glob("model-*"))


# ---------------------------------------------------------------- the models


def test_models_stand_in_the_order_of_their_sizes(project, monkeypatch):
    """As the catalogue says; else as the newest run says that does; the unknown ones last."""
    monkeypatch.setitem(known.MODELS, "known", Subject("known", 500_000_000))
    job(0.1, model="unknown")
    job(0.1, model="known@0")
    job(0.1, shape="32 layers", dtype="float32", **LARGE)
    job(0.1, metric="reduction/0.10", **SMALL)
    job(0.2, model="small")
    found = subjects(report.entries())
    assert [(subject.name, subject.parameters) for subject in found] == [
        ("small", 135_000_000),
        ("known@0", 500_000_000),
        ("large", 8_000_000_000),
        ("unknown", None),
    ]
    job(0.3, model="known@0", parameters=630_000_000)
    (catalogued,) = [subject for subject in subjects(report.entries()) if subject.name == "known@0"]
    assert catalogued.parameters == 500_000_000, "its file may hold a matrix twice"
    assert found[2].description == "8B parameters; 32 layers; float32" and found[3].description == ""


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        (134_515_008, "135M"),
        (494_032_768, "494M"),
        (999_600_000, "1B"),
        (1_543_714_304, "1.5B"),
        (8.03e9, "8B"),
        (70.6e9, "71B"),
        (26_854, "27K"),
    ],
)
def test_sizes_are_told_as_model_cards_do(parameters, told):
    assert in_words(parameters) == told


def test_a_model_is_called_by_its_name_alone():
    assert Subject("org/name").label == "name" and Subject("/some/where/mine").label == "mine"
    assert Subject("toy@0123").label == "toy" and Subject("random:llama-2-7b").label == "random:llama-2-7b"


def test_what_went_without_tables_says_so(project):
    job(0.6, tables="none", heads="none", **SMALL)
    job(0.0, metric="theorem1/violations", tables="none", **SMALL)
    mine = of_claim(report.entries())["small"]
    assert remarks(mine) == []
    theirs = mine.claim.model_copy(update={"id": "compilerkv.table1.x", "paper": "compilerkv"})
    assert remarks(ledger.Entry(theirs, mine.verdict, mine.run)) == ["neutral tables"]
    needle = mine.claim.model_copy(update={"metric": "needle/duoattention"})
    assert remarks(ledger.Entry(needle, mine.verdict, mine.run)) == ["no measured head scores"]
    assert remarks(ledger.Entry(theirs, mine.verdict, None)) == []


@pytest.mark.parametrize(("alone", "said"), [("[64, 128]", []), ("none", ["neutral tables"])])
def test_filled_sets_with_weights_of_their_own_go_without_nothing(project, alone, said):
    job(0.6, tables="none", alone=alone, **SMALL)
    mine = of_claim(report.entries())["small"]
    about = {"id": "compilerkv.table1.x", "paper": "compilerkv"}
    for metric, expected in (("gain_filled/kept/h2o", said), ("gain/kept/h2o", ["neutral tables"])):
        theirs = mine.claim.model_copy(update=about | {"metric": metric})
        assert remarks(ledger.Entry(theirs, mine.verdict, mine.run)) == expected


def test_a_claim_that_a_model_cannot_be_asked_says_why(project, monkeypatch):
    (asked,) = [each for each in papers.claims() if each.id == CLAIM]
    knowing = asked.model_copy(update={"lacking": {asked.metric: "this model's groups are too large"}})
    monkeypatch.setattr(ledger, "claims", lambda: [knowing, asked.model_copy(update={"id": "p.other", "metric": "m"})])
    job(0.6, metric="m", **SMALL)
    found = of_claim(report.entries())["small"]
    assert found.verdict.why.startswith("this model's groups are too large (no ") and found.run is None


# ---------------------------------------------------------------- the pages


@pytest.fixture
def pages(project) -> dict[str, str]:
    """File -> its text, of a report on three models, one of which is a folder of the same name as another."""
    job(0.3, figure=True, **SMALL)
    job(0.6, **LARGE)
    job(0.1, model="/some/where/large", parameters=400_000_000, tables="none")
    report.write()
    return {path.name: path.read_text() for path in sorted((project / "report").iterdir())}


def test_a_page_for_each_model_and_one_for_all(pages):
    assert set(pages) == {"claims.csv", "report.html", "model-small.html", "model-large.html", "model-large-2.html"}
    for name in ("model-small.html", "model-large.html", "model-large-2.html"):
        assert report.MAIN in Page(pages[name]).addresses and name in Page(pages["report.html"]).addresses
    assert "/some/where/large" in pages["model-large.html"], "the smaller one comes first"


def test_figures_are_promised_where_runs_are_that_drew_them(pages):
    assert "with its runs and their figures" in pages["report.html"] and "are not here" not in pages["report.html"]
    assert "Figures and runs" in pages["model-small.html"]
    assert "Figures and runs" not in pages["model-large.html"], "its run drew none"


def test_every_link_leads_somewhere_and_nothing_comes_from_elsewhere(pages):
    parsed = {name: Page(text) for name, text in pages.items() if name.endswith(".html")}
    for name, page in parsed.items():
        assert len(page.ids) == len(set(page.ids)) and page.tags.count("script") == 1
        assert "@import" not in pages[name] and not re.search(r"url\(\s*['\"]?http", pages[name])
        for address in page.addresses:
            if address.startswith(("data:", "http://127.0.0.1:5000/")) or address == "claims.csv":
                continue
            file, _, anchor = address.partition("#")
            assert not anchor or anchor in parsed[file or name].ids, (name, address)
            assert (file or name) in parsed
    for claim in papers.claims():
        assert all(text.count(f'id="{slug(claim.id)}"') == 1 for name, text in pages.items() if name != "claims.csv")


def test_a_claims_line_has_a_mark_for_each_model(pages):
    """It says the verdict without colour, and a strip beside it says it by where our values lie."""
    text = pages["report.html"]
    (mine,) = re.findall(rf'<details class="claim" id="{slug(CLAIM)}".*?</summary>', text, re.DOTALL)
    assert re.findall(r'<i class="\w+" title="[^"]+">(.)</i>', mine) == ["◐", "◇", "◐"]
    (strip,) = re.findall(r'<svg class="forest".*?</svg>', mine, re.DOTALL)
    assert re.findall(r'<circle class="(\w*)"', strip) == ["", "hollow", ""]
    cell = r'<li class="model (\w+)" data-model="([^"]+)"><p><a href="([^"#]+)#' + slug(CLAIM) + '"'
    cells = re.findall(cell, text)
    assert cells == [
        ("direction", "small", "model-small.html"),
        ("undecided", "large", "model-large.html"),
        ("direction", "large", "model-large-2.html"),
    ]


def test_counts_stand_for_each_model(pages, project):
    text = pages["report.html"]
    table = text[text.index('<table class="matrix models"') : text.index("</table>")]
    rows = re.findall(
        r"<td class=\"n (?:holds|direction|fails|undecided|unmeasured|untested|none)\">([^<]*)(?:<small>|</td>)", table
    )
    counts = [0 if cell == "·" else int(cell) for cell in rows]
    of_models = ledger.by_model(report.entries())
    expected = [ledger.Tally.of(mine).findings[state] for mine in of_models.values() for state in ledger.STATES]
    assert counts == expected and len(counts) == 3 * len(ledger.STATES)


def test_pages_of_models_that_are_gone_go_too(pages, project):
    folder = project / "report"
    (folder / "model-mine.html").write_text("<p>written by somebody else</p>")
    report.write(model=["small"])
    assert sorted(path.name for path in folder.iterdir()) == ["claims.csv", "model-mine.html", "report.html"]
    text = (folder / "report.html").read_text()
    assert 'class="numbers"' in text and 'class="by-model"' not in text


def test_names_become_files():
    files = report._files(["a/b", "b", "random:x y", "...", "c/b"])
    assert list(files.values()) == [
        "model-b.html",
        "model-b-2.html",
        "model-random-x-y.html",
        "model-unnamed.html",
        "model-b-3.html",
    ]
    assert all(Path(name).name == name for name in files.values())
