"""What a measurement of stability says: flips and turns, the files, and the marks of the report and the site."""

from __future__ import annotations

import importlib.util

import pandas
import pytest
from support.paths import ROOT
from support.report_pages import CLAIM
from support.runs import job
from support.steadiness import FINDING, TIGHT, lines

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench.jobs.stability_cells import ANY
from kvlab.workbench.report import page as report
from kvlab.workbench.report import snapshots, stability
from kvlab.workbench.report.stability import Stability

# ------------------------------------------------------------------------------------------------ flips and turns


def steady(*verdicts: str, **fields) -> Stability:
    (one,) = stability.measured(lines(*verdicts, **fields))
    return one


def test_a_change_of_the_word_is_told_from_a_turn():
    one = steady("holds", "holds in direction only", "undecided", "fails", "holds", "not measured")
    assert [cell.verdict for cell in one.flips] == ["holds in direction only", "undecided", "fails"]
    assert [cell.verdict for cell in one.turns] == ["fails"] and one.count == "3 of 4"
    assert "flips in 3 of 4 other runs, 1 of them from holding to failing or back" in one.sentence
    back = steady("fails", "holds in direction only", "undecided", "fails", seeds=("0", "1"))
    assert (back.count, [cell.verdict for cell in back.turns]) == ("2 of 3", ["holds in direction only"])
    open_first = steady("undecided", "fails", seeds=("0",))
    assert open_first.count == "1 of 1" and not open_first.turns


def test_a_finding_stands_as_the_weakest_of_its_claims_in_each_cell():
    other = "zsmerge.figure4.reduction_10"
    (one,) = stability.measured(
        [
            *lines("holds", "holds", seeds=("0",)),
            *lines("fails", "not measured", seeds=("0",), claim=other),
        ]
    )
    assert [cell.verdict for cell in one.cells] == ["fails", "holds"] and len(one.turns) == 1


def test_a_claim_of_several_tells_its_own_verdicts_before_the_findings():
    other = "zsmerge.figure4.reduction_10"
    (one,) = stability.measured(
        [
            *lines("holds", "holds", seeds=("0",)),
            *lines("fails", "undecided", seeds=("0",), claim=other),
        ]
    )
    own, of_finding = one.sentence_of(CLAIM).split(". ")
    assert "its verdict stays in the other run: holds (mixed/8, seed 0); holds (mixed/8b, seed 0)" in own
    assert "the finding's verdict, that of its weakest claim, flips in 1 of 1 other run: fails (mix" in of_finding
    assert "its verdict, as its finding's, flips in 1 of 1" in one.sentence_of(other)
    assert "the verdict of its finding flips" in one.sentence_of("zsmerge.figure4.reduction_05"), "not measured again"
    (alone,) = stability.measured(lines("holds", "holds", seeds=("0",)))
    assert alone.sentence_of(CLAIM) == alone.sentence


def test_a_claim_that_has_no_seed_stands_in_the_cells_of_every_seed():
    other = "zsmerge.figure4.reduction_10"
    (one,) = stability.measured(
        [
            *lines("holds", "holds", documents=("mixed/8",), seeds=("0", "1")),
            *lines("undecided", documents=("mixed/8",), seeds=(ANY,), claim=other),
        ]
    )
    assert [(cell.seed, cell.verdict) for cell in one.cells] == [("0", "undecided"), ("1", "undecided")]


def test_numbers_that_a_seed_does_not_reach_are_counted():
    drawn = [{**line, "value": str(place)} for place, line in enumerate(lines(*["holds"] * 6))]
    fixed = [{**line, "value": line["documents"]} for line in lines(*["fails"] * 6, claim=TIGHT)]
    (told,) = stability.sentences(stability.measured(drawn + fixed))
    assert "In all, 0 of 10 verdicts" in told and ". 4 of the 10 repeat the numbers of another seed" in told
    (told,) = stability.sentences(stability.measured(drawn))
    assert "repeat" not in told


def test_the_sentence_counts_findings_and_verdicts():
    found = stability.measured(
        [
            *lines("holds", "holds", "fails", "holds", "holds", "holds"),
            *lines("fails", "undecided", seeds=(ANY,), claim=TIGHT),
        ]
    )
    (told,) = stability.sentences(found)
    assert "with the seeds 0, 1 and 2 and the texts mixed/8 and mixed/8b" in told
    assert "of 2 quoted findings 2 flip at least once (1 from holding to failing or back)" in told
    assert "In all, 2 of 6 verdicts are not that of the first run (33%)" in told
    assert told.startswith("How often does a verdict flip? On toy (quick profile), ")
    assert stability.sentences(stability.measured(lines("holds", seeds=("0",), documents=("mixed/8",)))) == []


