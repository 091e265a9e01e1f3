"""Slots that all heads have equally many of, as tensors `[rows, kv_heads, capacity, ...]`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvlab.core.packed_slots import PackedSlots
from kvlab.core.slots import EMPTY, as_numpy, growing_capacity, on_device, pick, tight_capacity


class DenseSlots:
    """Named tensors of slots, equally many in each head.

    A verb that may leave heads with different numbers returns what holds the slots from then on: itself or a
    `PackedSlots`.

    Args:
        tensors: `[rows, kv_heads, capacity, ...]` each.
        owned: whether they may be written to. Borrowed ones are read in place, and the first change makes a copy.
        length: how many slots are in use; all unless given.

    Attributes:
        start: where the slots in use begin; what is evicted near the front moves the few before it up instead of all
            after it.
    """

    lead = 3
    """How many dimensions of a tensor come before what one slot holds."""

    def __init__(self, tensors: dict[str, Tensor], owned: bool = False, length: int | None = None):
        self.tensors, self._owned, self.start = tensors, owned, 0
        self.length = self.capacity if length is None else length

    @property
    def _any(self) -> Tensor:
        return next(iter(self.tensors.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and KV heads."""
        return self._any.shape[0], self._any.shape[1]

    @property
    def capacity(self) -> int:
        return self._any.shape[2]

    @property
    def counts(self) -> list[int]:
        """Slots of each head, row by row."""
        rows, heads = self.shape
        return [self.length] * (rows * heads)

    @property
    def total(self) -> int:
        """Slots of all heads."""
        rows, heads = self.shape
        return rows * heads * self.length

    @property
    def ragged(self) -> bool:
        """Whether heads hold different numbers of slots."""
        return False

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def view(self, name: str) -> Tensor:
        """`[rows, kv_heads, length, ...]`."""
        return self.tensors[name][:, :, self.start : self.start + self.length]

    def of(self, tensor: Tensor, head: int) -> Tensor:
        """The slots `[count, ...]` of one head, counted row by row, in one of the tensors or in one made from it."""
        row, head = divmod(head, tensor.shape[1])
        return tensor[row, head, self.start : self.start + self.length]

    def runs(self) -> list[tuple[int, int]]:
        """Heads that hold equally many slots and lie one behind the other: the first, and how many."""
        rows, heads = self.shape
        return [(0, rows * heads)]

    def run(self, tensor: Tensor, first: int, n: int) -> Tensor:
        """The slots `[n, count, ...]` of a run, in one of the tensors or in one made from it."""
        return tensor[:, :, self.start : self.start + self.length].flatten(0, 1)

    def add(self, name: str, values: Tensor) -> None:
        """Another tensor, with `values` `[rows, kv_heads, length, ...]` in the slots in use."""
        self.tensors[name] = values.new_zeros(*values.shape[:2], self.capacity, *values.shape[3:])
        self.view(name).copy_(values)

    # ------------------------------------------------------------------ the verbs

    def append(self, new: Mapping[str, Tensor | int], n: int) -> None:
        """Add `n` slots to every head: `[rows, kv_heads, n, ...]` of each tensor, or one number for all."""
        self._reserve(n)
        first = self.start + self.length
        self.length += n
        for name, entries in new.items():
            self.tensors[name][:, :, first : first + n] = entries

    def extend(self, new: Mapping[str, Tensor], counts: list[int]) -> DenseSlots | PackedSlots:
        """Add `counts` slots to the heads: `[sum of counts, ...]` of each tensor, head by head."""
        if len(set(counts)) > 1:
            return self._packed().extend(new, counts)
        self.append({name: x.unflatten(0, (*self.shape, counts[0])) for name, x in new.items()}, counts[0])
        return self

    def evict(self, keep: Tensor, even: bool = False) -> DenseSlots | PackedSlots:
        """Keep only the slots `keep` `[rows, kv_heads, n]`, ascending, -1 at the end where a head keeps fewer.

        Args:
            even: no head keeps fewer, so that nobody has to look.
        """
        if not even and bool((keep == EMPTY).any()):
            return PackedSlots.picked(self, keep)
        n = keep.shape[2]
        anew = not self._owned or not self.start + n <= self.capacity <= 2 * n + 64
        moved = {name: self._moved(tensor, keep, anew) for name, tensor in self.tensors.items()}
        self.tensors, self.length, self._owned = moved, n, True
        if anew:
            self.start = 0
        return self

    def _moved(self, tensor: Tensor, keep: Tensor, anew: bool) -> Tensor:
        n, used = keep.shape[2], tensor[:, :, self.start : self.start + self.length]
        whole = tensor.new_empty(*tensor.shape[:2], tight_capacity(n), *tensor.shape[3:]) if anew else tensor
        start = 0 if anew else self.start
        out = whole[:, :, start : start + n]
        if tensor.dim() == 3 or not tensor.is_cpu:
            out.copy_(pick(used, keep))
            return whole
        # On a CPU, copying whole rows of one head at a time is ten times faster than one gather. It also needs no
        # second store: each head's entries pass through a buffer that stays in the processor's cache.
        for row in range(tensor.shape[0]):
            for head in range(tensor.shape[1]):
                out[row, head] = used[row, head].index_select(0, keep[row, head])
        return whole

    def drop(self, slot: Tensor | int) -> DenseSlots | PackedSlots:
        """Evict one slot of every head: the same one, or `[rows, kv_heads]` of them."""
        if isinstance(slot, int):
            return self._cut(slot, 1)
        if self._owned and all(tensor.is_cpu and tensor.is_contiguous() for tensor in self.tensors.values()):
            self._close(slot)
            return self
        rest = torch.arange(self.length - 1, device=slot.device).expand(*slot.shape, self.length - 1)
        return self.evict(rest + (rest >= slot[..., None]), even=True)

    def cut(self, first: list[int], n: list[int]) -> DenseSlots | PackedSlots:
        """Evict `n` slots of each head from slot `first` on, head by head."""
        if not any(n):
            return self
        if len(set(first)) == len(set(n)) == 1:
            return self._cut(first[0], n[0])
        if set(n) == {1}:
            return self.drop(on_device(first, self._any.device).view(self.shape))
        return self._packed().cut(first, n)

    def _cut(self, slot: int, n: int) -> DenseSlots:
        self._own()
        behind = self.length - slot - n
        for tensor in map(self.view, self.tensors):
            if slot < behind:
                tensor[:, :, n : slot + n] = tensor[:, :, :slot].clone()
            elif behind:
                tensor[:, :, slot:-n] = tensor[:, :, slot + n :].clone()
        self.start += n if slot < behind else 0
        self.length -= n
        return self

    def _close(self, slot: Tensor) -> None:
        """Move up what lies behind `slot` of each head; nothing else is touched."""
        gaps, end = (slot + self.start).flatten().tolist(), self.start + self.length
        for tensor in self.tensors.values():
            heads = as_numpy(tensor).reshape(len(gaps), -1)
            width = heads.shape[1] // self.capacity
            for entries, gap in zip(heads, gaps, strict=True):
                entries[gap * width : (end - 1) * width] = entries[(gap + 1) * width : end * width]
        self.length -= 1

    def put(self, slot: Tensor, new: Mapping[str, Tensor], heads: Tensor | None = None) -> None:
        """Overwrite one slot `[rows, kv_heads]` of every head with `[rows, kv_heads, ...]` of each tensor, or of those
        `heads` (bool, `[rows, kv_heads]`) only.
        """
        self._own()
        for name, entry in new.items():
            tensor = self.view(name)
            if heads is None:
                index = slot.view(*slot.shape, 1, *[1] * (tensor.dim() - 3)).expand(*slot.shape, 1, *tensor.shape[3:])
                tensor.scatter_(2, index, entry.unsqueeze(2).to(tensor.dtype))
            else:
                row, head = heads.nonzero(as_tuple=True)
                tensor[row, head, slot[heads]] = entry[heads].to(tensor.dtype)

    def truncate(self, n: int) -> None:
        """Forget the `n` newest slots of every head."""
        self.length -= n

    def expand(self, repeats: int) -> DenseSlots:
        """Repeat every head so often, one behind the other."""
        self.tensors = {name: x.repeat_interleave(repeats, dim=1) for name, x in self.tensors.items()}
        self._owned = True
        return self

    def reorder(self, rows: Tensor) -> DenseSlots:
        """The rows `rows` instead of the present ones."""
        self.tensors = {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}
        self._owned = True
        return self

    # ------------------------------------------------------------------ room

    def _packed(self) -> PackedSlots:
        """The same slots where heads may hold different numbers of them; nothing is copied."""
        self._own()
        tensors = {name: x.flatten(0, 2) for name, x in self.tensors.items()}
        return PackedSlots(tensors, self.shape, self.counts, [self.capacity] * len(self.counts), self.start)

    def _own(self) -> None:
        if not self._owned:
            self._reserve(1)

    def _reserve(self, n: int) -> None:
        """Own storage with room for `n` more slots."""
        capacity = self.capacity
        if self._owned and self.start + self.length + n <= capacity:
            return
        fits, room = self._owned and self.length + n <= capacity, growing_capacity(self.length + n)

        def moved(tensor: Tensor) -> Tensor:
            used = tensor[:, :, self.start : self.start + self.length]
            out = tensor if fits else tensor.new_zeros(*tensor.shape[:2], room, *tensor.shape[3:])
            out[:, :, : self.length] = used.clone() if fits else used
            return out

        self.tensors = {name: moved(tensor) for name, tensor in self.tensors.items()}
        self.start, self._owned = 0, True


class RecordedSlots(DenseSlots):
    """Slots of a recording, read where they lie: until something changes, whatever is appended lies behind them already
    and is not looked at.

    Args:
        tensors: `[rows, kv_heads, tokens, ...]` each, of the whole recording.
        length: how many slots are in use at first.
    """

    def __init__(self, tensors: dict[str, Tensor], length: int):
        super().__init__(tensors, length=length)

    def append(self, new: Mapping[str, Tensor | int], n: int) -> None:
        if self._owned:
            super().append(new, n)
        else:
            self.length += n
