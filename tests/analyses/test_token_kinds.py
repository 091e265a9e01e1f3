"""Kinds of tokens, on written examples."""

from __future__ import annotations

import pytest

from kvlab.analyses.texts import SUMMARISE
from kvlab.analyses.why_it_fails import token_kinds
from kvlab.analyses.why_it_fails.token_kinds import (
    NAME,
    NUMBER,
    PUNCTUATION,
    REQUEST,
    SENTENCE_END,
    WORD,
    kinds,
)


def test_a_written_example():
    expected = {
        "<|im_start|>": REQUEST,
        "The": WORD,
        " winner": WORD,
        " of": WORD,
        " ": PUNCTUATION,
        "1": NUMBER,
        "9": NUMBER,
        ",": PUNCTUATION,
        " Ray": NAME,
        "burn": NAME,
        " said": WORD,
        ".": SENTENCE_END,
        " They": WORD,
        " met": WORD,
        " McC": NAME,
        "orm": NAME,
        "ack": NAME,
        "?": SENTENCE_END,
        "<|im_end|>": REQUEST,
    }
    assert dict(zip(expected, kinds(list(expected), (1, 1)), strict=True)) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # A quote that ends a sentence belongs to its end; one that opens a sentence leaves it to the next word.
        (["Go", '."', ' "', "We", " go"], [WORD, SENTENCE_END, PUNCTUATION, WORD, WORD]),
        (["so", "\n\n", "We", " saw", " Oxford"], [WORD, SENTENCE_END, WORD, WORD, NAME]),
        (["so", ":", " We", " saw"], [WORD, PUNCTUATION, WORD, WORD]),
        (["so", ",", " We", " saw"], [WORD, PUNCTUATION, NAME, WORD]),
        (["and", " I", " say", " I", "owa"], [WORD, WORD, WORD, NAME, NAME]),
        (["in", " B", "1", "7", " Jets"], [WORD, NAME, NUMBER, NUMBER, NAME]),
        # The second token of a cut character has no text.
        (["an", " §", "", " Act"], [WORD, PUNCTUATION, PUNCTUATION, NAME]),
        ([], []),
    ],
)
def test_special_cases(tokens, expected):
    assert kinds(tokens) == expected


def test_what_stands_around_a_text_is_the_template_with_the_request(lm):
    head, tail = token_kinds.around(lm)
    for text in ("One more time.", "Two!", "42 is the answer"):
        ids = lm.encode(text + SUMMARISE)[0]
        inner = lm.decode(ids[head : len(ids) - tail])
        assert inner.strip() == text
