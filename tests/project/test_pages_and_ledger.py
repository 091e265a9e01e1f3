"""Typed sentences on results say no more than the kept ledgers: each is joined to the claims that it rests on.

Generated parts of pages are compared with the ledgers by `test_results.py`.
"""

from __future__ import annotations

import re

import pandas
import pytest
from support.paths import ROOT

from kvlab.papers import DIRECTION, FAILS, HOLDS, UNDECIDED, UNMEASURED
from kvlab.workbench.report import snapshots

SHORT = {
    "smollm2": "smollm2-135m",
    "gemma": "gemma-3-270m",
    "0.5b": "qwen2.5-coder-0.5b",
    "1.5b": "qwen2.5-coder-1.5b",
}
HELD = (HOLDS, DIRECTION)

ENTRIES = {"smollm2": HELD, "0.5b": [UNDECIDED], "gemma": [UNDECIDED], "1.5b": [FAILS]}
EVERY_MODEL = dict.fromkeys(SHORT, HELD)
RESTS_ON = {
    # (page, sentence): {claim: {model: the states that the sentence allows}}
    (
        "docs/results.md",
        "On SmolLM2 nonsense at the right position comes closer to the true queries than the right words at a wrong "
        "position.",
    ): {"dapq.table1.dc_sp": {"smollm2": HELD}},
    (
        "docs/results.md",
        "On every kept model the prompt's mean query comes closer than random words do.",
    ): {"dapq.table1.beyond_the_mean": dict.fromkeys(SHORT, (FAILS,))},
    (
        "docs/results.md",
        "On SmolLM2 attention finds fewer than half of the costly entries under each of the five papers' systems.",
    ): {
        f"{paper}.why_it_fails.attention": {"smollm2": [HOLDS]}
        for paper in ("compilerkv", "dapq", "morphkv", "rocketkv", "zsmerge")
    },
    (
        "docs/results.md",
        "With a hundredth of the cache MorphKV's lead over SnapKV at equal bytes is mostly one of storage.",
    ): {"morphkv.figure10.mass_lost_1": EVERY_MODEL},
    (
        "docs/results.md",
        "With as many entries for each KV head MorphKV leads on SmolLM2 alone. The 0.5B and Gemma are undecided, and "
        "SnapKV leads on the 1.5B.",
    ): {"morphkv.figure10.same_entries": ENTRIES},
}
"""Sentences on results, word by word, and the rows that they are no broader than."""

MEASURED_ELSEWHERE = {
    "On the other kept models this lead is less than half as large.": "test_the_lead_on_other_models",
    "On SmolLM2 some of the most quoted findings flip with other seeds and other texts.": "test_some_findings_flip",
    "On Qwen2.5-Coder 0.5B SnapKV, DapQ, ZSMerge and MorphKV then lose a third of their needles or more.": (
        "test_needles_before_and_after_the_question"
    ),
    "KVzip finds no fewer.": "test_needles_before_and_after_the_question",
    # No ledger keeps these; the page says so below.
    "In four bits the full cache loses less than every evictor at the same bytes.": None,
    "In two bits, and in `fp8`, eviction has the smaller error.": None,
    "At equal bytes every evictor has a smaller error when it keeps more entries in four or eight bits.": None,
}
"""Sentences on results whose numbers another kept file holds, and the test that reads it; None for none."""

NO_RESULT = (
    "DapQ says that a query's position matters more than its content.",
    "Many findings hold *in direction only*,",
)
"""How sentences begin that compare, and tell of no measurement."""

SUBJECTS = re.compile(
    r"CompilerKV|DapQ|MorphKV|RocketKV|ZSMerge|SnapKV|KVzip|H2O|evict(?:or|ion)|polic(?:y|ies)|models?\b|SmolLM2|Qwen|"
    r"[01]\.5B|Gemma|[Aa]ttention|all four|findings"
)
COMPARES = re.compile(
    r"closer|\bleads?\b(?! to)|ahead|behind|is undecided|are undecided|smaller|larger|faster|slower|as fast|fewer|"
    r"more than|\bfinds\b|\bloses?\b|\bflip|fraction|less than|better|worse|mostly"
)


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, str]]:
    """Claim -> model -> the verdict of its two tests, where it was measured; sentences are about measures."""
    found: dict[str, dict[str, str]] = {}
    for entry in snapshots.kept(ROOT / "docs" / "ledger"):
        if entry.measured:
            found.setdefault(entry.claim.id, {})[entry.model.partition("@")[0]] = entry.verdict.verdict
    return found


def text(page) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("place", "rows"), RESTS_ON.items(), ids=lambda each: each[0] if isinstance(each, tuple) else ""
)
def test_a_sentence_is_no_broader_than_its_rows(place, rows, states):
    page, sentence = place
    assert sentence in text(ROOT / page), "change the sentence here as well, and ask whether its rows still say it"
    for claim, allowed in rows.items():
        found = {short: states[claim].get(SHORT[short], UNMEASURED) for short in allowed}
        assert all(found[short] in allowed[short] for short in allowed), found


