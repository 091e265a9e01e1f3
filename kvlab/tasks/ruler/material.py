"""The material of RULER's tasks: an essay, noise, needles' keys and values, paragraphs with questions."""

from __future__ import annotations

import functools
import uuid
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from kvlab.inputs import corpus, packs
from kvlab.tasks.hay import Cut, Hay
from kvlab.tasks.making import piece_lengths, require_tokenizer, words

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

# RULER takes these five from Landmark Attention's pass-key test (Mohtashami and Jaggi 2023).
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")


class Material:
    """One model's material; each part is made when it is first asked for."""

    def __init__(self, lm: LM, document: str):
        require_tokenizer(lm)
        self.lm = lm
        self._document = document

    @functools.cached_property
    def essay(self) -> Hay:
        return Hay(self.lm, corpus.document(self._document))

    @functools.cached_property
    def squad(self) -> dict[str, list[corpus.Question]]:
        """The questions of every article."""
        packs.pull("squad")
        return {name: corpus.questions(name) for name in corpus.names("squad")}

    @functools.cached_property
    def paragraphs(self) -> dict[str, list[str]]:
        """Every article's paragraphs, each once."""
        return {name: list(dict.fromkeys(q.paragraph for q in questions)) for name, questions in self.squad.items()}

    @functools.cached_property
    def _noise_lengths(self) -> list[int]:
        return piece_lengths(self.lm, [f" {sentence}" for sentence in NOISE])

    def noise(self, room: int) -> list[str]:
        """Lines of the five sentences, over and over, of about `room` tokens; the last line may have fewer."""
        lengths = self._noise_lengths
        rounds = max(0, room) // sum(lengths) + 1
        count = sum(total <= room for total in accumulate(lengths * rounds))
        sentences = (NOISE * rounds)[:count]
        return [" ".join(sentences[i : i + len(NOISE)]) for i in range(0, count, len(NOISE))]

    def lines(self, pieces: list[str]) -> Cut:
        """Lines as hay, in which a depth is found by tokens."""
        return Cut(tuple(pieces), tuple(piece_lengths(self.lm, [f"{piece}\n" for piece in pieces])))


class Draws:
    """Keys and values, none of them twice."""

    def __init__(self, draw: Random):
        self._draw = draw
        self._seen: set[str] = set()

    def __call__(self, kind: str) -> str:
        """A new value of a kind: "words" (adjective-noun), "numbers" (seven digits) or "uuids" (version 4)."""
        while (value := getattr(self, f"_{kind}")()) in self._seen:
            pass
        self._seen.add(value)
        return value

    def _words(self) -> str:
        return f"{self._draw.choice(words('adjective'))}-{self._draw.choice(words('noun'))}"

    def _numbers(self) -> str:
        return str(self._draw.randrange(1_000_000, 10_000_000))

    def _uuids(self) -> str:
        return str(uuid.UUID(int=self._draw.getrandbits(128), version=4))