# ------------------------------------------------------------------------------------------------ files


def test_what_is_kept_is_what_is_read_and_no_ledger(project, tmp_path):
    found = [*lines("holds", "fails", seeds=("0",), value="0.25"), *lines("holds", "holds", seeds=("0",), model="b/c")]
    paths = stability.keep(tmp_path / "kept", found)
    assert [path.relative_to(tmp_path / "kept").as_posix() for path in paths] == [
        "stability/toy.csv",
        "stability/c.csv",
    ]
    assert stability.read(tmp_path / "kept") == sorted(stability.measured(found), key=lambda one: one.model)
    assert pandas.read_csv(paths[0])["value"].tolist() == [0.25, 0.25]
    with pytest.raises(KvlabError, match="holds no kept ledger"):
        snapshots.kept(tmp_path / "kept")
    job(0.6)
    snapshots.keep(tmp_path / "kept")
    assert len({entry.model for entry in snapshots.kept(tmp_path / "kept")}) == 1
    assert stability.read(tmp_path / "nothing") == []


def test_a_file_that_is_no_measurement_is_refused_in_a_sentence(project, tmp_path):
    (path,) = stability.keep(tmp_path, lines("holds", "fails", seeds=("0",)))
    whole = path.read_text()
    path.write_text(whole.replace("verdict", "judgement", 1))
    with pytest.raises(KvlabError, match="no measurement of stability: it has no column 'verdict'"):
        stability.read(tmp_path)
    path.write_text(whole.replace("fails", "sings"))
    with pytest.raises(KvlabError, match="has the verdict 'sings', and there is none such"):
        stability.read(tmp_path)
    path.write_text(whole.replace(CLAIM, "zsmerge.gone"))
    assert stability.read(tmp_path) == []
    with pytest.raises(KvlabError, match="would be of the models a/x and b/x"):
        stability.keep(
            tmp_path,
            lines("holds", "fails", seeds=("0",), model="a/x")
            + lines("holds", model="b/x", seeds=("0",), documents=("d",)),
        )


# ------------------------------------------------------------------------------------------------ the marks


def test_findings_that_flip_are_marked_on_the_page(project):
    job(0.6)
    entries = report.entries()
    assert (
        'class="flips' not in report.render(entries)[report.MAIN]
        and "verdict flip?" not in report.render(entries)[report.MAIN]
    )
    found = stability.measured(
        [
            *lines("holds", "holds", "holds", "holds", "holds", "holds in direction only"),
            *lines("fails", "fails", seeds=(ANY,), claim=TIGHT),
        ]
    )
    text = report.render(entries, found)[report.MAIN]
    of_finding = sum(claim.fact[1] == FINDING for claim in papers.claims(paper="zsmerge"))
    assert text.count(">finding flips 1 of 5</em>") == of_finding and text.count('class="flips') == of_finding
    assert "its verdict stays in the other run" in text, "a steady one is told, and not marked"
    assert text.count("How often does a verdict flip?") == 1
    elsewhere = stability.measured(lines("holds", "fails", seeds=("0",), model="another@1"))
    assert 'class="flips' not in report.render(entries, elsewhere)[report.MAIN]


def test_of_several_models_the_mark_names_its_own(project):
    job(0.6, model="small@1")
    job(0.6, model="large@2")
    pages = report.render(report.entries(), stability.measured(lines("holds", "fails", seeds=("0",), model="small@9")))
    assert ">finding flips 1 of 1 on small</em>" in pages[report.MAIN] and 'class="flips turns"' in pages[report.MAIN]
    assert ">finding flips 1 of 1</em>" in pages["model-small.html"] and 'class="flips' not in pages["model-large.html"]


def test_the_ledger_of_the_site_marks_them_too(monkeypatch):
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "site" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    found = stability.measured(lines("holds", "fails", seeds=("0",), model="smollm2-135m"))
    monkeypatch.setattr(build.stability, "read", lambda folder: found)
    text = build._ledger()
    assert text.count(">flips 1 of 1</em>") == sum(claim.fact[1] == FINDING for claim in papers.claims(paper="zsmerge"))
    assert "How often does a verdict flip? On smollm2-135m" in text
    monkeypatch.setattr(build.stability, "read", lambda folder: [])
    assert "flips" not in build._ledger()
