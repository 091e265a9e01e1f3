"""Findings about one prompt, computed once for all policies that go on from its prefill."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from kvlab.methods._base.repeating import Part, Repetition

T = TypeVar("T")

Repeated: TypeAlias = dict[Hashable, list[Tensor]]
"""Scores `[rows, kv_heads, length]` of a repetition, layer by layer, by `scores_of` what was fed."""


class Memory:
    """Findings about one prompt, from the caches that hold only it.

    Whoever wants it sets it: `prefilled.memory = Memory()`. Branches share it until their prompts end; a cache that is
    fed, cropped or reordered drops it. Costs are then not measured by policy: the first policy that needs a result pays
    for it.

    Every key names what its result depends on in addition to the prompt.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute`, computed when it is first asked for under this key."""
        if key not in self._known:
            self._known[key] = compute()
        return cast("T", self._known[key])


def once(memory: Memory | None, key: Hashable, compute: Callable[[], T]) -> T:
    """As `Memory.once`, and computed anew where nothing is shared."""
    return compute() if memory is None else memory.once(key, compute)


def scores_of(repetition: Repetition, prompts: Tensor, fed: Sequence[Sequence[Part]]) -> Hashable:
    """The key of one repetition's scores: what was read, and what was fed on top of it, with its instructions.

    Args:
        prompts: ids `[rows, length]`.
        fed: the parts of each row.
    """
    return repetition, tokens_of(prompts), tuple(tokens_of(part.ids) for parts in fed for part in parts)


def tokens_of(ids: Tensor) -> Hashable:
    """Ids as a key."""
    return tuple(ids.shape), ids.to("cpu", torch.int64).numpy().tobytes()
