"""RULER's eight needle tasks (section 3.1): what is hidden, among what, and what is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvlab.tasks.base import Example
from kvlab.tasks.hay import Cut
from kvlab.tasks.making import fill, fit, piece_lengths
from kvlab.tasks.ruler.material import Draws, Material

NEEDLE = "One of the special magic {what} for {key} is: {value}."
DEPTHS = [step / 39 for step in range(40)]  # the forty depths that RULER draws from


@dataclass(frozen=True)
class Spec:
    """hay: "noise", "essay" or "needles"; keys and values: "words", "numbers" or "uuids"; then how many of each."""

    hay: str = "essay"
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1


SPECS = {
    "niah_single_1": Spec(hay="noise"),
    "niah_single_2": Spec(),
    "niah_single_3": Spec(values="uuids"),
    "niah_multikey_1": Spec(n_keys=4),
    "niah_multikey_2": Spec(hay="needles"),
    "niah_multikey_3": Spec(hay="needles", keys="uuids", values="uuids"),
    "niah_multivalue": Spec(n_values=4),
    "niah_multiquery": Spec(n_keys=4, n_queries=4),
}


def make(material: Material, kind: str, length: int, draw: Random) -> Example:
    """One example of the kind; its mark `depth` is the mean depth of the needles that are asked for, by tokens."""
    spec, draws = SPECS[kind], Draws(draw)
    keys = [draws(spec.keys) for _ in range(spec.n_keys)]
    hidden = {key: [draws(spec.values) for _ in range(spec.n_values)] for key in keys}
    queried = draw.sample(keys, spec.n_queries)
    needles = [(key, NEEDLE.format(what=spec.values, key=key, value=value)) for key in keys for value in hidden[key]]
    draw.shuffle(needles)
    depths = sorted(draw.sample(DEPTHS, len(needles)))
    hay = _hay(material, spec, length, draw, draws)

    single = spec.n_queries * spec.n_values == 1
    noun = spec.values.removesuffix("s") if single else spec.values
    query = queried[0] if len(queried) == 1 else f"{', '.join(queried[:-1])}, and {queried[-1]}"
    verb = "is" if single else "are all"
    opening = (
        f"A special magic {noun} hides in this text. Keep it in mind; you will be asked for it."
        if single
        else f"Special magic {noun} hide in this text. Keep them in mind; you will be asked for them."
    )

    def build(room: int) -> Example:
        cut = hay(room)
        boundaries = [cut.boundary(depth) for depth in depths]
        of_queried = [cut.depth(b) for b, (key, _) in zip(boundaries, needles, strict=True) if key in queried]
        text = cut.with_needles([text for _, text in needles], boundaries, " " if spec.hay == "essay" else "\n")
        return Example(
            id=kind,
            context=f"{opening}\n{text}\n",
            question=f"What {verb} the special magic {noun} for {query} that the text mentions?",
            prefix=f" The special magic {noun} for {query} mentioned in the provided text {'is' if single else 'are'}",
            answers=tuple(value for key in queried for value in hidden[key]),
            max_new_tokens=128,
            marks={"depth": round(sum(of_queried) / len(of_queried), 4)},
        )

    return fit(material.lm, build, length, f"ruler's {kind}")


def _hay(material: Material, spec: Spec, length: int, draw: Random, draws: Draws):
    """room in tokens -> Cut."""
    if spec.hay == "essay":
        start = draw.randrange(len(material.essay.sentences))
        return lambda room: material.essay.cut(start, room)
    if spec.hay == "noise":
        return lambda room: material.lines(material.noise(room))
    shortest = 12  # no needle is shorter in tokens, so these are enough
    others = [
        NEEDLE.format(what=spec.values, key=draws(spec.keys), value=draws(spec.values))
        for _ in range(length // shortest)
    ]
    lengths = piece_lengths(material.lm, [f"{other}\n" for other in others])

    def needles(room: int) -> Cut:
        chosen = fill(lengths, room)
        left = room - sum(lengths[i] for i in chosen)
        return material.lines([*(others[i] for i in chosen), *material.noise(left)])

    return needles
