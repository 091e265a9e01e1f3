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
        "README.md",
        "Pseudo-queries with nonsense at the right position (DC & SP) come closer to the true queries than the right "
        "words at the wrong position (SC & DP): on a 135M model as on the paper's 8B.",
    ): {"dapq.table1.dc_sp": {"smollm2": HELD}},
    (
        "README.md",
        "On all four the prompt's mean query, which says nothing, comes closer than random words do.",
    ): {"dapq.table1.beyond_the_mean": dict.fromkeys(SHORT, (FAILS,))},
    (
        "README.md",
        "On SmolLM2 attention to the whole response finds fewer than half of the costly entries under each of the five "
        "papers' systems (ZSMerge without merging).",
    ): {
        f"{paper}.why_it_fails.attention": {"smollm2": [HOLDS]}
        for paper in ("compilerkv", "dapq", "morphkv", "rocketkv", "zsmerge")
    },
    (
        "README.md",
        "By the full profile on SmolLM2, after 4,000 tokens, CompilerKV decodes 49 % faster than transformers' full "
        "cache (36 to 63). RocketKV is 19 % faster (8 to 30), and ZSMerge 17 % (13 to 22).",
    ): {
        claim: {"smollm2": HELD}
        for claim in ("compilerkv.tableA1.speed", "rocketkv.figure5.speedup", "zsmerge.figure3.speedup")
    },
    (
        "README.md",
        "At 1 % of the cache MorphKV's lead over SnapKV at equal bytes is mostly one of storage.",
    ): {"morphkv.figure10.mass_lost_1": EVERY_MODEL},
    (
        "README.md",
        "With as many entries for each KV head, MorphKV leads on SmolLM2 alone. The 0.5B and Gemma are undecided, "
        "and on the 1.5B SnapKV leads",
    ): {"morphkv.figure10.same_entries": ENTRIES},
}
"""Sentences on results, word by word, and the rows that they are no broader than."""

MEASURED_ELSEWHERE = {
    "On the three other kept models the lead is less than half of this one.": "test_the_lead_on_other_models",
    "By the quick profile, after 1,600 tokens (125 entries, one thread, by oneDNN), CompilerKV is faster, ZSMerge is "
    "slower, and RocketKV is undecided.": "test_timings_of_the_quick_profile",
    "By these MorphKV is clearly ahead of SnapKV in 6 of 44 printed scores, clearly behind in 2, and undecided in 36": (
        "test_table_3_by_the_authors_answers"
    ),
    "On SmolLM2 some of the most quoted findings flip with other seeds and other texts": "test_some_findings_flip",
    "On Qwen2.5-Coder 0.5B, with 512 entries, SnapKV then finds 15 of 15 needles, and 5 where the question comes "
    "later;": "test_needles_before_and_after_the_question",
    # No ledger keeps these; the page says so below.
    "At the same bytes the best evictor loses more, by the error of the attention output (expected attention, by "
    "0.010, 0.004 to 0.016) and by KL (KVzip, which reads the prompt twice, by 0.024, 0.014 to 0.034).": None,
    "In 2 bits, and in fp8, eviction has the smaller error (by 0.238, 0.232 to 0.243, and by 0.035, 0.028 to 0.042).": (
        None
    ),
    "And *both*: at 10, 15 and 25 % of the bytes all six evictors have a smaller error when more entries are kept in 4 "
    "or 8 bits than fewer as they are.": None,
}
"""Sentences of README on results whose numbers another kept file holds, and the test that reads it; None for none."""

