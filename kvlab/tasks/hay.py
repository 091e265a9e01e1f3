"""Hay: a document cut into sentences whose tokens are counted once, and needles put between them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.inputs.corpus import Document
from kvlab.inputs.tokens import token_spans
from kvlab.tasks.making import require_tokenizer

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

# The end of a sentence with closing quotes or brackets; not after an initial or a title, not before a small letter.
_END = re.compile(
    r"""(?<!\b[A-Z]\.)(?<!\b(?:Mr|Dr|St|No|vs)\.)(?<!\bMrs\.)(?<=[.!?])["')\]”’]*\s+(?![a-z])"""
    r"|[。！？]+\s*"
)
_SENTENCE_END = ".!?。！？\"')]”’"


def sentences(text: str) -> list[str]:
    """The sentences of a text in order, whitespace collapsed to single spaces.

    A blank line ends a sentence too, but not after a comma, a colon, a semicolon or a dash.
    """
    parts = []
    for paragraph in re.split(r"(?<=[^\s,;:–—-])[ \t]*\n\s*\n", text):
        paragraph, start = " ".join(paragraph.split()), 0
        for end in _END.finditer(paragraph):
            parts.append(paragraph[start : end.end()].strip())
            start = end.end()
        parts.append(paragraph[start:].strip())
    return [sentence for sentence in parts if sentence]


@dataclass(frozen=True)
class Cut:
    """Some hay: its sentences, and the tokens of each, with the separator before it."""

    sentences: tuple[str, ...]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def boundary(self, depth: float) -> int:
        """How many sentences precede the boundary that is nearest to the share `depth` (0 .. 1) of the tokens."""
        target, before, nearest, distance = depth * sum(self.lengths), 0, 0, depth * sum(self.lengths)
        for index, length in enumerate(self.lengths, 1):
            before += length
            if abs(before - target) < distance:
                nearest, distance = index, abs(before - target)
        return nearest

    def depth(self, boundary: int) -> float:
        """The share of the tokens in front of a boundary."""
        return sum(self.lengths[:boundary]) / max(1, sum(self.lengths))

    def with_needles(self, needles: Sequence[str], boundaries: Sequence[int], joint: str = " ") -> str:
        """The text with each needle at its boundary, all joined by `joint`; needles of one boundary stay in order."""
        placed = sorted(zip(boundaries, range(len(needles)), strict=True))
        pieces, start = [], 0
        for boundary, needle in placed:
            pieces += [*self.sentences[start:boundary], needles[needle]]
            start = boundary
        return joint.join([*pieces, *self.sentences[start:]])


class Hay:
    """A document's sentences for one tokenizer. A cut longer than the document starts over at its beginning."""

    def __init__(self, lm: LM, document: Document):
        self.sentences = sentences(document.text)
        self._text = " ".join(self.sentences)
        self._ends = [end for _, end in token_spans(require_tokenizer(lm), self._text)]
        ends, end = [], -1
        for sentence in self.sentences:
            end += 1 + len(sentence)
            ends.append(end)
        self._starts = [0, *(end + 1 for end in ends[:-1])]
        self._cumulative = [0, *(bisect_left(self._ends, end) + 1 for end in ends)]

    def cut(self, start: int, room: int) -> Cut:
        """About `room` tokens from sentence `start` on; the last one is cut after a word and ends with a full stop."""
        chosen, lengths, index = [], [], start % len(self.sentences)
        while room > 0:
            length = self._cumulative[index + 1] - self._cumulative[index]
            if length > room:
                if short := self._shortened(index, room - 1):
                    chosen.append(short)
                    lengths.append(room)
                break
            chosen.append(self.sentences[index])
            lengths.append(length)
            room -= length
            index = (index + 1) % len(self.sentences)
        return Cut(tuple(chosen), tuple(lengths))

    def _shortened(self, index: int, room: int) -> str:
        """The sentence's first words, of at most `room` tokens; empty where not even one fits."""
        if room < 1:
            return ""
        start, end = self._starts[index], self._ends[self._cumulative[index] + room - 1]
        text = self._text[start:end]
        if self._text[end : end + 1] not in ("", " ") and " " in text:
            text = text.rpartition(" ")[0]
        text = text.strip().rstrip(",;:-–—" + _SENTENCE_END)
        return f"{text}." if text else ""
