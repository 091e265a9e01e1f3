"""What policies that go on from one prefill find out about its prompt, once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor

from kvlab.methods import Policy
from kvlab.methods.repeating import Repetition

T = TypeVar("T")


class Memory:
    """What has been found out about one prompt, as it was when a cache first branched off it.

    Caches that hold this prompt and nothing else have it in common; one that is fed, cropped or reordered forgets it.
    What depends on a policy or a session is named so by its key.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute`, computed when it is first asked for under this key."""
        if key not in self._known:
            self._known[key] = compute()
        return cast("T", self._known[key])

    def know(self, policies: Iterable[Policy], repeated: Mapping[str, Tensor]) -> None:
        """Take from a trace of the same tokens what the model looked at when it repeated its prompt.

        Args:
            policies: whose repetitions matter.
            repeated: `[layers, kv_heads, length]`, by the key of each repetition (`Trace.repeated`).
        """
        for repetition in {repetition for policy in policies for repetition in policy.needs.repetitions}:
            if repetition.key in repeated:
                self._known[scores_of(repetition)] = list(repeated[repetition.key][:, None])


def scores_of(repetition: Repetition, group: int = 0) -> Hashable:
    """The key of one repetition's scores `[rows, kv_heads, length]`, layer by layer."""
    return "repeated", repetition, group


def once(memory: Memory | None, key: Hashable, compute: Callable[[], T]) -> T:
    """As `Memory.once`, and computed anew where nobody shares it."""
    return compute() if memory is None else memory.once(key, compute)
