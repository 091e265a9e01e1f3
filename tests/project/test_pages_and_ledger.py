"""Typed sentences on results say no more than the kept ledgers: each is joined to the claims that it rests on.

Generated parts of pages are held to the ledgers by `test_results.py`.
"""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

from kvlab.papers import DIRECTION, FAILS, HOLDS, UNDECIDED
from kvlab.workbench.report import snapshots

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "disagreements").glob("*.md")),
]
SHORT = {
    "smollm2": "smollm2-135m",
    "gemma": "gemma-3-270m",
    "0.5b": "qwen2.5-coder-0.5b",
    "1.5b": "qwen2.5-coder-1.5b",
}
HELD = (HOLDS, DIRECTION)
SAID = {"holds": HELD, "fails": (FAILS,)}

RESTS_ON = {
    # (page, sentence): {claim: {model: the states that the sentence allows}}
    (
        "README.md",
        "With as many entries for each KV head, MorphKV leads on SmolLM2 alone. The 0.5B and Gemma are undecided, "
        "and on the 1.5B SnapKV leads",
    ): {"morphkv.figure10.same_entries": {"smollm2": HELD, "0.5b": [UNDECIDED], "gemma": [UNDECIDED], "1.5b": [FAILS]}},
    (
        "docs/disagreements/morphkv.md",
        "At 1 % of the cache MorphKV then keeps a smaller lead on SmolLM2. The 0.5B and Gemma are undecided, and on "
        "the 1.5B MorphKV loses more attention than SnapKV.",
    ): {"morphkv.figure10.same_entries": {"smollm2": HELD, "0.5b": [UNDECIDED], "gemma": [UNDECIDED], "1.5b": [FAILS]}},
}
"""Sentences that name models, word by word, and the rows that they are no broader than."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_verdict_that_a_page_types_is_that_of_every_model(page, states):
    """``(`paper.claim`, which fails)`` is said of all models that measured the claim."""
    for claim, said in re.findall(r"`(\w+\.[\w.]+)`, which (holds|fails)\b", text(page)):
        wrong = {model: state for model, state in states.get(claim, {}).items() if state not in SAID[said]}
        assert not wrong, f"{claim} {said}, says the page"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_models_that_a_page_calls_undecided_are_all_that_are(page, states):
    """``(`paper.claim`, undecided on gemma)`` leaves the others decided."""
    for claim, named in re.findall(r"`(\w+\.[\w.]+)`, undecided on ([^)]*)\)", text(page)):
        said = {model for short, model in SHORT.items() if short in named.lower()}
        assert said == {model for model, state in states[claim].items() if state == UNDECIDED}, claim


@pytest.mark.parametrize(
    ("place", "rows"), RESTS_ON.items(), ids=lambda each: each[0] if isinstance(each, tuple) else ""
)
def test_a_sentence_is_no_broader_than_its_rows(place, rows, states):
    page, sentence = place
    assert sentence in text(ROOT / page), "change the sentence here as well, and ask whether its rows still say it"
    for claim, allowed in rows.items():
        found = {short: states[claim][SHORT[short]] for short in allowed}
        assert all(found[short] in allowed[short] for short in allowed), found


def test_pages_type_verdicts_at_all():
    typed = [
        match
        for page in PAGES
        for match in re.findall(r"`\w+\.[\w.]+`, (?:which holds|which fails|undecided)", text(page))
    ]
    assert len(typed) > 5
