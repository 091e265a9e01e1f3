"""Papers, claims and printed figures of a workspace, beside kvlab's own or in their place."""

from __future__ import annotations

import pytest
from support.refusals import refusal

from kvlab import papers
from kvlab.papers import registry

PAPER = """name: {name}
label: Mine
title: My paper
experiment: try
{more}claims:
  - id: {name}.gain
    where: table 1
    summary: It gains.
    metric: gain
    paper_value: 0.5
    direction: {{kind: greater, than: 0.0}}
    size: {{kind: within, of: factor, tolerance: 2}}
"""


def write(folder, file: str, name: str, more: str = "") -> None:
    (folder / "papers" / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "papers" / file).write_text(PAPER.format(name=name, more=more))


def test_claims_of_the_workspace_stand_after_kvlabs_own_and_alone_in_its_ledger(bare):
    assert papers.of_project() == papers.papers() == registry.shipped()
    write(bare, "mine.yaml", "mine")
    assert [paper.name for paper in papers.papers()] == [paper.name for paper in registry.shipped()] + ["mine"]
    assert [paper.name for paper in papers.of_project()] == ["mine"]
    assert [claim.id for claim in papers.claims(experiment="try")] == ["mine.gain"]


def test_a_changed_file_is_read_again(bare):
    write(bare, "mine.yaml", "mine")
    assert papers.claims("try")[0].summary == "It gains."
    path = bare / "papers" / "mine.yaml"
    path.write_text(path.read_text().replace("It gains.", "It gains much."))
    assert papers.claims("try")[0].summary == "It gains much."


def test_a_paper_with_the_name_of_kvlabs_own_is_refused_unless_it_says_that_it_replaces_it(bare):
    write(bare, "dapq.yaml", "dapq")
    said = refusal(papers.papers)
    assert str(bare / "papers" / "dapq.yaml") in said and "replaces: true" in said
    write(bare, "dapq.yaml", "dapq", "replaces: true\n")
    assert [claim.id for claim in papers.claims(paper="dapq")] == ["dapq.gain"]
    assert len(papers.papers()) == len(registry.shipped())


def test_a_figure_of_the_workspace_is_read_and_takes_no_name_of_kvlabs(bare):
    write(bare, "mine.yaml", "mine")
    (bare / "papers" / "figures" / "mine_table1.csv").write_text("# printed\nname,value\na,0.5\n")
    assert "mine/table1" in papers.figures() and papers.figure("mine", "table1").value.tolist() == [0.5]
    assert len(papers.figure("dapq", "table1"))
    (bare / "papers" / "figures" / "dapq_table1.csv").write_text("name,value\na,0.5\n")
    assert "dapq/table1" in refusal(papers.figures)
    write(bare, "dapq.yaml", "dapq", "replaces: true\n")
    assert papers.figure("dapq", "table1").value.tolist() == [0.5]


def test_a_figure_that_is_no_table_is_named(bare):
    write(bare, "mine.yaml", "mine")
    (bare / "papers" / "figures" / "mine_table1.csv").write_text("a,b\n1,2,3\n4\n1,2,3,4\n")
    assert "mine_table1.csv is not a table" in refusal(papers.figure, "mine", "table1")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("mine.yaml", ("name: mine", "name: other"), "a paper has the name of its file"),
        ("my_paper.yaml", ("mine", "my_paper"), "without underscores"),
        ("mine.yaml", ("id: mine.gain", "id: gain"), "must be of the paper 'mine'"),
        ("mine.yaml", ("metric: gain", "metrics: gain"), "mine.yaml, line"),
    ],
)
def test_a_wrong_file_is_one_sentence(file, change, words, bare):
    write(bare, file, "mine")
    path = bare / "papers" / file
    path.write_text(path.read_text().replace(*change))
    assert words in refusal(papers.claims)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("metric:", "metrc:", "unknown key in claims 'metrc'; did you mean 'metric'?"),
        ("title:", "titel:", "unknown key 'titel'; did you mean 'title'?"),
        ("tolerance:", "tolerence:", "unknown key in claims.size.within 'tolerence'; did you mean 'tolerance'?"),
        ("than:", "then:", "unknown key in claims.direction.greater 'then'; did you mean 'than'?"),
    ],
)
def test_a_misspelt_key_is_named_with_its_line_and_the_nearest(bare, right, wrong, said):
    write(bare, "mine.yaml", "mine")
    path = bare / "papers" / "mine.yaml"
    path.write_text(path.read_text().replace(right, wrong))
    assert said in refusal(papers.papers) and "mine.yaml, line" in refusal(papers.papers)
