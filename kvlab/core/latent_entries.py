"""Entries of latent attention: keys in any form, and values that are a part of them and take no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from kvlab.core.entries import AsIs, Entries, Run
from kvlab.core.latent import values_in
from kvlab.core.slots import KEYS, VALUES


class LatentEntries:
    """Entries whose values are read off their keys.

    Args:
        entries: in the model's precision; their values are not looked at.
        width: channels of a key's rotary part.
        convert: brings the keys into the form in which they are stored.
    """

    def __init__(self, entries: AsIs, width: int, convert: Callable[[AsIs], Entries]):
        self.dtype, self.head_dim, self._width = entries.dtype, entries.head_dim, width
        alone = entries if not entries.widths[1] else entries.half(KEYS)
        self._keys = convert(alone)

    # ------------------------------------------------------------------ reading

    @property
    def shape(self) -> tuple[int, int]:
        return self._keys.shape

    @property
    def device(self):
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
        return values_in(self._keys.read(KEYS), self._width) if name == VALUES else self._keys.read(name)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._keys.gather(slots)[0]
        return keys, values_in(keys, self._width)

    def since(self, name: str, slot: int) -> Tensor:
        keys = self._keys.since(KEYS, slot)
        return values_in(keys, self._width) if name == VALUES else keys

    def row(self, name: str, row: int) -> Tensor:
        return values_in(self._keys.row(KEYS, row), self._width) if name == VALUES else self._keys.row(name, row)

    def rounded_slots(self) -> Tensor:
        return self._keys.rounded_slots()

    def runs(self) -> Iterator[Run]:
        for heads, keys, _ in self._keys.runs():
            yield heads, keys, values_in(keys, self._width)

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | int) -> None:
        self._keys.append(keys, values[..., :0], positions)

    def quantise(self, seen: int) -> None:
        self._keys.quantise(seen)

    @property
    def next_quantisation(self) -> int:
        return self._keys.next_quantisation

    def evict(self, keep: Tensor, even: bool = False) -> None:
        self._keys.evict(keep, even)

    def drop(self, slot: Tensor | int) -> None:
        self._keys.drop(slot)

    def cut(self, first: list[int], n: list[int]) -> None:
        self._keys.cut(first, n)

    def truncate(self, n: int) -> None:
        self._keys.truncate(n)

    def put(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        self._keys.put(slot, keys, values[..., :0])

    def expand(self, repeats: int) -> None:
        self._keys.expand(repeats)

    def reorder(self, rows: Tensor) -> None:
        self._keys.reorder(rows)

    # ------------------------------------------------------------------ bytes

    @property
    def kv_bytes(self) -> int:
        return self._keys.kv_bytes

    @property
    def key_bytes(self) -> int:
        """All of them: a value is a part of its key."""
        return self._keys.kv_bytes

    def bytes_of(self, slots: Tensor) -> int | Tensor:
        return self._keys.bytes_of(slots)

    @property
    def allocated_bytes(self) -> int:
        return self._keys.allocated_bytes

    def plain(self) -> AsIs:
        """Without values, which are read off the keys."""
        return self._keys.plain()
