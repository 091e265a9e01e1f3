"""Shared parts of example makers: lengths that fit a tokenizer, an even choice of cells, and words to draw from."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

from pydantic import AfterValidator, Field

from kvlab.errors import KvlabError
from kvlab.tasks.base import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvlab.inputs.models import LM

SLACK = 0.02
"""An example may be shorter than was asked for by this share at most."""
LOOSE = 48
"""How many tokens `fill` leaves to the pieces that it chooses by their length."""

Item = TypeVar("Item")


def _different(values: tuple[Item, ...]) -> tuple[Item, ...]:
    if len(set(values)) < len(values):
        raise ValueError("each value may be named once only")
    return values


Several = Annotated[tuple[Item, ...], Field(min_length=1), AfterValidator(_different)]
"""A tuple of one or more values, all different: the ids of the examples are made of them."""

Lengths = Several[Annotated[int, Field(ge=64)]]
"""Wanted lengths in tokens."""


def require_tokenizer(lm: LM) -> PreTrainedTokenizerBase:
    """The tokenizer that a task makes its texts with; KvlabError for a model that has none."""
    return lm.require_tokenizer("no task can make its texts for it")


def tokens(lm: LM, example: Example) -> int:
    """The tokens of an example: prompt, with the chat template where it applies, and the answer's prefix."""
    count = lm.encode(example.prompt, chat="auto" if example.chat else False).shape[1]
    return count + (len(piece_tokens(lm, [example.prefix])[0]) if example.prefix else 0)


def piece_tokens(lm: LM, pieces: Sequence[str]) -> list[list[int]]:
    """The ids of each piece by itself, without special tokens."""
    if not pieces:
        return []
    encoded = require_tokenizer(lm)(list(pieces), add_special_tokens=False, verbose=False)
    return cast("list[list[int]]", encoded["input_ids"])


def piece_lengths(lm: LM, pieces: Sequence[str]) -> list[int]:
    return [len(ids) for ids in piece_tokens(lm, pieces)]


def fit(lm: LM, build: Callable[[int], Example], target: int, label: str, slope: float = 1.0) -> Example:
    """The example `build(n)` of at most `target` tokens and at most 2 % below that; its mark `tokens` says how many.

    From a larger n >= 0 `build` makes a longer example, or sometimes an equal one, with about `slope` tokens for each
    n. From the same n it must make the same example. As a rule two or three examples are encoded.

    Raises:
        KvlabError: the wanted length is below what build(0) takes, beyond the model's context, or cannot be met.
    """
    require_tokenizer(lm)
    best = build(0)
    below, length = 0, tokens(lm, best)
    if length > target:
        raise KvlabError(f"{label}: {target} tokens are too few, since the shortest prompt of its kind takes {length}")
    if target + best.max_new_tokens > lm.context_length:
        raise KvlabError(
            f"{label}: {target} tokens and an answer of {best.max_new_tokens} are more than the "
            f"{lm.context_length} that {lm.name} was made for"
        )
    above: tuple[int, int] | None = None
    for _ in range(16):
        if length >= target * (1 - SLACK / 2) or (above and above[0] - below == 1):
            break
        if above is None:
            n = below + max(1, math.floor((target - length) / slope))
        else:
            share = (target - length) / (above[1] - length)
            n = min(max(below + 1, below + math.floor(share * (above[0] - below))), above[0] - 1)
        example = build(n)
        count = tokens(lm, example)
        if count > target:
            above = (n, count)
        else:
            below, length, best = n, count, example
    if length < target * (1 - SLACK):
        raise KvlabError(f"{label}: no prompt of {target} tokens can be made, the nearest below has {length}")
    return dataclasses.replace(best, marks={**best.marks, "tokens": length})


def fill(lengths: Sequence[int], room: int) -> list[int]:
    """Which pieces fill `room` tokens: the first ones in order, then those of the rest that fit best.

    lengths: tokens of each piece; returns their indices in ascending order.
    """
    first = bisect_right(ends := [*accumulate(lengths)], room - LOOSE)
    sums: dict[int, tuple[int, ...]] = {0: ()}
    left = room - (ends[first - 1] if first else 0)
    for piece in range(first, min(len(lengths), first + 2 * LOOSE)):
        for total in list(sums):
            if total + lengths[piece] <= left:
                sums.setdefault(total + lengths[piece], (*sums[total], piece))
    return [*range(first), *sums[max(sums)]]


def spread(cells: Iterable[Item], limit: int | None, kind: Callable[[Item], Hashable]) -> list[Item]:
    """At most `limit` cells in their order: equally many of each kind, spread over all cells of that kind.

    A larger limit adds cells to those of a smaller one. Raises KvlabError for a limit below 1.
    """
    cells = list(cells)
    if limit is None or limit >= len(cells):
        return cells
    if limit < 1:
        raise KvlabError(f"limit must be at least 1, and is {limit}")
    groups: dict[Hashable, list[int]] = {}
    for number, cell in enumerate(cells):
        groups.setdefault(kind(cell), []).append(number)
    queues = [[group[i] for i in _scattered(len(group))] for group in groups.values()]
    interleaved = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return [cells[place] for place in sorted(interleaved[:limit])]


def _scattered(n: int) -> list[int]:
    """0 .. n-1 in steps near the golden ratio, which visit rows and columns of a grid alike."""
    stride = next(s for s in range(max(1, round(n * 0.618)), 2 * n + 2) if math.gcd(s, n) == 1)
    return [i * stride % n for i in range(n)]


@functools.cache
def words(*lists: str) -> tuple[str, ...]:
    """The plain lower-case words of wonderwords' lists "noun", "adjective", "verb", sorted, each once."""
    from wonderwords import filter_profanity

    lowered = {
        line.strip()
        for name in lists
        for line in (files("wonderwords.assets") / f"{name}list.txt").read_text(encoding="utf-8").splitlines()
    }
    return tuple(sorted(word for word in filter_profanity(lowered) if re.fullmatch(r"[a-z]{3,}", word)))
