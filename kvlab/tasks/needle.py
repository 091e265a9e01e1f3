"""A needle in a haystack: one sentence hidden in a long text, asked for at its end (Kamradt 2023)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from kvlab.inputs import corpus
from kvlab.tasks.base import Example, Task
from kvlab.tasks.hay import Hay
from kvlab.tasks.making import Lengths, Several, fit, spread, words

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

# Without this line and "Question:", a small model ignores the first or the last sentence of the text.
_OPENING = "Remember {}, which stands in this text."
_TOWNS = ("Lindau", "Tarifa", "Bergen", "Ronda", "Visby", "Piran", "Cromer", "Olomouc", "Kotor", "Sintra", "Tromso")
_ACTIONS = (
    "eat a plum cake",
    "feed the swans",
    "climb the clock tower",
    "row across the lake",
    "listen to the organ",
    "buy a straw hat",
    "visit the glass museum",
    "ride the old tram",
    "pick wild cherries",
    "sketch the harbour",
)
_TIMES = ("on a rainy morning", "at low tide", "before the market opens", "in the first snow", "after the last bell")
_SMALL_WORDS = "a an and at before after in of on the to first"
_SMALL = frozenset(_SMALL_WORDS.split())


class Needle(Task):
    """The grid of lengths and depths of RocketKV's figures 12-14 and DapQ's figure 5.

    A needle is at the boundary of sentences that is nearest to its depth, a share of the hay's tokens. The hay is the
    same at all depths of a length and trial. `document` is a name that `kvlab.document` knows, or the path of a text
    file. A document shorter than the prompt is repeated. `trials` counts the needles for each kind, length and depth.

    The kinds of needles are:

    - `number`: five digits;
    - `word`: a noun that the hay does not have;
    - `sentence`: the best thing to do in a town, with two deeds and a time.

    The scores are:

    - `exact`: whether the answer is in the prediction, as a whole number or word. Case and punctuation do not matter.
    - `score`: the same for numbers and words. For sentences it is word recall: the share of the answer's words, without
      small ones, that are in the prediction.
    """

    name: ClassVar[str] = "needle"
    summary: ClassVar[str] = "one sentence hidden in a long text, at a grid of lengths and depths"

    lengths: Lengths = (256, 512, 1024, 1536, 2048)
    depths: Several[Annotated[float, Field(ge=0, le=1)]] = (0.0, 0.25, 0.5, 0.75, 1.0)
    kinds: Several[Literal["number", "word", "sentence"]] = ("number",)
    trials: int = Field(1, ge=1)
    document: str = "sotu/1962"

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """See Task.examples; about 5 ms for each example of 2,048 tokens."""
        hay = Hay(lm, corpus.document(self.document))
        cells = product(self.kinds, self.lengths, self.depths, range(self.trials))
        for cell in spread(cells, limit, kind=lambda cell: cell[0]):
            yield self._example(lm, hay, *cell)

    def _example(self, lm: LM, hay: Hay, kind: str, length: int, depth: float, trial: int) -> Example:
        start = Random(f"{self.seed} hay {length} {trial}").randrange(len(hay.sentences))
        longest = str(hay.cut(start, length)).lower()
        draw = Random(f"{self.seed} {kind} {length} {depth} {trial}")
        opening, needle, question, answer = _needle(kind, draw)
        while answer in longest:
            opening, needle, question, answer = _needle(kind, draw)

        def build(room: int) -> Example:
            cut = hay.cut(start, room)
            boundary = cut.boundary(depth)
            return Example(
                id=f"needle-{kind}-{length}-{depth}-{trial}",
                context=f"{opening}\n\n{cut.with_needles([needle], [boundary])}",
                question=f"\n\nQuestion: {question}",
                answers=(answer,),
                max_new_tokens=32 if kind == "sentence" else 16,
                marks={
                    "kind": kind,
                    "length": length,
                    "depth": depth,
                    "placed": round(cut.depth(boundary), 4),
                    "trial": trial,
                },
            )

        return fit(lm, build, length, f"{self.name} of kind {kind}")

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """`score` and `exact`, see the class."""
        (answer,) = example.answers
        words = _plain(prediction)
        exact = float(f" {_plain(answer)} " in f" {words} ")
        if example.marks.get("kind") != "sentence":
            return {"score": exact, "exact": exact}
        expected = set(_plain(answer).split()) - _SMALL
        return {"score": len(expected & set(words.split())) / len(expected), "exact": exact}


def _plain(text: str) -> str:
    """Words and digits in lower case, with single spaces between them and without thousands separators."""
    return " ".join(re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())))


def _needle(kind: str, draw: Random) -> tuple[str, str, str, str]:
    """The prompt's opening, the needle, the question, and the answer in lower case."""
    if kind == "number":
        answer = str(draw.randrange(10_000, 100_000))
        return _OPENING.format("the secret code"), f"The secret code is {answer}.", "What is the secret code?", answer
    if kind == "word":
        answer = draw.choice([word for word in words("noun") if 5 <= len(word) <= 9])
        return _OPENING.format("the secret word"), f"The secret word is {answer}.", "What is the secret word?", answer
    town, (first, second), when = draw.choice(_TOWNS), draw.sample(_ACTIONS, 2), draw.choice(_TIMES)
    answer = f"{first} and {second} {when}"
    best = f"the best thing to do in {town}"
    return _OPENING.format(best), f"The{best[3:]} is to {answer}.", f"What is {best}?", answer
