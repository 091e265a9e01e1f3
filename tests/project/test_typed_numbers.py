"""Typed reasoning on results holds no number that a run could change: `make results` writes those into tables."""

from __future__ import annotations

import csv
import re
import sys

import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import claim_tables

from kvlab import papers
from kvlab.workbench.report import snapshots
from kvlab.workbench.report.ledger_models import subjects

KEPT = ROOT / "docs" / "ledger"
PAPERS = sorted((ROOT / "docs" / "disagreements").glob("*.md"))
PAGES = [ROOT / "docs" / "disagreements.md", *PAPERS]

PLACE = r"(?:[Tt]able|[Ff]igure|[Ss]ection|[Aa]ppendix|[Ee]quation|[Aa]lgorithm|[Tt]heorem)s? (?:[A-Z]\.?)?\d[\w.]*"
CITES = re.compile(
    rf"{PLACE}|\bprint(?:s|ed)?\b|\bthe paper's\b|\bthe authors'|\bThe (?:paper|authors)'s?|introduction's"
)
"""A sentence that says where a paper or its authors have a number."""
RESULT = re.compile(
    r"\d\s?%|\b\d+\.\d+\b|\b\d+e-\d|\b(?:\d+|one|two|three|four|five|six) of (?:\d+|ten|twelve|fifteen|twenty|thirty)\b"
)
"""A share, a decimal number, or a count of several: as results are."""
INTERVAL = re.compile(r"\([^()]*-?\d[\d.]* to -?\d[\d.]*[^()]*\)")
NO_RESULT = re.compile(
    r"95 % interval|"  # what all intervals are
    r"\"[^\"]*\"|"  # a paper's own words
    r"\b\d+(?:\.\d+)?[BMK]\b|\b(?:Qwen|Llama|LLaMA|SmolLM|Gemma|Phi)[-\w.]*"  # a model's name or size
)


def typed(text: str) -> list[str]:
    """The typed sentences of a page, and the lines of its typed tables, each with the table's head."""
    text = re.sub(r"```.*?```", "", claim_tables.MADE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"^!\[.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "NAME", text))
    found, head, paragraph = [], "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            head = head or line
            found.append(f"{head} {line}")
        elif line.strip() and not re.match(r"#|\* ", line):
            paragraph.append(line)
        else:
            head = ""
            found += re.split(r"(?<=[.?!])[*\"]*\s+(?=[A-Z*\"(])", " ".join(paragraph))
            paragraph = [line] if line.startswith("* ") else []
    return [" ".join(each.split()) for each in found if each.strip()]


def offends(sentence: str) -> bool:
    """Whether it types a number like a result's without saying where a paper has it, or an interval."""
    numbers = NO_RESULT.sub("", sentence)
    return bool(INTERVAL.search(numbers) or (RESULT.search(re.sub(PLACE, "", numbers)) and not CITES.search(sentence)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_typed_sentence_holds_no_number_that_a_run_could_change(page):
    sentences = typed(page.read_text(encoding="utf-8"))
    assert len(sentences) > 1  # the page of a new paper may be as short as two
    assert not [sentence for sentence in sentences if offends(sentence)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "docs" / "results.md"], ids=lambda page: page.stem)
def test_a_typed_sentence_gives_no_verdict_of_a_model(page):
    """The tables give it."""
    model = re.compile(r"SmolLM2|[Gg]emma|\b[01]\.5B\b|(?:all|every|each|four) models?\b")
    verdict = re.compile(r"\b(?:holds?|held|fails?|failed|undecided)\b")
    wrong = [each for each in typed(page.read_text(encoding="utf-8")) if model.search(each) and verdict.search(each)]
    assert not wrong


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("RocketKV keeps 88 % of the digits.", True),
        ("The error is 0.35 on the 0.5B.", True),
        ("DapQ finds 14 of 15 needles.", True),
        ("ZSMerge loses four of fifteen.", True),
        ("Table 2 agrees with ours (0.31 to 0.39).", True),
        ("Section 3.1 asks for the offset.", False),
        ("Table 2 prints a loss of 3.5 points.", False),
        ("By the authors' logs it is 56 %.", False),
        ('"82 % less" is too much.', False),
        ("Qwen2.5-Coder 0.5B reads 16,000 tokens.", False),
        ("| the paper prints | entries | | 0.29 | 100 |", False),
        ("| removed | entries | | 0.29 | 100 |", True),
    ],
)
def test_what_counts_as_a_typed_result(sentence, wrong):
    assert offends(sentence) is wrong


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.stem)
def test_every_claim_that_a_section_names_stands_in_its_table(page):
    """Else a reader finds no number of it on the page."""
    text = page.read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| `(\w+\.[\w.]+)`<br>", text, re.MULTILINE))
    prose = claim_tables.MADE.sub("", text)
    known = [claim.id for claim in papers.claims()]
    for name in re.findall(rf"`({page.stem}\.[\w.]+\*?)`", prose):
        stands = [claim for claim in known if claim == name or (name.endswith("*") and claim.startswith(name[:-1]))]
        assert stands and set(stands) <= shown, name