NO_RESULT = (
    "DapQ says that a query's position matters more than its content.",
    "Every policy at every budget is then *replayed*",
    "The paper's SnapKV stores a set for each query head, and so holds a fraction of MorphKV's entries.",
    "Some policies look at more than the last 32 queries:",
    "Long prompts need little memory besides the model and its cache:",
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


def sentences() -> list[str]:
    """The typed sentences of README, without code, tables, pictures and generated parts."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    page = re.sub(r"```.*?```|<!-- generated.*?<!-- end -->", "", page, flags=re.DOTALL)
    page = "\n".join("" if line.startswith(("|", "!", "#")) else line for line in page.splitlines())
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n|\n(?=\* )", page)]
    return [each for paragraph in paragraphs for each in re.split(r"(?<=[.?!:;)])\s+(?=[A-Z(*`\[])", paragraph)]


def test_every_sentence_on_results_in_readme_names_what_it_rests_on():
    joined = " ".join([*(words for page, words in RESTS_ON if page == "README.md"), *MEASURED_ELSEWHERE])
    found = [each for each in sentences() if SUBJECTS.search(each) and COMPARES.search(each)]
    assert len(found) > 12
    for sentence in found:
        plain = re.sub(r"\s*\(\[[^\]]*\]\([^)]*\).*$", "", sentence).strip("* ")
        rests = plain in joined or any(words in sentence for words in MEASURED_ELSEWHERE)
        assert rests or plain.startswith(NO_RESULT), f"name the claims that this rests on: {sentence}"


def test_sentences_measured_elsewhere_stand_there_and_have_a_test():
    page = text(ROOT / "README.md")
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


@pytest.mark.parametrize(
    ("words", "claim", "unit"),
    [
        ("the full one has {value:.2f} for the paper's 0.72", "dapq.table1.dc_sp", 1),
        (
            "{value:.0f} % faster than transformers' full cache ({low:.0f} to {high:.0f})",
            "compilerkv.tableA1.speed",
            100,
        ),
        ("RocketKV is {value:.0f} % faster ({low:.0f} to {high:.0f})", "rocketkv.figure5.speedup", 100),
        ("ZSMerge {value:.0f} % ({low:.0f} to {high:.0f})", "zsmerge.figure3.speedup", 100),
    ],
)
def test_readme_quotes_what_the_full_profile_keeps_of_smollm2(words, claim, unit):
    verdict = kept(claim, profile="full")
    numbers = {name: unit * getattr(verdict, name) for name in ("value", "low", "high")}
    assert words.format(**numbers) in text(ROOT / "README.md")


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


def test_timings_of_the_quick_profile():
    expected = {"compilerkv.tableA1.speed": HELD, "zsmerge.figure3.speedup": [FAILS]}
    expected["rocketkv.figure5.speedup"] = [UNDECIDED]
    for claim, allowed in expected.items():
        assert kept(claim, profile="quick").verdict in allowed, claim
    assert kept("zsmerge.figure3.speedup", profile="quick").high < 0


def test_table_3_by_the_authors_answers():
    ahead, not_behind = (kept(f"morphkv.table3.{name}").value for name in ("clearly_higher", "not_behind"))
    assert (44 * ahead, 44 * (1 - not_behind)) == pytest.approx((6, 2))


def test_some_findings_flip():
    frame = pandas.read_csv(ROOT / "docs" / "ledger" / "stability" / "smollm2-135m.csv")
    states = frame.groupby("claim")["verdict"].nunique()
    assert 0 < (states > 1).sum() < len(states), "some"


def test_needles_before_and_after_the_question():
    names = ("SnapKV", "RocketKV", "DapQ", "ZSMerge", "MorphKV", "KVzip")
    start = text(ROOT / "README.md").partition("Most published scores compress")[2]
    told = re.findall(rf"({'|'.join(names)})(?: then finds|, which asks nothing,)? (\d+)[^;,.]*?,? and (\d+)", start)
    texts = [("0.5b", "sotu/1962"), ("0.5b", "squad/Immune_system"), ("1.5b", "sotu/1962")]
    assert [name for name, *_ in told] == [*names] * len(texts)
    for (short, document), six in zip(texts, (told[:6], told[6:12], told[12:]), strict=True):
        frame = pandas.read_csv(ROOT / "docs" / "ledger" / "tasks" / f"{SHORT[short]}.csv")
        chosen = frame[(frame["task"] == "needle") & (frame["budget"] == 512)]
        chosen = chosen[chosen["settings"].str.contains(f"document='{document}'", regex=False)]
        scores = chosen.set_index(["policy", "compress_at"])["score"]
        for name, first, later in six:
            found = [15 * scores[name.lower(), moment] for moment in ("prompt", "context")]
            assert found == pytest.approx([int(first), int(later)], abs=1e-3), (short, document, name)