RESULTS = (ROOT / "README.md", ROOT / "docs" / "results.md")


def sentences() -> list[str]:
    """The typed sentences of README and the page of results, without code, tables, pictures and generated parts."""
    page = "\n\n".join(path.read_text(encoding="utf-8") for path in RESULTS)
    page = re.sub(r"```.*?```|<!-- generated.*?<!-- end -->", "", page, flags=re.DOTALL)
    page = "\n".join("" if line.startswith(("|", "!", "#")) else line for line in page.splitlines())
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n|\n(?=\* )", page)]
    return [each for paragraph in paragraphs for each in re.split(r"(?<=[.?!:;)])\s+(?=[A-Z(*`\[])", paragraph)]


def test_every_typed_sentence_on_results_names_what_it_rests_on():
    joined = " ".join([*(words for page, words in RESTS_ON if page == "docs/results.md"), *MEASURED_ELSEWHERE])
    found = [each for each in sentences() if SUBJECTS.search(each) and COMPARES.search(each)]
    assert len(found) > 9
    for sentence in found:
        plain = re.sub(r"\s*\(\[[^\]]*\]\([^)]*\).*$", "", sentence).strip("* ")
        rests = plain in joined or any(words in sentence for words in MEASURED_ELSEWHERE)
        assert rests or plain.startswith(NO_RESULT), f"name the claims that this rests on: {sentence}"


def test_sentences_measured_elsewhere_stand_there_and_have_a_test():
    page = text(ROOT / "docs" / "results.md")
    for sentence, test in MEASURED_ELSEWHERE.items():
        assert sentence in page and (test is None or callable(globals()[test])), sentence
    assert "No ledger keeps its numbers." in page


@pytest.mark.parametrize(
    ("place", "rows"), RESTS_ON.items(), ids=lambda each: each[0] if isinstance(each, tuple) else ""
)
def test_a_sentence_speaks_of_no_model_without_a_row(place, rows, states):
    """One that names models needs a row for each; one that names none speaks of all that are kept."""
    words = place[1].lower().replace("135m", "smollm2")
    named = {short for short in SHORT if short in words}
    for claim, allowed in rows.items():
        measured = {short for short, model in SHORT.items() if model in states[claim]}
        assert (named or measured) <= set(allowed), claim
        assert {short for short in allowed if UNMEASURED not in allowed[short]} <= measured, claim


def kept(claim: str, model: str = "smollm2", profile: str | None = None):
    """The verdict on a claim in the kept ledger."""
    path = ROOT / "docs" / "ledger" / f"{SHORT[model]}.csv"
    return next(entry.verdict for entry in snapshots.read(path, profile) if entry.claim.id == claim)


def test_the_lead_on_other_models():
    """The ratio of similarities, at the right position over the right content, less 1."""
    leads = {short: kept("dapq.section3_1.ratio", short).value - 1 for short in SHORT}
    first = kept("dapq.section3_1.ratio", profile="quick").value - 1  # the figure's profile
    assert all(0 < lead < min(first, leads["smollm2"]) / 2 for short, lead in leads.items() if short != "smollm2"), (
        leads
    )


def test_the_lead_of_morphkv_is_mostly_one_of_storage():
    for short in SHORT:
        bytes_, entries = (kept(f"morphkv.figure10.{name}", short) for name in ("mass_lost_1", "same_entries"))
        assert entries.value < bytes_.value / 2, short


def test_table_3_by_the_authors_answers():
    ahead, not_behind = (kept(f"morphkv.table3.{name}").value for name in ("clearly_higher", "not_behind"))
    assert (44 * ahead, 44 * (1 - not_behind)) == pytest.approx((6, 2))


def test_some_findings_flip():
    frame = pandas.read_csv(ROOT / "docs" / "ledger" / "stability" / "smollm2-135m.csv")
    states = frame.groupby("claim")["verdict"].nunique()
    assert 0 < (states > 1).sum() < len(states), "some"


def test_needles_before_and_after_the_question():
    frame = pandas.read_csv(ROOT / "docs" / "ledger" / "tasks" / "qwen2.5-coder-0.5b.csv")
    chosen = frame[(frame["task"] == "needle") & (frame["budget"] == 512)]
    chosen = chosen[chosen["settings"].str.contains("document='sotu/1962'", regex=False)]
    scores = chosen.set_index(["policy", "compress_at"])["score"]
    for name in ("snapkv", "dapq", "zsmerge", "morphkv"):
        assert scores[name, "context"] <= scores[name, "prompt"] * 2 / 3, name
    assert scores["kvzip", "context"] >= scores["kvzip", "prompt"]