@pytest.mark.parametrize(
    ("page", "claim", "model"),
    [
        ("dapq", "dapq.table9.task_over_snapkv", "smollm2-135m"),
        ("rocketkv", "rocketkv.section4_2.longer_is_wider", "qwen2.5-coder-0.5b"),
        ("zsmerge", "zsmerge.figure5.window_large", "qwen2.5-coder-1.5b"),
        ("morphkv", "morphkv.figure10.same_entries", "gemma-3-270m"),
        ("compilerkv", "compilerkv.table1.task_filled_over_snapkv", "qwen2.5-coder-0.5b"),
    ],
)
def test_a_cell_is_the_line_of_the_kept_file(page, claim, model):
    """Read by another reader than the one that fills the tables."""
    with (KEPT / f"{model}.csv").open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["claim"] == claim and line["value"]]
    line = min(lines, key=lambda line: line["profile"] != "full")
    text = (ROOT / "docs" / "disagreements" / f"{page}.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")] for row in text.splitlines() if row.startswith("|")]
    head = next(row for row in rows if model in row)
    (cell,) = (row[head.index(model)] for row in rows if row[1].startswith(f"`{claim}`<br>"))
    shown = [float(each) for each in re.findall(r"-?\d+\.?\d*", cell.partition("<br>")[2].replace("−", "-"))]
    assert shown == pytest.approx([float(line[name]) for name in ("value", "low", "high")], abs=6e-4, rel=1e-3)


def test_a_weak_stand_in_does_not_change_what_the_numbers_say():
    """The sentence is of the interval; the cell says that its measure is weak."""
    claims = {claim.id: claim for claim in papers.claims()}
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAPERS)
    weak = r"^\| `([\w.]+)`<br>(?:\*[\w ]+\.\* )?([^|]*) \| undecided \(fails by a weak stand-in\)†?<br>"
    rows = re.findall(weak, text, re.MULTILINE)
    assert rows
    for name, said in rows:
        phrases = claims[name].phrases
        assert phrases and said.startswith((phrases.met.rstrip("."), phrases.missed.rstrip("."))), name


def test_a_value_stands_inside_a_sentence():
    every = snapshots.kept(KEPT)
    order = subjects(every)
    text = "It is <!-- value dapq.table1.dc_sp smollm2-135m -->1<!-- end --> here."
    (entry,) = (one for one in every if one.claim.id == "dapq.table1.dc_sp" and one.model.startswith("smollm2"))
    filled = claim_tables.fill(text, every, order)
    assert f"-->{entry.verdict.value:.3f} (" in filled and filled.endswith(")<!-- end --> here.")
    assert claim_tables.fill(filled, every, order) == filled
    with pytest.raises(KeyError):
        claim_tables.fill(text.replace("smollm2-135m", "none"), every, order)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_begins_with_a_value(page):
    """Markdown ends a paragraph before a line that begins with a comment."""
    assert not re.search(r"^\s*<!-- value", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_a_table_has_the_claims_named_since_the_last_heading_or_table():
    known = ["a.one", "a.two", "a.three", "b.one"]
    text = "`a.one`\n## Next\n`a.t*` and `a.two`, `b.none` <!-- claims -->\n| `b.one` |\n<!-- end -->"
    assert claim_tables.named(text.partition("<!--")[0], known) == ["a.two", "a.three"]
    assert claim_tables.named(text + " `b.one`", known) == ["b.one"]
