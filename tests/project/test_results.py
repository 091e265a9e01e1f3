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
from kvlab.workbench.report import page, snapshots
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


def test_readme_says_one_thing_of_each_paper_and_leads_to_its_page(results):
    (part,) = (
        part for part in claim_tables.MADE.findall(README.read_text(encoding="utf-8")) if "generated: papers" in part
    )
    _, _, *rows = [line for line in part.splitlines() if line.startswith("|")]
    models = len(subjects(snapshots.kept(ROOT / "docs" / "ledger")))
    for paper, row in zip(papers.papers(), rows, strict=True):
        assert paper.source, f"{paper.name} has no entry in kvlab/lib/references.py"
        assert f"[{paper.label}](docs/disagreements/{paper.name}.md)" in row and paper.source.url in row
        assert (paper.source.code or "no public code") in row
        *_, sentence, _ = (cell.strip() for cell in row.split("|"))
        assert sentence == results.UNSEEN or (sentence.endswith(".") and re.search(r"\d", sentence))
        counts = [int(cell) for cell in row.split("|")[2:-2]]
        findings = {claim.finding for claim in papers.claims(paper=paper.name) if claim.kind == "finding"}
        assert sum(counts) == models * len(findings.intersection(paper.quoted)), "questions of ours are none of them"


def test_readme_says_of_a_paper_without_a_measured_quotation_that_it_is_not_measured(results):
    every = snapshots.kept(results.KEPT)
    quoted = {claim.id for claim in papers.quoted() if claim.paper == "zsmerge"}
    before, after = every, [entry for entry in every if entry.claim.id not in quoted]
    for entries, unseen in ((before, False), (after, True)):
        (row,) = [row for row in results._papers(entries).splitlines() if row.startswith("| [ZSMerge]")]
        assert row.endswith(f"| {results.UNSEEN} |") is unseen


def test_the_page_on_disagreements_names_the_models_that_are_kept(pages):
    text = pages[ROOT / "docs" / "disagreements.md"]
    kept = {subject.label for subject in subjects(snapshots.kept(ROOT / "docs" / "ledger"))}
    assert kept == set(re.findall(r"^\| `([^`]+)` \| [^|]+ \| [\d, a-z]+ \| \d+, \d \|", text, re.MULTILINE))


@pytest.fixture(scope="module")
def kept():
    """The measured entries of the claims that tables show by model."""
    every = snapshots.kept(ROOT / "docs" / "ledger")
    return [entry for entry in every if entry.measured and entry.claim.kind not in claim_tables.OF_THE_PAPER]


def test_a_page_and_the_report_say_the_same_sentence_of_a_claim_in_every_state(kept):
    seen = set()
    for entry in kept:
        if entry.claim.phrases is None or entry.state == papers.UNMEASURED:
            continue
        seen.add((entry.verdict.verdict, entry.state))
        said = claim_tables.says(entry).removesuffix(f" ({entry.claim.unit})")
        phrase, weak, _ = said.removesuffix(".").partition("; the stand-in is weak")
        report = page.found(entry)
        assert report.startswith(f"{phrase}: ") and report.endswith(f"{weak}."), entry.claim.id
        assert bool(weak) == (entry.state != entry.verdict.verdict) == ("stand-in is weak" in report), entry.claim.id
    tested = {papers.HOLDS, papers.DIRECTION, papers.FAILS, papers.UNDECIDED}
    assert seen == {
        *((verdict, verdict) for verdict in tested),
        (papers.HOLDS, papers.WEAK),
        (papers.DIRECTION, papers.WEAK),
        (papers.FAILS, papers.UNDECIDED),
    }


def test_a_number_without_a_dagger_decides_its_verdict_alone(kept):
    """Where a claim compares its own number with a fixed one, the printed interval shows the side of it."""
    checked = 0
    for entry in kept:
        claim, verdict = entry.claim, entry.verdict
        turns, side = claim.direction.turns(claim.metric), claim.direction.side
        if claim_tables.others_decide(claim) or len(turns) != 1 or not side or verdict.low in (None, verdict.high):
            continue
        assert "†" not in claim_tables.cell(entry)
        if verdict.verdict != papers.UNMEASURED:
            low, high = sorted(side * (end - turns[0][1]) for end in (verdict.low, verdict.high))
            by_interval = "fails" if high < 0 else "holds" if low > 0 else "undecided"
            checked += 1
            assert verdict.verdict.startswith(by_interval), (claim.id, entry.model)
    assert checked > 100


