"""How a store keeps the keys and values of its slots: as they are, or each entry rounded by itself.

Entries hold their original positions with their keys and values. Storage in groups of entries is in `kivi`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kvlab.core.dense_slots import DenseSlots
from kvlab.core.packed_slots import PackedSlots
from kvlab.core.slots import EMPTY, KEYS, POSITIONS, VALUES, Picking, padded

Get = Callable[[str], Tensor]
Run: TypeAlias = tuple[slice, Tensor, Tensor]
"""Heads that hold equally many entries, counted row by row, with their keys and values `[heads, count, head_dim]`."""


class Entries(Protocol):
    """The interface of every form of stored keys and values. Slots are counted from the oldest entry of each head."""

    dtype: torch.dtype
    head_dim: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and KV heads."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def counts(self) -> list[int]:
        """Entries of each head, row by row."""
        ...

    @property
    def length(self) -> int:
        """Entries of the fullest head."""
        ...

    @property
    def ragged(self) -> bool:
        """Whether heads hold different numbers of entries."""
        ...

    def read(self, name: str) -> Tensor:
        """Keys or values `[rows, kv_heads, length, head_dim]` in the model's precision, or positions without the last
        dimension; empty slots hold zeros, and positions of -1.
        """
        ...

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots `[rows, kv_heads, n]`, `[rows, kv_heads, n, head_dim]` each; anything for -1."""
        ...

    def since(self, name: str, slot: int) -> Tensor:
        """As `read`, from one slot on."""
        ...

    def row(self, name: str, row: int) -> Tensor:
        """As `read`, of one row: `[kv_heads, length, ...]`."""
        ...

    def rounded_slots(self) -> Tensor:
        """Which slots hold an entry that is rounded, bool `[rows, kv_heads, length]`; anything for empty ones."""
        ...

    def runs(self) -> Iterator[Run]:
        """All entries, without empty slots."""
        ...

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | int) -> None:
        """Add `n` entries to every head: `[rows, kv_heads, n, head_dim]`, at positions `[rows, kv_heads, n]`."""
        ...

    def quantise(self, seen: int) -> None:
        """Round what has become old enough for it; `seen` is how many tokens there ever were."""
        ...

    @property
    def next_quantisation(self) -> int:
        """How many tokens there may have been before `quantise` changes an entry that is there."""
        ...

    def evict(self, keep: Tensor, even: bool = False) -> None:
        """Keep only the slots `keep` `[rows, kv_heads, n]`, ascending, -1 at the end where a head keeps fewer; `even`:
        none does.
        """
        ...

    def drop(self, slot: Tensor | int) -> None:
        """Evict one slot of every head: the same one, or `[rows, kv_heads]` of them."""
        ...

    def cut(self, first: list[int], n: list[int]) -> None:
        """Evict `n` slots of each head from slot `first` on, head by head."""
        ...

    def truncate(self, n: int) -> None:
        """Forget the `n` newest entries of every head."""
        ...

    def put(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrite the slot `[rows, kv_heads]` of every head: `[rows, kv_heads, head_dim]` each."""
        ...

    def expand(self, repeats: int) -> None:
        """Repeat every head so often, one behind the other."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """The rows `rows` instead of the present ones."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, with all that it takes to read them."""
        ...

    @property
    def key_bytes(self) -> int:
        """The keys' part of `kv_bytes`."""
        ...

    def bytes_of(self, slots: Tensor) -> int | Tensor:
        """Bytes that reading the slots `[rows, kv_heads, n]` loads; nothing for -1. A GPU's answer may stay there."""
        ...

    @property
    def allocated_bytes(self) -> int: ...

    def plain(self) -> AsIs:
        """The same entries in the model's precision."""
        ...


class AsIs:
    """Keys and values in the model's own precision.

    Args:
        slots: `keys`, `values` and `positions`.
    """

    def __init__(self, slots: DenseSlots | PackedSlots):
        self.slots = slots
        keys = slots.tensors[KEYS]
        self.dtype, self.head_dim = keys.dtype, keys.shape[-1]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, positions: Tensor) -> AsIs:
        """Entries `[rows, kv_heads, length, head_dim]` that are borrowed: read in place until something changes."""
        made = cls(DenseSlots({KEYS: keys, VALUES: values, POSITIONS: positions}))
        if bool((positions == EMPTY).any()):
            made.evict(torch.arange(keys.shape[2], device=keys.device).where(positions != EMPTY, EMPTY))
        return made

    # How keys and values `[rows, kv_heads, n, head_dim]` become what is stored of them, and are read again. `heads` are
    # those, counted row by row, that tensors `[heads, count, ...]` belong to; None for `[rows, kv_heads, n, ...]`.

    def packed(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {KEYS: keys, VALUES: values}

    def unpacked(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        return get(name)

    # ------------------------------------------------------------------ reading

    @property
    def shape(self) -> tuple[int, int]:
        return self.slots.shape

    @property
    def device(self) -> torch.device:
        return self.slots.tensors[KEYS].device

    @property
    def counts(self) -> list[int]:
        return self.slots.counts

    @property
    def length(self) -> int:
        return self.slots.length

    @property
    def ragged(self) -> bool:
        return self.slots.ragged

    def read(self, name: str) -> Tensor:
        return self.slots.view(name) if name == POSITIONS else self.unpacked(name, self.slots.view)

    def row(self, name: str, row: int) -> Tensor:
        if name == POSITIONS:
            return self.slots.view(name)[row]
        heads = slice(row * self.shape[1], (row + 1) * self.shape[1])
        return self.unpacked(name, lambda part: self.slots.view(part)[row], heads)

    def head(self, name: str, head: int) -> Tensor:
        """The entries `[count, ...]` of one head."""

        def part(name: str) -> Tensor:
            return self.slots.of(self.slots.tensors[name], head)

        return part(name) if name == POSITIONS else self.unpacked(name, part)

    def heads(self, name: str) -> Iterator[Tensor]:
        """The entries `[count, ...]` of one head after the other."""
        if isinstance(self.slots, DenseSlots):
            return (head for row in self.read(name) for head in row)
        # All at once, with what lies between the heads: few large operations are faster than many small ones.
        slots = self.slots
        whole = slots.tensors[name] if name == POSITIONS else self.unpacked(name, slots.tensors.__getitem__)
        return (slots.of(whole, head) for head in range(len(slots.counts)))

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        picking = Picking(slots)

        def part(name: str) -> Tensor:
            return picking(self.slots.view(name))

        return self.unpacked(KEYS, part), self.unpacked(VALUES, part)

    def since(self, name: str, slot: int) -> Tensor:
        return self.unpacked(name, lambda part: self.slots.view(part)[:, :, slot:])

    def rounded_slots(self) -> Tensor:
        return torch.zeros(*self.shape, self.length, dtype=torch.bool, device=self.device)

    def runs(self) -> Iterator[Run]:
        for first, n in self.slots.runs():
            heads = slice(first, first + n)

            def part(name: str, first: int = first, n: int = n) -> Tensor:
                return self.slots.run(self.slots.tensors[name], first, n)

            yield heads, self.unpacked(KEYS, part, heads), self.unpacked(VALUES, part, heads)

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | int) -> None:
        new: dict[str, Tensor | int] = {**self.packed(keys, values), POSITIONS: positions}
        if isinstance(positions, Tensor):
            new[POSITIONS] = positions.expand(keys.shape[:3])
        self.slots.append(new, keys.shape[2])

    def quantise(self, seen: int) -> None:
        pass

    @property
    def next_quantisation(self) -> int:
        return torch.iinfo(torch.int64).max

    def evict(self, keep: Tensor, even: bool = False) -> None:
        self.slots = self.slots.evict(keep, even)

    def drop(self, slot: Tensor | int) -> None:
        self.slots = self.slots.drop(slot)

    def cut(self, first: list[int], n: list[int]) -> None:
        self.slots = self.slots.cut(first, n)

    def truncate(self, n: int) -> None:
        self.slots.truncate(n)

    def put(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        new = self.packed(keys.unsqueeze(2), values.unsqueeze(2))
        self.slots.put(slot, {name: x.squeeze(2) for name, x in new.items()})

    def expand(self, repeats: int) -> None:
        self.slots = self.slots.expand(repeats)

    def reorder(self, rows: Tensor) -> None:
        self.slots = self.slots.reorder(rows)

    # ------------------------------------------------------------------ bytes

    def entry_bytes(self, *names: str) -> int:
        """Bytes of one entry: of all tensors whose name begins with one of these, or of its key and value."""
        lead, wanted = self.slots.lead, names or (KEYS, VALUES)
        tensors = [x for name, x in self.slots.tensors.items() if name.startswith(wanted)]
        return sum(x.shape[lead:].numel() * x.element_size() for x in tensors)

    @property
    def kv_bytes(self) -> int:
        return self.slots.total * self.entry_bytes() + self.fixed_bytes

    @property
    def key_bytes(self) -> int:
        return self.slots.total * self.entry_bytes(KEYS) + self.fixed_bytes // 2

    def bytes_of(self, slots: Tensor) -> int | Tensor:
        n = (slots >= 0).sum() if padded(slots) else slots.numel()
        return n * self.entry_bytes() + self.fixed_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes that it takes to read keys and values however few they are."""
        return 0

    @property
    def allocated_bytes(self) -> int:
        return self.slots.nbytes + self.fixed_bytes

    def plain(self) -> AsIs:
        return self

    @property
    def widths(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        return self.slots.tensors[KEYS].shape[-1], self.slots.tensors[VALUES].shape[-1]

    def half(self, name: str) -> AsIs:
        """The same entries with keys or values only, by name; the others have no channel."""
        x = self.read(name)
        # No view of the other half, which would keep all of it in memory.
        none = x.new_empty(*x.shape[:3], 0)
        keys, values = (x if part == name else none for part in (KEYS, VALUES))
        return type(self).of(keys, values, self.read(POSITIONS))


class Rounded(AsIs):
    """Entries of which each is rounded by itself when it is stored.

    Args:
        entries: in the model's precision.
    """

    def __init__(self, entries: AsIs):
        self.dtype, self.head_dim = entries.dtype, entries.head_dim
        self.prepare(entries)
        kept, positions = self.packed(entries.read(KEYS), entries.read(VALUES)), entries.read(POSITIONS)
        self.slots = DenseSlots(kept | {POSITIONS: positions})
        if entries.ragged:
            self.evict(torch.arange(self.length, device=positions.device).where(positions != EMPTY, EMPTY))

    def prepare(self, entries: AsIs) -> None:
        """Look at all entries before the first is rounded."""

    def rounded(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """The stored form of keys or values `[rows, kv_heads, n, head_dim]`."""
        raise NotImplementedError

    def restored(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        """Keys or values as they are read, of what is stored of them: these themselves, unless overridden."""
        return get(name)

    # One of keys and values has no channel where the other half is stored in another form.

    def packed(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        new = {KEYS: keys, VALUES: values}
        for name, x in [(name, x) for name, x in new.items() if x.shape[-1]]:
            new |= self.rounded(name, x)
        return new

    def unpacked(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        return self.restored(name, get, heads) if get(name).shape[-1] else get(name)

    def rounded_slots(self) -> Tensor:
        return ~super().rounded_slots()

    def plain(self) -> AsIs:
        return AsIs.of(*(self.read(name) for name in (KEYS, VALUES, POSITIONS)))


class Int8(Rounded):
    """Whole numbers from -127 to 127, and for every key and every value a step of its own in float16.

    The step is the vector's largest magnitude / 127, rounded up: no number is off by more than half a step.
    """

    def rounded(self, name: str, x: Tensor) -> dict[str, Tensor]:
        x = x.float()
        step = ceil_to_float16(x.abs().amax(-1, keepdim=True) / 127)
        codes = torch.where(step > 0, x / step.float(), 0).round().clamp(-127, 127)
        return {name: codes.to(torch.int8), f"{name} step": step}

    def restored(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        return (get(name).float() * get(f"{name} step").float()).to(self.dtype)


class Fp8(Rounded):
    """8-bit floats (e4m3), and a scale in float32 for the keys and for the values of each head.

    The scale is their largest magnitude / 448 when the prompt has been compressed. A larger number that comes later is
    clamped to the largest that there is.
    """

    LARGEST = 448.0

    def prepare(self, entries: AsIs) -> None:
        there = {name: x for name in (KEYS, VALUES) if (x := entries.read(name)).shape[-1]}
        largest = {name: x.float().abs().amax((2, 3)) for name, x in there.items()}
        self.scales = {
            name: (x / self.LARGEST).clamp_min(torch.finfo(torch.float32).tiny) for name, x in largest.items()
        }

    def rounded(self, name: str, x: Tensor) -> dict[str, Tensor]:
        scaled = (x.float() / self.scales[name][..., None, None]).clamp(-self.LARGEST, self.LARGEST)
        # As bytes, since torch moves and indexes these on every device.
        return {name: scaled.to(torch.float8_e4m3fn).view(torch.uint8)}

    def restored(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        scale = self.scales[name] if heads is None else self.scales[name].flatten()[heads]
        return (get(name).view(torch.float8_e4m3fn).float() * scale[..., None, None]).to(self.dtype)

    def expand(self, repeats: int) -> None:
        super().expand(repeats)
        self.scales = {name: scale.repeat_interleave(repeats, dim=1) for name, scale in self.scales.items()}

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self.scales = {name: scale.index_select(0, rows) for name, scale in self.scales.items()}

    @property
    def fixed_bytes(self) -> int:
        return sum(scale.numel() * scale.element_size() for scale in self.scales.values())


def ceil_to_float16(x: Tensor) -> Tensor:
    """float32 as the next float16 that is not smaller."""
    half = x.half()
    above = torch.nextafter(half, torch.full_like(half, torch.inf))
    return torch.where(half.float() < x, above, half).clamp_max(torch.finfo(torch.float16).max)


def floor_to_float16(x: Tensor) -> Tensor:
    """float32 as the next float16 that is not larger."""
    return -ceil_to_float16(-x)
