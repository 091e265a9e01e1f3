"""What tests of told figures share: made-up findings, and the checks of what is told."""

from __future__ import annotations

import re

import pandas

from kvlab.analyses.findings import Findings


def around(value, width=0.01):
    """A value, and an interval that reaches `width` to either side."""
    return value, (value - width, value + width)


def findings_of(effects: dict, table: pandas.DataFrame) -> Findings:
    """Findings of made-up values: by effect, a list of (value, keys); each interval reaches 0.02 to either side."""
    findings = Findings(table)
    for effect, rows in effects.items():
        for value, keys in rows:
            findings.set(effect, *around(value, 0.02), **keys)
    return findings


def counted(sentences: list[str]) -> list[str]:
    """The sentences that a reader counts, however they were put into the list; each begins and ends as one does."""
    text = " ".join(sentence for sentence in sentences if sentence)
    # An equation's number goes on after its full stop.
    found = re.split(r"(?<=[.?]) (?=\S)(?<!\beq\. )", text)
    assert all(re.fullmatch(r"\S.*\.", sentence) and "  " not in sentence for sentence in found), found
    return found


def told(sentences: list[str]) -> str:
    """As one paragraph, which has the length of a story: two to four sentences."""
    assert 2 <= len(counted(sentences)) <= 4, sentences
    return " ".join(sentence for sentence in sentences if sentence)


def unmeasured(sentences: list[str]) -> str:
    """The one sentence of a figure whose numbers were not measured."""
    (sentence,) = counted(sentences)
    return sentence


def whole(sentences: list[str]) -> str:
    """As one text; each sentence has its end."""
    assert all(sentence == "" or sentence.rstrip()[-1] in ".?" for sentence in sentences)
    return " ".join(sentences)


def short(sentences: list[str]) -> str:
    """As one text, which must be short and whole."""
    assert 2 <= len(sentences) <= 4 and all(sentence.endswith(".") for sentence in sentences)
    return " ".join(sentences)


def paragraph(sentences, most: int) -> str:
    """As one paragraph; each sentence begins and ends as one does."""
    sentences = [sentence for sentence in sentences if sentence]
    assert 1 <= len(sentences) <= most
    assert all(sentence[0].isupper() and sentence.endswith(".") and "  " not in sentence for sentence in sentences)
    return " ".join(sentences)
