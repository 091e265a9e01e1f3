"""Slots of heads that hold different numbers of them, one head behind the other and none padded to the fullest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kvlab.core.slots import EMPTY, as_numpy, blank, growing_capacity, on_device, tight_capacity


class Slots(Protocol):
    """The source of a `PackedSlots`: another one, or a `DenseSlots`."""

    tensors: dict[str, Tensor]
    lead: int

    @property
    def shape(self) -> tuple[int, int]: ...

    def of(self, tensor: Tensor, head: int) -> Tensor: ...


class PackedSlots:
    """Named tensors of slots `[room, ...]`, in which every head has a region of its own.

    A head is counted row by row: number `row x kv_heads + head`.

    Args:
        tensors: `[room, ...]` each.
        shape: rows and KV heads.
        counts: slots of each head.
        rooms: slots of each head's region; the regions lie one behind the other.
        start: where in its region the slots of a head begin.
    """

    lead = 1
    """How many dimensions of a tensor come before what one slot holds."""

    def __init__(
        self, tensors: dict[str, Tensor], shape: tuple[int, int], counts: list[int], rooms: list[int], start: int = 0
    ):
        self.tensors, self.shape, self.counts, self._rooms = tensors, shape, list(counts), rooms
        self._regions = [0, *accumulate(rooms)][:-1]
        self._starts = [region + start for region in self._regions]

    @classmethod
    def filled(
        cls,
        source: Slots,
        shape: tuple[int, int],
        counts: list[int],
        piece: Callable[[Tensor, int], Tensor],
        room: Callable[[int], int] = tight_capacity,
    ) -> PackedSlots:
        """Tensors like the source's, into which `piece` of each (the tensor, the head) brings `[count, ...]`."""
        rooms = [room(count) for count in counts]
        made = cls({}, shape, counts, rooms)
        for name, tensor in source.tensors.items():
            out = made.tensors[name] = tensor.new_zeros(sum(rooms), *tensor.shape[source.lead :])
            for head, (start, count) in enumerate(zip(made._starts, counts, strict=True)):
                if count:
                    out[start : start + count] = piece(tensor, head)
        return made

    @classmethod
    def picked(cls, source: Slots, keep: Tensor) -> PackedSlots:
        """The slots `keep` `[rows, kv_heads, n]` of the source, -1 at the end where a head keeps fewer."""
        counts = (keep != EMPTY).sum(-1).flatten().tolist()
        slots = keep.flatten(0, 1)

        def piece(tensor: Tensor, head: int) -> Tensor:
            return source.of(tensor, head).index_select(0, slots[head, : counts[head]])

        return cls.filled(source, source.shape, counts, piece)

    @property
    def starts(self) -> list[int]:
        """Where in the tensors the slots of each head begin."""
        return self._starts

    @property
    def length(self) -> int:
        """Slots of the fullest head."""
        return max(self.counts)

    @property
    def total(self) -> int:
        """Slots of all heads."""
        return sum(self.counts)

    @property
    def ragged(self) -> bool:
        """Whether heads hold different numbers of slots."""
        return len(set(self.counts)) > 1

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def of(self, tensor: Tensor, head: int) -> Tensor:
        """The slots `[count, ...]` of one head in one of the tensors, or in one made from it."""
        start = self._starts[head]
        return tensor[start : start + self.counts[head]]

    def runs(self) -> list[tuple[int, int]]:
        """Heads that hold equally many slots and lie alike, one behind the other: the first, and how many."""
        alike = [
            (count, room, start - region)
            for count, room, start, region in zip(self.counts, self._rooms, self._starts, self._regions, strict=True)
        ]
        firsts = [head for head in range(len(alike)) if head == 0 or alike[head] != alike[head - 1]]
        return [(first, end - first) for first, end in zip(firsts, [*firsts[1:], len(alike)], strict=True)]

    def run(self, tensor: Tensor, first: int, n: int) -> Tensor:
        """The slots `[n, count, ...]` of a run, in one of the tensors or in one made from it."""
        region, start, room = self._regions[first], self._starts[first], self._rooms[first]
        heads = tensor[region : region + n * room].unflatten(0, (n, room))
        return heads[:, start - region : start - region + self.counts[first]]

    def view(self, name: str) -> Tensor:
        """`[rows, kv_heads, length, ...]`: a copy with empty slots at the end of heads that hold fewer; in place where
        all hold equally many.
        """
        tensor, runs = self.tensors[name], self.runs()
        if len(runs) == 1:
            return self.run(tensor, *runs[0]).unflatten(0, self.shape)
        out = tensor.new_full((len(self.counts), self.length, *tensor.shape[1:]), blank(name))
        for first, n in runs:
            out[first : first + n, : self.counts[first]] = self.run(tensor, first, n)
        return out.unflatten(0, self.shape)

    # ------------------------------------------------------------------ the verbs

    def append(self, new: Mapping[str, Tensor | int], n: int) -> None:
        """Add `n` slots to every head: `[rows, kv_heads, n, ...]` of each tensor, or one number for all."""
        flat = {name: x.flatten(0, 2) if isinstance(x, Tensor) else x for name, x in new.items()}
        self.extend(flat, [n] * len(self.counts))

    def extend(self, new: Mapping[str, Tensor | int], counts: list[int]) -> PackedSlots:
        """Add `counts` slots to the heads: `[sum of counts, ...]` of each tensor, head by head."""
        self._reserve(counts)
        ends = [start + count for start, count in zip(self._starts, self.counts, strict=True)]
        device = next(iter(self.tensors.values())).device
        if set(counts) == {1}:
            slots = on_device(ends, device)
        else:
            slots = torch.cat([torch.arange(end, end + n) for end, n in zip(ends, counts, strict=True)]).to(device)
        for name, entries in new.items():
            if isinstance(entries, int):
                self.tensors[name].index_fill_(0, slots, entries)
            else:
                self.tensors[name].index_copy_(0, slots, entries.to(self.tensors[name].dtype))
        self.counts = [count + n for count, n in zip(self.counts, counts, strict=True)]
        return self

    def evict(self, keep: Tensor, even: bool = False) -> PackedSlots:
        """Keep only the slots `keep` `[rows, kv_heads, n]`, ascending, -1 at the end where a head keeps fewer; `even`
        heads are not looked at otherwise.
        """
        # Slots that a head does not have are empty, too.
        counts = on_device(self.counts, keep.device).view(self.shape)[..., None]
        return PackedSlots.picked(self, keep.masked_fill(keep >= counts, EMPTY))

    def drop(self, slot: Tensor | int) -> PackedSlots:
        """Evict one slot of every head: the same one, or `[rows, kv_heads]` of them."""
        heads = len(self.counts)
        return self.cut([slot] * heads if isinstance(slot, int) else slot.flatten().tolist(), [1] * heads)

    def cut(self, first: list[int], n: list[int]) -> PackedSlots:
        """Evict `n` slots of each head from slot `first` on, head by head."""
        for head, (slot, lost) in enumerate(zip(first, n, strict=True)):
            if not lost:
                continue
            start, count = self._starts[head], self.counts[head]
            behind = count - slot - lost
            if slot < behind:
                self._move(start, slot, lost)
                self._starts[head] = start + lost
            elif behind:
                self._move(start + slot + lost, behind, -lost)
            self.counts[head] = count - lost
        return self

    def put(self, slot: Tensor, new: Mapping[str, Tensor], heads: Tensor | None = None) -> None:
        """Overwrite one slot `[rows, kv_heads]` of every head with `[rows, kv_heads, ...]` of each tensor, or of those
        `heads` (bool, `[rows, kv_heads]`) only.
        """
        slots = slot + on_device(self._starts, slot.device).view(self.shape)
        wanted = torch.ones(self.shape, dtype=torch.bool, device=slot.device) if heads is None else heads
        for name, entry in new.items():
            self.tensors[name].index_copy_(0, slots[wanted], entry[wanted].to(self.tensors[name].dtype))

    def truncate(self, n: int) -> None:
        """Forget the `n` newest slots of every head."""
        self.counts = [max(count - n, 0) for count in self.counts]

    def expand(self, repeats: int) -> PackedSlots:
        """Repeat every head so often, one behind the other."""
        rows, heads = self.shape
        return self._select_heads(
            [head for head in range(rows * heads) for _ in range(repeats)], (rows, heads * repeats)
        )

    def reorder(self, rows: Tensor) -> PackedSlots:
        """The rows `rows` instead of the present ones."""
        heads = self.shape[1]
        return self._select_heads(
            [row * heads + head for row in rows.tolist() for head in range(heads)], (len(rows), heads)
        )

    def _select_heads(self, heads: list[int], shape: tuple[int, int]) -> PackedSlots:
        counts = [self.counts[head] for head in heads]
        return PackedSlots.filled(self, shape, counts, lambda tensor, head: self.of(tensor, heads[head]))

    # ------------------------------------------------------------------ room

    def _move(self, start: int, n: int, by: int) -> None:
        """Move `n` slots from `start` on by so many, which may be fewer than they are."""
        for tensor in self.tensors.values():
            if tensor.is_cpu:
                array = as_numpy(tensor)
                array[start + by : start + by + n] = array[start : start + n]
            else:
                tensor[start + by : start + by + n] = tensor[start : start + n].clone()

    def _reserve(self, counts: list[int]) -> None:
        """Room for so many more slots in each head."""
        grow = False
        for head, n in enumerate(counts):
            start, region, count = self._starts[head], self._regions[head], self.counts[head]
            if start + count + n <= region + self._rooms[head]:
                continue
            if count + n <= self._rooms[head]:
                # Entries that were evicted near the front left room there.
                self._move(start, count, region - start)
                self._starts[head] = region
            else:
                grow = True
        if grow:
            needed = [count + n for count, n in zip(self.counts, counts, strict=True)]
            rooms = iter([growing_capacity(n) for n in needed])
            grown = PackedSlots.filled(self, self.shape, self.counts, self.of, lambda _: next(rooms))
            self.tensors, self._rooms = grown.tensors, grown._rooms
            self._regions, self._starts = grown._regions, grown._starts
