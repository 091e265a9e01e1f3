"""RULER's variable tracking (section 3.2): one chain of assignments in noise; which variables hold its value?"""

from __future__ import annotations

import string
from random import Random

from kvlab.tasks.base import Example
from kvlab.tasks.making import fit
from kvlab.tasks.ruler.material import Material

HOPS = 4
_QUESTION = "Question: Which variables hold the value {value}, directly or through others? Find all of them."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {value}, they are:"
)


def make(material: Material, kind: str, length: int, draw: Random) -> Example:
    """A worked example with names of three letters, then the task with names of five."""
    shown, known = _names(draw, 3), _names(draw, 5)
    while any(short in name for short in shown for name in known):
        shown = _names(draw, 3)
    first, second = draw.sample(range(10_000, 100_000), 2)
    depths = [sorted(draw.random() for _ in range(HOPS + 1)) for _ in range(2)]
    opening = "Follow the variable assignments that stand in this text.\n\n"
    worked = (
        f"{opening}{_text(material, _chain(shown, first), depths[0], min(500, length // 4) - 140)}\n"
        f"{_QUESTION.format(value=first)}{_PREFIX.format(count=HOPS + 1, value=first)} {' '.join(shown)}\n\n\n"
    )

    def build(room: int) -> Example:
        return Example(
            id=kind,
            context=f"{worked}{opening}{_text(material, _chain(known, second), depths[1], room)}\n",
            question=_QUESTION.format(value=second),
            prefix=_PREFIX.format(count=HOPS + 1, value=second),
            answers=tuple(known),
            max_new_tokens=30,
        )

    return fit(material.lm, build, length, "ruler's vt")


def _names(draw: Random, letters: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _chain(names: list[str], value: int) -> list[str]:
    return [
        f"VAR {names[0]} = {value}",
        *(f"VAR {name} = VAR {before}" for before, name in zip(names, names[1:], strict=False)),
    ]


def _text(material: Material, chain: list[str], depths: list[float], room: int) -> str:
    cut = material.lines(material.noise(max(0, room)))
    return cut.with_needles(chain, [cut.boundary(depth) for depth in depths], "\n")
