"""What tests of told figures share: made-up findings, and the checks of what is told."""

from __future__ import annotations

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
