"""The forest plot: where values lie on a line, which claim of a finding is drawn, and the poster."""

from __future__ import annotations

import pytest
from support.paths import ROOT
from support.runs import job
from typer.testing import CliRunner

from kvlab import papers
from kvlab.cli import app
from kvlab.errors import KvlabError
from kvlab.workbench.report import forest, model_trends, poster, snapshots
from kvlab.workbench.report import page as report
from kvlab.workbench.report.ledger import HOLDING, by_paper
from kvlab.workbench.report.ledger_models import subjects
from kvlab.workbench.report.value_axis import side_of, turn_of

CLAIM = "zsmerge.figure4.reduction_20"


@pytest.fixture(scope="module")
def kept():
    return snapshots.kept(ROOT / "docs" / "ledger")


@pytest.fixture(scope="module")
def drawn(kept):
    """(paper, its lines) of the kept ledgers."""
    rows = model_trends.rows(kept, subjects(kept))
    return [
        (paper, forest.of_paper([row for row in rows if row.claim.paper == paper.name], paper))
        for paper in papers.of_project()
    ]


def test_what_holds_lies_right_of_no_effect_and_what_fails_does_not(drawn):
    dots = [(line, dot) for _, lines in drawn for line in lines for dot in line.dots]
    assert len(dots) > 60
    for line, dot in dots:
        assert 0 <= dot.low <= dot.x <= dot.high <= 100, line.claim.id
        if dot.state in HOLDING:
            assert dot.x > forest.NO_EFFECT, (line.claim.id, dot)
        if dot.state == papers.FAILS and line.claim.direction.kind not in ("all_of", "any_of"):
            assert dot.x <= forest.NO_EFFECT, (line.claim.id, dot)


def test_a_line_keeps_the_ratios_of_distances(kept):
    """Twice as far from no effect is drawn twice as far, on either side of it, whichever way the claim points."""
    for row in model_trends.rows(kept, subjects(kept)):
        line = forest.strip(row)
        if line is None:
            continue
        values = {entry.model: entry.verdict.value for entry in row.entries}
        turn, side = turn_of(row.claim), side_of(row.claim)
        assert turn is not None
        scales = [
            (dot.x - forest.NO_EFFECT) / (side * ((values[dot.model] or 0) - turn))
            for dot in line.dots
            if abs(dot.x - forest.NO_EFFECT) > 5
        ]
        assert all(scale > 0 for scale in scales), row.claim.id
        assert max(scales, default=1) <= 1.1 * min(scales, default=1), row.claim.id


def test_quoted_findings_come_first_and_none_twice(drawn):
    for paper, lines in drawn:
        names = [line.name for line in lines]
        quoted = [name for name in paper.quoted if name in names]
        assert names[: len(quoted)] == quoted and len(set(names)) == len(names)


def test_a_finding_counts_where_its_weakest_claim_holds(drawn, kept):
    entries = by_paper(kept)
    for paper, lines in drawn:
        for line in lines:
            mine = [each for each in entries[paper.label] if each.claim.fact[1] == line.name and each.measured]
            for model, state in line.states.items():
                states = [each.state for each in mine if each.model == model]
                assert (state in HOLDING) == all(each in (*HOLDING, papers.UNMEASURED) for each in states)


def test_of_claims_that_hold_alike_the_one_that_most_models_measured_is_drawn(kept):
    name = "MorphKV against SnapKV at equal bytes, where both can choose"
    rows = [row for row in model_trends.rows(kept, subjects(kept)) if row.claim.fact[1] == name]
    assert all(entry.state in (*HOLDING, papers.UNMEASURED) for row in rows for entry in row.entries)
    (line,) = forest.lines(rows, [name])
    measured = {row.claim.id: sum(each.state in HOLDING for each in row.entries) for row in rows}
    assert len(set(measured.values())) > 1
    assert measured[line.claim.id] == len(line.dots) == max(measured.values())


def test_a_papers_number_far_beyond_ours_stands_at_the_edge(project):
    job(0.1, metric="published/reduction/40", model="small", parameters=135_000_000)
    (entry,) = (entry for entry in report.entries() if entry.claim.id == "zsmerge.figure4.as_published")
    line = forest.strip(model_trends.Row(entry.claim, [entry]))
    assert line is not None and line.beyond and line.paper == forest.EDGES[1]
    job(0.5, metric="published/reduction/40", model="small", parameters=135_000_000)
    (entry,) = (entry for entry in report.entries() if entry.claim.id == "zsmerge.figure4.as_published")
    near = forest.strip(model_trends.Row(entry.claim, [entry]))
    assert near is not None and not near.beyond
    assert near.paper == forest.EDGES[1] and near.dots[0].x < forest.EDGES[1]


@pytest.mark.parametrize("suffix", poster.FORMATS)
def test_a_poster_is_written_in_each_format(suffix, tmp_path):
    path = tmp_path / f"slide{suffix}"
    done = CliRunner().invoke(app, ["report", "--from", str(ROOT / "docs" / "ledger"), "--poster", str(path)])
    assert done.exit_code == 0, done.output
    start = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}[suffix]
    assert path.read_bytes().startswith(start) and [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_poster_shows_every_line_of_every_paper(kept, drawn, tmp_path):
    text = poster.save(kept, tmp_path / "slide.svg").read_text()
    for paper, lines in drawn:
        assert paper.label in text
        assert all(line.name.split()[0] in text and line.holds in text for line in lines)


def test_a_poster_of_nothing_and_of_another_kind_is_refused(project, tmp_path):
    with pytest.raises(KvlabError, match="nothing of what the poster shows"):
        poster.save(report.entries(), tmp_path / "slide.svg")
    with pytest.raises(KvlabError, match="gif is none of these"):
        poster.check(tmp_path / "slide.gif")
    assert list(tmp_path.glob("slide*")) == []
