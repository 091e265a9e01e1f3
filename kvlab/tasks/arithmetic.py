"""Symbolic sums among distractors, with a length and a difficulty knob (after GSM-Infinite, Zhou et al. 2025)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from random import Random
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from kvlab.tasks.base import Example, Task
from kvlab.tasks.making import LOOSE, Lengths, Several, fill, fit, piece_lengths, require_tokenizer, spread

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

_OPENING = "The values of these variables are:\n\n"
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_WORDS = (
    "bad bed big bit but did dog fan fat fit for fun get god got lab led let lot man map men met "
    "net not pet put ran red run set sit son sum tap tax ten top van vet"
)
_NOT_NAMES = frozenset(_WORDS.split())
_HIGHEST = 199


class Arithmetic(Task):
    """Sums of assignments such as `bak = 3. dol = bak + 4.`: what is the value of a variable?

    The value asked for results from a chain of `difficulty` additions and subtractions (0: a number is assigned). The
    rest of the length is filled with similar assignments to other variables. They use numbers, each other and the
    chain, but the chain does not need them. Every assignment comes after those that it uses. No other variable and no
    number has the value of the answer, except the number that is assigned at difficulty 0. Values lie between 1 and
    199.

    `trials` counts the examples for each length and difficulty. Score: `score`, whether the first whole number of the
    prediction is the value.
    """

    name: ClassVar[str] = "arithmetic"
    summary: ClassVar[str] = "symbolic sums among distracting assignments, by length and by number of operations"

    lengths: Lengths = (256, 512, 1024, 2048)
    difficulties: Several[Annotated[int, Field(ge=0, le=32)]] = (0, 1, 2, 4)
    trials: int = Field(5, ge=1)

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """See Task.examples; about 5 ms for each example of 2,048 tokens."""
        require_tokenizer(lm)
        for difficulty, length, trial in spread(
            product(self.difficulties, self.lengths, range(self.trials)), limit, kind=lambda cell: cell[0]
        ):
            yield self._example(lm, difficulty, length, trial)

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """`score`, see the class."""
        number = re.search(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", prediction))
        return {"score": float(number is not None and number[0] == example.answers[0])}

    def _example(self, lm: LM, difficulty: int, length: int, trial: int) -> Example:
        draw = Random(f"{self.seed} {difficulty} {length} {trial}")
        names = _names(draw)
        chain = _chain(draw, names, difficulty)
        variable = chain[-1]
        hanging, plain = _distractors(draw, names, chain, length // 6)
        costs = piece_lengths(lm, [f" {line.text}" for line in hanging])
        plain_costs = piece_lengths(lm, [f" {line.text}" for line in plain])

        def build(room: int) -> Example:
            # A hanging line may use any line before it, so only the first ones can be taken; plain lines fill the rest.
            ends = [cost for cost in accumulate(costs) if cost <= room - LOOSE]
            left = room - (ends[-1] if ends else 0)
            shown = [*chain, *hanging[: len(ends)], *(plain[i] for i in fill(plain_costs, left))]
            shown.sort(key=lambda line: line.depth)
            return Example(
                id=f"arithmetic-{difficulty}-{length}-{trial}",
                context=_OPENING + " ".join(line.text for line in shown) + "\n\n",
                question=f"What is the value of {variable.name}?",
                prefix=f" The value of {variable.name} is",
                answers=(str(variable.value),),
                max_new_tokens=12,
                marks={"kind": f"{difficulty} operations", "difficulty": difficulty, "length": length, "trial": trial},
            )

        return fit(lm, build, length, f"{self.name} of difficulty {difficulty}")


@dataclass(frozen=True)
class _Line:
    """An assignment. `depth` in (0, 1) orders the lines; a line has a larger depth than the variables that it uses."""

    name: str
    text: str
    value: int
    depth: float
    number: int  # the number in its text


def _names(draw: Random) -> Iterator[str]:
    """Names of three letters in random order, then the same with a digit at the end."""
    pronounceable = [a + b + c for a, b, c in product(_CONSONANTS, _VOWELS, _CONSONANTS) if a + b + c not in _NOT_NAMES]
    draw.shuffle(pronounceable)
    yield from pronounceable
    for figure in range(2, 1000):
        yield from (f"{name}{figure}" for name in pronounceable)


def _plain(draw: Random, name: str, depth: float) -> _Line:
    value = draw.randint(1, _HIGHEST)
    return _Line(name, f"{name} = {value}.", value, depth, value)


def _dependent(draw: Random, name: str, depth: float, on: _Line) -> _Line:
    while True:
        number = draw.randint(1, 20)
        sign = draw.choice((-1, 1))
        value = on.value + sign * number
        if 1 <= value <= _HIGHEST:
            return _Line(name, f"{name} = {on.name} {'+' if sign > 0 else '-'} {number}.", value, depth, number)


def _chain(draw: Random, names: Iterator[str], difficulty: int) -> list[_Line]:
    """The lines that lead to the variable asked for; its value occurs nowhere else."""
    own = [next(names) for _ in range(difficulty + 1)]
    depths = sorted(draw.random() for _ in own)
    while True:
        lines = [_plain(draw, own[0], depths[0])]
        for name, depth in zip(own[1:], depths[1:], strict=True):
            lines.append(_dependent(draw, name, depth, lines[-1]))
        answer = lines[-1].value
        if not difficulty or (
            not any(answer in (line.value, line.number) for line in lines[:-1]) and lines[-1].number != answer
        ):
            return lines


def _distractors(draw: Random, names: Iterator[str], chain: list[_Line], count: int) -> tuple[list[_Line], list[_Line]]:
    """`count` lines, each of which may use the chain and those before it, and 24 numbers to fill gaps with."""
    answer = chain[-1].value

    def new(base: list[_Line] | None) -> _Line:
        name = next(names)
        while True:
            if base and draw.random() < 0.6:
                on = draw.choice(base)
                line = _dependent(draw, name, draw.uniform(on.depth, 1), on)
            else:
                line = _plain(draw, name, draw.random())
            if answer not in (line.value, line.number):
                return line

    hanging: list[_Line] = []
    while len(hanging) < count:
        hanging.append(new([*chain, *hanging]))
    return hanging, [new(None) for _ in range(24)]
