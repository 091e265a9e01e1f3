"""Papers as data: one place for each fact, ids that can be right, and the same in docstrings, lists and pages."""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import ClassVar

import pytest
from support.commands import call
from support.paths import ROOT

import kvlab
from kvlab import methods, papers
from kvlab.errors import KvlabError
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods.snapkv import SnapKV
from kvlab.papers import load_file
from kvlab.workbench.method_pages import sources

# References, and methods around another's scores, that no paper proposes.
WITHOUT = ["chain", "decoding", "exact_topk", "full", "layered", "merging", "random", "rerotated", "threshold"]
CITED = {name: cls.paper for name, cls in methods.registry().items() if cls.paper}
ID = r"\b\d{4}\.\d{4,5}\b"


def test_every_policy_has_a_paper_or_is_a_reference():
    assert sorted(set(kvlab.policies()) - set(CITED)) == WITHOUT


def test_every_paper_is_that_of_a_policy_or_of_claims_and_is_there_once():
    judged = {paper.name for paper in papers.papers()}
    assert set(PAPERS) <= set(CITED) | judged
    assert all(CITED.get(name, paper) is paper for name, paper in PAPERS.items())
    assert all(paper in PAPERS.values() for paper in CITED.values())
    ids = [paper.arxiv for paper in PAPERS.values()]
    assert None not in ids and len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", PAPERS)
def test_the_year_is_that_of_the_id_and_the_code_is_a_repository(name):
    paper = PAPERS[name]
    assert paper.arxiv and 2000 + int(paper.arxiv[:2]) == paper.year and 1 <= int(paper.arxiv[2:4]) <= 12
    assert paper.url == f"https://arxiv.org/abs/{paper.arxiv}"
    assert paper.code is None or re.fullmatch(
        r"https://(github\.com/[\w.-]+|anonymous\.4open\.science/r)/[\w.-]+", paper.code
    )
    assert re.fullmatch(r"[A-Z]\w+ (et al\.|and ([A-Z]\w+ )*[A-Z]\w+)", paper.authors)


@pytest.mark.parametrize("name", CITED)
def test_a_docstring_names_the_same_paper(name):
    """The id, authors and year, and the title in quotes, where it has them."""
    cls, paper = methods.registry()[name], CITED[name]
    told = " ".join(f"{inspect.getdoc(cls)} {inspect.getdoc(sys.modules[cls.__module__])}".split())
    assert set(re.findall(ID, told)) <= {paper.arxiv}
    found = re.findall(r"\(((?:[A-Z]\w+ )+(?:et al\.|and [\w ]+)),? (20\d\d)", told)
    assert {f"{authors} {year}" for authors, year in found} <= {paper.cited}
    quoted = re.search(r'"([^"]+)" \([A-Z]', told)
    assert quoted is None or quoted[1] == paper.title


@pytest.mark.parametrize("name", kvlab.policies())
def test_links_of_a_page_are_those_of_the_data(name):
    paper = methods.registry()[name].paper
    text = (ROOT / "docs" / "policies" / f"{name}.md").read_text(encoding="utf-8")
    assert text.split("\n\n")[2:3] == sources(paper) or not paper
    wanted = [address for address in (paper.url, paper.code) if address] if paper else []
    assert re.findall(r"\]\((https?:[^)]+)\)", text) == wanted


def test_lists_of_methods_link_the_same_papers():
    table = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \[`(\w+)`\]\(\S+\) \| \[([^\]]+)\]\(([^)]+)\) \|", table, re.MULTILINE)
    assert {name: (cited, url) for name, cited, url in found} == {n: (p.cited, p.url) for n, p in CITED.items()}
    for page in ("README.md", "docs/disagreements.md"):
        linked = set(re.findall(r"https://arxiv\.org/abs/[\d.]+", (ROOT / page).read_text(encoding="utf-8")))
        assert linked == {PAPERS[paper.name].url for paper in papers.papers()}, page


def test_reproduced_papers_share_the_data_of_their_policies(tmp_path):
    for paper in papers.papers():
        assert paper.source is PAPERS[paper.name] and paper.title == PAPERS[paper.name].title
        assert not re.search(r"^title:", (ROOT / "kvlab/papers" / f"{paper.name}.yaml").read_text(), re.MULTILINE)
    file = tmp_path / "quest.yaml"
    file.write_text("name: quest\nlabel: Quest\nclaims: []\n", encoding="utf-8")
    assert load_file(file).source is PAPERS["quest"]
    file.write_text("name: quest\nlabel: Quest\ntitle: Another Quest\nclaims: []\n", encoding="utf-8")
    assert load_file(file).title == "Another Quest" and load_file(file).source is None
    file.write_text("name: unheard\nlabel: Quest\nclaims: []\n", encoding="utf-8")
    with pytest.raises(KvlabError, match="title"):
        load_file(file)


def test_a_list_prints_year_and_id_within_eighty_columns(capsys, monkeypatch):
    _, out, _ = call(capsys, "list", "policies", "--json")
    found = {entry["name"]: entry["paper"] for entry in json.loads(out)}
    without = [*WITHOUT, "oracle_attention", "recorded"]
    assert sorted(name for name, paper in found.items() if paper is None) == sorted(without)
    snapkv = PAPERS["snapkv"]
    assert found["snapkv"]["url"] == snapkv.url and found["snapkv"]["code"] == snapkv.code
    assert (found["snapkv"]["title"], found["snapkv"]["year"]) == (snapkv.title, 2024)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = re.sub(r"\x1b\[[\d;]*m", "", call(capsys, "list", "policies")[1]).splitlines()
    assert max(map(len, lines)) <= 80
    for name, paper in CITED.items():
        assert any(line.split()[:3] == [name, str(paper.year), paper.arxiv] for line in lines), name


def test_a_policy_of_a_user_has_a_paper_of_its_own_or_none():
    mine = methods.Paper("A Title", "Doe and Roe", 2030)

    class Cited(SnapKV):
        name = "cited"
        paper = mine

    class Uncited(SnapKV):
        name: ClassVar[str] = "uncited"

    class Nameless(SnapKV):
        pass

    assert Cited(budget=64).paper is mine and mine.url is None and mine.cited == "Doe and Roe 2030"
    assert Uncited.paper is None and Nameless.paper is PAPERS["snapkv"] and kvlab.Policy.paper is None
    assert sources(mine) == ["A Title."]
    with pytest.raises(KvlabError, match=r"Wrong: paper is '2404\.14469'"):

        class Wrong(SnapKV):
            name = "wrong"
            paper = "2404.14469"


@pytest.mark.parametrize(
    "given", [dict(arxiv="2404.14469v2"), dict(arxiv="arXiv:2404.14469"), dict(code="github.com/me/mine")]
)
def test_ids_and_addresses_of_another_form_are_refused(given):
    with pytest.raises(KvlabError, match=re.escape(next(iter(given.values())))):
        Paper("A Title", "Doe et al.", 2024, **given)
