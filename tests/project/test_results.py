"""The results in README and in docs/disagreements.md are those of the kept ledgers."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from support.paths import ROOT

from kvlab.workbench.report import snapshots
from kvlab.workbench.report.ledger_models import subjects

SCRIPT = ROOT / "docs" / "site" / "results.py"


@pytest.fixture(scope="module")
def results():
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script that is run
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
