"""RULER's thirteen tasks (Hsieh et al. 2024, sections 3 and B), made for a model's own tokenizer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import Field

from kvlab.tasks.base import Example, Task
from kvlab.tasks.making import Lengths, Several, spread
from kvlab.tasks.ruler import niah, qa, tracing, wordlists
from kvlab.tasks.ruler.material import Material

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

Kind = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_MAKERS = {
    **dict.fromkeys(niah.SPECS, niah.make),
    "vt": tracing.make,
    "cwe": wordlists.common,
    "fwe": wordlists.frequent,
    "qa_1": qa.make,
    "qa_2": qa.make,
}


class Ruler(Task):
    """RULER: retrieval of needles, tracing of variables, counting of words, and questions among distracting texts.

    Needles, noise, frequencies, answer prefixes, numbers of new tokens and scores are RULER's. The instructions say the
    same in words of our own. The differences from RULER are:

    - a length counts the prompt and the answer's prefix, not the new tokens, as everywhere in kvlab;
    - essays are replaced by `document` (a name of `kvlab.document`, or a text file), repeated where it is short;
    - keys, values and words are never drawn twice, and no distracting paragraph of qa holds an answer;
    - a length is met within 2 %: the last sentence, line or document of the hay is shortened, or a line of noise added;
    - the worked example of vt takes at most a quarter of the length (RULER: 500 tokens);
    - qa_2 replaces HotpotQA, whose answers need two documents. It asks two questions of SQuAD over two articles, and
      its score is the mean of both.

    `trials` counts the examples for each kind and length. The score `string_match` is the share of the references that
    are in the prediction, whatever their case (RULER's string_match_all). In qa it is whether any of them is
    (string_match_part).
    """

    name: ClassVar[str] = "ruler"
    summary: ClassVar[str] = "RULER's thirteen tasks: needles, variable tracking, common and frequent words, questions"
    metric: ClassVar[str] = "string_match"

    lengths: Lengths = (1024, 2048)
    kinds: Several[Kind] = KINDS
    trials: int = Field(5, ge=1)
    document: str = "sotu/1962"

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """See Task.examples; 5 to 20 ms for each example of 2,048 tokens."""
        material = Material(lm, self.document)
        for kind, length, trial in spread(
            product(self.kinds, self.lengths, range(self.trials)), limit, kind=lambda cell: cell[0]
        ):
            made = _MAKERS[kind](material, kind, length, Random(f"{self.seed} {kind} {length} {trial}"))
            marks = {"kind": kind, "length": length, "trial": trial, **made.marks}
            yield dataclasses.replace(made, id=f"ruler-{kind}-{length}-{trial}", marks=marks)

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """`string_match`, see the class."""
        if not str(example.marks.get("kind", "")).startswith("qa"):
            return {self.metric: string_match_all(prediction, example.answers)}
        parts, first = [], 0
        for count in example.marks.get("groups", [len(example.answers)]):
            parts.append(string_match_part(prediction, example.answers[first : first + count]))
            first += count
        return {self.metric: sum(parts) / len(parts)}


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of the references that are substrings of the prediction, in lower case."""
    text = _cleaned(prediction)
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 where any of the references is a substring of the prediction, in lower case, else 0."""
    text = _cleaned(prediction)
    return float(any(reference.lower() in text for reference in references))


def _cleaned(prediction: str) -> str:
    """Cleaned as by RULER: control characters become line ends, and both ends are stripped."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