def test_a_dagger_marks_a_number_that_another_one_overrules(kept):
    """DapQ's lead with equal pooling fails by the other of two variants; the shown interval contains the turn."""
    (entry,) = (
        entry
        for entry in kept
        if entry.claim.id == "dapq.section3_3.task_same_pooling_qa" and entry.model.startswith("smollm2")
    )
    assert entry.verdict.low < 0 < entry.verdict.high and entry.state == papers.FAILS
    assert claim_tables.cell(entry).startswith("fails†<br>")
    text = (ROOT / "docs" / "disagreements" / "dapq.md").read_text(encoding="utf-8")
    assert text.count(claim_tables.OTHERS) == sum("†<br>" in part for part in claim_tables.MADE.findall(text)) > 0


def test_below_a_table_stand_the_numbers_that_it_leaves_out_and_why_a_model_lacks_one(kept):
    """RocketKV's split is undecided on Gemma by its gain over one stage; its first stage needs longer prompts there."""
    text = (ROOT / "docs" / "disagreements" / "rocketkv.md").read_text(encoding="utf-8")
    (entry,) = (
        one for one in kept if one.claim.id == "rocketkv.section3_1.complementary" and one.model.startswith("gemma")
    )
    assert entry.state == papers.UNDECIDED and entry.verdict.low > 0, "the number of the table speaks for it"
    low, high = re.search(r"\[(\S+), (\S+)\] of gain/output_error/split0.5_over_split1/c16", entry.verdict.why).groups()
    number = f"`gain/output_error/split0.5_over_split1/c16` from {low} to {high} contains 0"
    assert f"| `{entry.claim.id}` | gemma-3-270m | undecided | {number}<br>" in text
    lacking = re.search(
        r"^\| `rocketkv.figure4.over_snapkv` \| (.*) \| (This model's GQA groups .*) \|$", text, re.MULTILINE
    )
    assert lacking and lacking[1] == "gemma-3-270m and qwen2.5-coder-1.5b"


@pytest.mark.parametrize("paper", papers.papers(), ids=lambda paper: paper.name)
def test_a_papers_page_shows_each_of_its_claims_and_what_measures_it(paper):
    text = (ROOT / "docs" / "disagreements" / f"{paper.name}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)`<br>", text, re.MULTILINE)
    assert {name for name in rows if name.startswith(f"{paper.name}.")} == {claim.id for claim in paper.claims}
    (line,) = re.findall(r"^The experiments (.*) measure this paper's claims\.", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", line)) == {claim.experiment for claim in paper.claims if claim.experiment}


def test_a_number_that_was_changed_by_hand_is_written_anew(results, pages, tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text("Before.\n<!-- generated: across -->\n| 1 |\n<!-- end -->\nAfter.\n", encoding="utf-8")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "PAGES", ("README.md",))
    results.main()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n<!-- generated: across -->\n\n| findings that several models measured | ")
    assert text.endswith("|\n\n<!-- end -->\nAfter.\n") and "| 1 |\n<" not in text


def test_a_row_says_what_is_ours_and_whose_stand_in_nobody_weighed(pages):
    text = pages[ROOT / "docs" / "disagreements" / "zsmerge.md"]
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `zsmerge.") and "`<br>" in row}
    kinds = {claim.id: claim.kind for claim in papers.claims(paper="zsmerge")}
    ours = {name for name, row in rows.items() if "*A question of ours.*" in row}
    assert ours == {name for name in rows if kinds[name] == "question"} != set()
    measured, *others = rows["zsmerge.figure5.decay_best"].split(" | ")[1:]
    assert "‡" not in measured and "fails‡" in others[-1], "the 1.5B has no table of stand-ins"
