"""Keys in one form and values in another: two sets of entries, of which each lacks the other's half."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvlab.core.entries import AsIs, Entries, Run
from kvlab.core.slots import KEYS, POSITIONS, VALUES


class Pair:
    """Entries whose keys and values are in different forms.

    Args:
        entries: in the model's precision.
        keys, values: bring entries into the form of each half.
    """

    def __init__(self, entries: AsIs, keys: Callable[[AsIs], Entries], values: Callable[[AsIs], Entries]):
        self.dtype, self.head_dim = entries.dtype, entries.head_dim
        self._keys, self._values = keys(entries.half(KEYS)), values(entries.half(VALUES))

    def _half(self, name: str) -> Entries:
        return self._values if name == VALUES else self._keys

    # ------------------------------------------------------------------ reading

    @property
    def shape(self) -> tuple[int, int]:
        return self._keys.shape

    @property
    def device(self) -> torch.device:
        return self._keys.device

    @property
    def counts(self) -> list[int]:
        return self._keys.counts

    @property
    def length(self) -> int:
        return self._keys.length

    @property
    def ragged(self) -> bool:
        return self._keys.ragged

    def read(self, name: str) -> Tensor:
        return self._half(name).read(name)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._keys.gather(slots)[0], self._values.gather(slots)[1]

    def since(self, name: str, slot: int) -> Tensor:
        return self._half(name).since(name, slot)

    def row(self, name: str, row: int) -> Tensor:
        return self._half(name).row(name, row)

    def rounded_slots(self) -> Tensor:
        """Which slots hold an entry of which a half is rounded."""
        return self._keys.rounded_slots() | self._values.rounded_slots()

    def runs(self) -> Iterator[Run]:
        if not self.ragged:
            yield slice(0, len(self.counts)), self.read(KEYS).flatten(0, 1), self.read(VALUES).flatten(0, 1)
            return
        # Halves may divide their heads into different runs.
        keys = (key for _, found, _ in self._keys.runs() for key in found)
        values = (value for _, _, found in self._values.runs() for value in found)
        for head, (key, value) in enumerate(zip(keys, values, strict=True)):
            yield slice(head, head + 1), key[None], value[None]

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | int) -> None:
        self._keys.append(keys, values[..., :0], positions)
        self._values.append(keys[..., :0], values, positions)

    def quantise(self, seen: int) -> None:
        self._keys.quantise(seen)
        self._values.quantise(seen)

    @property
    def next_quantisation(self) -> int:
        return min(self._keys.next_quantisation, self._values.next_quantisation)

    def evict(self, keep: Tensor, even: bool = False) -> None:
        self._keys.evict(keep, even)
        self._values.evict(keep, even)

    def drop(self, slot: Tensor | int) -> None:
        self._keys.drop(slot)
        self._values.drop(slot)

    def cut(self, first: list[int], n: list[int]) -> None:
        self._keys.cut(first, n)
        self._values.cut(first, n)

    def truncate(self, n: int) -> None:
        self._keys.truncate(n)
        self._values.truncate(n)

    def put(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        self._keys.put(slot, keys, values[..., :0])
        self._values.put(slot, keys[..., :0], values)

    def expand(self, repeats: int) -> None:
        self._keys.expand(repeats)
        self._values.expand(repeats)

    def reorder(self, rows: Tensor) -> None:
        self._keys.reorder(rows)
        self._values.reorder(rows)

    # ------------------------------------------------------------------ bytes

    @property
    def kv_bytes(self) -> int:
        return self._keys.kv_bytes + self._values.kv_bytes

    @property
    def key_bytes(self) -> int:
        return self._keys.kv_bytes

    def bytes_of(self, slots: Tensor) -> int | Tensor:
        return self._keys.bytes_of(slots) + self._values.bytes_of(slots)

    @property
    def allocated_bytes(self) -> int:
        """Positions are kept twice, once with each half."""
        return self._keys.allocated_bytes + self._values.allocated_bytes

    def plain(self) -> AsIs:
        return AsIs.of(*(self.read(name) for name in (KEYS, VALUES, POSITIONS)))
