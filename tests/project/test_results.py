"""The results in README and in docs/ are those of the kept ledgers, and README stays short."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import claim_tables

from kvlab import papers
from kvlab.workbench.report import snapshots
from kvlab.workbench.report.ledger_models import subjects

SCRIPT = ROOT / "docs" / "site" / "results.py"
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
CODE = re.compile(r"```.*?```", re.DOTALL)
LONGEST, WIDEST = 130, 80
# Names, versions, dates and addresses have digits that no run can change.
NAMES = re.compile(
    r"SmolLM2|(?:Qwen|Phi-|OLMo |Llama |Gemma )\d(?:\.\d)?|\d+(?:\.\d+)?[MB]\b|Python 3\.\d+|Apache-2\.0|"
    r"\d+ [A-Z][a-z]+ 20\d\d|`[^`\n]*`|\]\([^)]*\)|https?://\S+"
)


@pytest.fixture(scope="module")
def results():
    spec = importlib.util.spec_from_file_location("results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(results):
    return results.pages()


def test_the_pages_show_what_make_results_writes(results, pages):
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not of today's ledgers: make results"
    shown = [name for text in pages.values() for name in re.findall(r"<!-- generated: (\w+) -->", text)]
    assert sorted(shown) == sorted(results.parts())


def typed(page) -> str:
    """A page without its code and its generated parts."""
    return CODE.sub("", claim_tables.MADE.sub("", page.read_text(encoding="utf-8")))


def test_readme_is_read_in_a_minute():
    """Tables, and pictures with their links, are on one line each whatever their length."""
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST
    assert not [line for line in typed(README).splitlines() if len(line) > WIDEST and not line.startswith(("|", "["))]


@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda page: page.name)
def test_a_typed_sentence_has_no_number_that_a_run_could_change(page):
    assert not re.findall(r".*\d.*", NAMES.sub("", typed(page)))


@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda page: page.name)
def test_no_typed_sentence_compares_methods(page):
    """Tables do, with intervals."""
    sentences = re.split(r"(?<=[.?:])\s", " ".join(typed(page).split()))
    methods, verbs = r"\b(?:\w+KV|DapQ|ZSMerge|H2O|evict\w+)\b", r"\b(?:than|ahead|behind|loses?|finds?|beats?|leads)\b"
    compares = [each for each in sentences if re.search(f"{methods}.*{verbs}", each)]
    assert [each for each in compares if " says that " not in each] == []


def test_readme_says_one_thing_of_each_paper_and_leads_to_its_page():
    (part,) = (
        part for part in claim_tables.MADE.findall(README.read_text(encoding="utf-8")) if "generated: papers" in part
    )
    _, _, *rows = [line for line in part.splitlines() if line.startswith("|")]
    models = len(subjects(snapshots.kept(ROOT / "docs" / "ledger")))
    for paper, row in zip(papers.papers(), rows, strict=True):
        assert f"[{paper.label}](docs/disagreements/{paper.name}.md)" in row and paper.source.url in row
        assert (paper.source.code or "no public code") in row
        *_, sentence, _ = (cell.strip() for cell in row.split("|"))
        assert sentence.endswith(".") and re.search(r"\d", sentence)
        counts = [int(cell) for cell in row.split("|")[2:-2]]
        assert sum(counts) == models * len(paper.quoted)


def test_the_page_on_disagreements_names_the_models_that_are_kept(pages):
    text = pages[ROOT / "docs" / "disagreements.md"]
    kept = {subject.label for subject in subjects(snapshots.kept(ROOT / "docs" / "ledger"))}
    assert kept == set(re.findall(r"^\| `([^`]+)` \| [^|]+ \| [\d, a-z]+ \| \d+, \d \|", text, re.MULTILINE))


def test_a_number_that_was_changed_by_hand_is_written_anew(results, pages, tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text("Before.\n<!-- generated: across -->\n| 1 |\n<!-- end -->\nAfter.\n", encoding="utf-8")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "PAGES", ("README.md",))
    results.main()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n<!-- generated: across -->\n\n| findings that several models measured | ")
    assert text.endswith("|\n\n<!-- end -->\nAfter.\n") and "| 1 |\n<" not in text
