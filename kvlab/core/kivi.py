"""KIVI (Liu et al., 2024, arXiv 2402.02750): 2 or 4 bits for an entry that is no longer among the newest.

Keys are rounded per channel, in groups of `group` consecutive entries of a head. Channels differ in size, and an
outlying channel spoils only itself. Values are rounded per token, in groups of `group` channels. Both are asymmetric:
zero = the group's minimum, step = (maximum - minimum) / (2^bits - 1), code = round((x - zero) / step) (the paper's
section 3.1 and algorithm 1). Zeros and steps are float16.

The paper says nothing of eviction. Here an entry refers to the group of keys that it was rounded with. The group's
zeros and steps live as long as any entry refers to them. Only a merge rounds an entry twice. Zeros are rounded down to
float16 and steps up. So the codes span the whole group, and no number is off by more than half a step. The newest
`residual` tokens, by their positions, are in the model's precision; after an eviction these may be few entries. Keys
and values leave together, in the order of arrival, whenever a head has `group` older entries. (The paper empties the
keys' residual at once, and lets values leave one by one.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvlab.core.dense_slots import DenseSlots
from kvlab.core.entries import AsIs, Get, Run, ceil_to_float16, floor_to_float16
from kvlab.core.slots import EMPTY, KEYS, POSITIONS, VALUES, blank, pick

GROUP = "group"
"""Which group of keys an entry was rounded with: bookkeeping, as its position is, and not counted in its bytes."""

PIECE = 1024
"""How many groups are rounded at once."""


def rounded(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8, of the shape of `x`), steps and zeros (float16) of the groups that `dim` of `x` goes through."""
    x = x.float()
    lowest, highest = x.aminmax(dim=dim, keepdim=True)
    zeros = floor_to_float16(lowest)
    steps = ceil_to_float16((highest - zeros.float()) / (2**bits - 1))
    return codes(x, steps, zeros, bits), steps, zeros


def codes(x: Tensor, steps: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Numbers in steps above zero, uint8; what lies outside of the group's range goes to the end that is nearest."""
    above = torch.where(steps > 0, (x.float() - zeros.float()) / steps.float(), 0)
    return above.round().clamp(0, 2**bits - 1).to(torch.uint8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., head_dim]` in bytes `[..., head_dim x bits / 8]`: byte i has channels i, i + n, ... from its lowest
    bits on, n how many bytes there are. Of 3 bits, the lower two of all channels come first.
    """
    if bits == 3:
        return torch.cat([pack_codes(codes & 3, 2), pack_codes(codes >> 2, 1)], -1)
    parts = codes.chunk(8 // bits, dim=-1)
    out = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        out |= part << (bits * i)
    return out


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack_codes`."""
    if bits == 3:
        third = packed.shape[-1] // 3
        return unpack_codes(packed[..., : 2 * third], 2) | unpack_codes(packed[..., 2 * third :], 1) << 2
    mask = 2**bits - 1
    return torch.cat([(packed >> (bits * i)) & mask for i in range(8 // bits)], -1)


class PackedCodes(AsIs):
    """The entries that have been rounded: `keys` and `values` as packed codes, `group`, and the values' own steps
    and zeros `[..., head_dim / group]`.

    Attributes:
        steps, zeros: of the groups of keys, `[groups, head_dim]`.
    """

    def __init__(self, like: AsIs, bits: int, group: int):
        self.bits, self.group = bits, group
        self.dtype, self.head_dim = like.dtype, like.head_dim
        # One of keys and values has no channel where the other half is stored in another form.
        keys, values = (torch.empty(0, n, dtype=torch.float32, device=like.device) for n in like.widths)
        self.steps, self.zeros = keys.half(), keys.half()
        none = self._rounded(keys.view(0, group, like.head_dim), values) | {
            POSITIONS: torch.empty(0, dtype=torch.int32, device=like.device)
        }
        self.slots = DenseSlots(
            {name: x.new_empty(*like.shape, 0, *x.shape[1:]) for name, x in none.items()}, owned=True
        )

    def _rounded(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Whole groups of keys `[n, group, head_dim]`, and values `[n x group, head_dim]`, rounded."""
        found, steps, zeros = rounded(keys, self.bits, -2)
        first = len(self.steps)
        self.steps, self.zeros = torch.cat([self.steps, steps[:, 0]]), torch.cat([self.zeros, zeros[:, 0]])
        number = torch.arange(first, len(self.steps), dtype=torch.int32, device=keys.device)
        return {
            KEYS: pack_codes(found.flatten(0, 1), self.bits),
            GROUP: number.repeat_interleave(self.group),
            **self._values(values),
        }

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor, counts: list[int]) -> None:
        """Round whole groups, `counts` entries of each head: `[sum of counts, head_dim]`, head by head."""
        # Piece by piece, since what is made on the way takes several times as much as the entries.
        pieces = zip(keys.split(PIECE * self.group), values.split(PIECE * self.group), strict=True)
        made = [self._rounded(some.unflatten(0, (-1, self.group)), theirs) for some, theirs in pieces]
        new = {name: torch.cat([piece[name] for piece in made]) for name in made[0]}
        self.slots = self.slots.extend(new | {POSITIONS: positions.int()}, counts)

    def _values(self, values: Tensor) -> dict[str, Tensor]:
        """Values `[..., head_dim]`, rounded each by itself."""
        found, steps, zeros = rounded(values.unflatten(-1, (-1, self.group)), self.bits, -1)
        return {
            VALUES: pack_codes(found.flatten(-2), self.bits),
            f"{VALUES} step": steps.squeeze(-1),
            f"{VALUES} zero": zeros.squeeze(-1),
        }

    def unpacked(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        found = unpack_codes(get(name), self.bits).to(torch.float32)
        if name == KEYS and not len(self.steps):
            # No entry is left, but there may be room for some.
            return found.to(self.dtype)
        if name == KEYS:
            number = get(GROUP).long()
            # On a CPU, a lookup of rows is faster than an index of several dimensions.
            steps, zeros = (
                table.index_select(0, number.flatten()).view(found.shape) for table in (self.steps, self.zeros)
            )
            return found.mul_(steps).add_(zeros).to(self.dtype)
        parts = found.unflatten(-1, (-1, self.group))
        parts.mul_(get(f"{name} step")[..., None]).add_(get(f"{name} zero")[..., None])
        return found.to(self.dtype)

    def sweep(self) -> None:
        """Forget the steps and zeros that no entry refers to any more."""
        if not len(self.steps):
            return
        numbers = self.slots.tensors[GROUP]
        used = torch.zeros(len(self.steps), dtype=torch.bool, device=numbers.device)
        for first, n in self.slots.runs():
            used[self.slots.run(numbers, first, n).flatten().long()] = True
        if bool(used.all()):
            return
        self.steps, self.zeros = self.steps[used], self.zeros[used]
        new = (used.cumsum(0) - 1).clamp_min(0).to(torch.int32)
        # In slots that are out of use may stand whatever there was.
        self.slots.tensors[GROUP] = new[numbers.long().clamp(0, len(new) - 1)]

    def put_where(self, slot: Tensor, keys: Tensor, values: Tensor, heads: Tensor) -> None:
        """Overwrite the slot `[rows, kv_heads]` of these `heads` with entries `[rows, kv_heads, head_dim]`; keys are
        rounded with the steps and zeros of the group that is there.
        """
        group = pick(self.slots.view(GROUP), slot[..., None])[..., 0].long()
        found = codes(keys, self.steps[group], self.zeros[group], self.bits)
        self.slots.put(slot, {KEYS: pack_codes(found, self.bits), **self._values(values)}, heads)

    @property
    def fixed_bytes(self) -> int:
        return sum(table.numel() * table.element_size() for table in (self.steps, self.zeros))

    def bytes_of(self, slots: Tensor) -> int:
        read = slots >= 0
        groups = pick(self.slots.view(GROUP), slots)[read].unique() if bool(read.any()) else []
        return int(read.sum()) * self.entry_bytes() + len(groups) * self.fixed_bytes // max(len(self.steps), 1)

    @property
    def key_bytes(self) -> int:
        return self.slots.total * self.entry_bytes(KEYS) + self.fixed_bytes


class Kivi:
    """Entries in a few bits, but for the newest tokens.

    Args:
        entries: in the model's precision; borrowed until the first is rounded.
        bits: 2 or 4.
        group: how many entries share the steps and zeros of their keys, and how many channels those of their values.
        residual: how many of the newest tokens are in the model's precision.
    """

    def __init__(self, entries: AsIs, bits: int, group: int, residual: int):
        self.new, self.old = entries, PackedCodes(entries, bits, group)
        self.dtype, self.head_dim = entries.dtype, entries.head_dim
        self.group, self.residual = group, residual
        self._next = 0

    # ------------------------------------------------------------------ reading

    @property
    def shape(self) -> tuple[int, int]:
        return self.new.shape

    @property
    def device(self) -> torch.device:
        return self.new.device

    @property
    def counts(self) -> list[int]:
        return [old + new for old, new in zip(self.old.counts, self.new.counts, strict=True)]

    @property
    def length(self) -> int:
        return max(self.counts)

    @property
    def ragged(self) -> bool:
        return len(set(self.counts)) > 1

    def _split(self) -> Tensor:
        """How many entries of each head are rounded, `[rows, kv_heads]`."""
        return torch.tensor(self.old.counts, device=self.device).view(self.shape)

    def read(self, name: str) -> Tensor:
        if not self.old.slots.total:
            return self.new.read(name)
        if not self.old.ragged and not self.new.ragged:
            return torch.cat([self.old.read(name), self.new.read(name)], 2)
        return self._side_by_side(name, list(self._heads(name))).unflatten(0, self.shape)

    def row(self, name: str, row: int) -> Tensor:
        kv_heads = self.shape[1]
        heads = range(row * kv_heads, (row + 1) * kv_heads)
        parts = [torch.cat([self.old.head(name, head), self.new.head(name, head)]) for head in heads]
        return self._side_by_side(name, parts)

    def _side_by_side(self, name: str, parts: list[Tensor]) -> Tensor:
        """Heads `[count, ...]` as one tensor `[heads, length, ...]`, with empty slots at the end of shorter ones."""
        out = parts[0].new_full((len(parts), self.length, *parts[0].shape[1:]), blank(name))
        for head, part in zip(out, parts, strict=True):
            head[: len(part)] = part
        return out

    def _heads(self, name: str) -> Iterator[Tensor]:
        """The entries `[count, ...]` of one head after the other."""
        pairs = zip(self.old.heads(name), self.new.heads(name), strict=True)
        return (torch.cat(pair) for pair in pairs)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        behind = slots - self._split()[..., None]
        older = behind < 0
        if not self.old.slots.total or not bool(older.any()):
            return self.new.gather(behind)
        rounded = self.old.gather(slots.masked_fill(~older, 0))
        if bool(older.all()):
            return rounded
        newer = self.new.gather(behind)
        keys, values = (torch.where(older[..., None], *pair) for pair in zip(rounded, newer, strict=True))
        return keys, values

    def since(self, name: str, slot: int) -> Tensor:
        split = set(self.old.counts)
        if len(split) == 1 and slot >= min(split):
            return self.new.since(name, slot - min(split))
        return self.read(name)[:, :, slot:]

    def rounded_slots(self) -> Tensor:
        return torch.arange(self.length, device=self.device) < self._split()[..., None]

    def runs(self) -> Iterator[Run]:
        if not self.ragged:
            yield slice(0, len(self.counts)), self.read(KEYS).flatten(0, 1), self.read(VALUES).flatten(0, 1)
            return
        for head, (keys, values) in enumerate(zip(self._heads(KEYS), self._heads(VALUES), strict=True)):
            yield slice(head, head + 1), keys[None], values[None]

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | int) -> None:
        self.new.append(keys, values, positions)

    def quantise(self, seen: int) -> None:
        if seen < self._next:
            return
        positions = self.new.read(POSITIONS)
        # Entries are rounded in the order of arrival: one that lies behind a newer entry waits for it.
        older = (positions != EMPTY) & (positions < seen - self.residual)
        ready = older.int().cumprod(-1).sum(-1).flatten().tolist()
        # A token that comes makes one older at most.
        self._next = seen + min(self.group - n % self.group for n in ready)
        leaving = [n // self.group * self.group for n in ready]
        if not any(leaving):
            return
        keys, values, found = (
            torch.cat([entries[:n] for entries, n in zip(self.new.heads(name), leaving, strict=True)])
            for name in (KEYS, VALUES, POSITIONS)
        )
        self.old.extend(keys, values, found, leaving)
        counts, first = (
            torch.tensor(each, device=self.device).view(*self.shape, 1) for each in (self.new.counts, leaving)
        )
        slots = torch.arange(int((counts - first).max()), device=self.device) + first
        # Anew and not in place, so that what the entries took is free.
        self.new.evict(slots.masked_fill(slots >= counts, EMPTY))

    @property
    def next_quantisation(self) -> int:
        return self._next

    def evict(self, keep: Tensor, even: bool = False) -> None:
        split = self._split()[..., None]
        rounded = (keep != EMPTY) & (keep < split)
        before, n = rounded.sum(-1, keepdim=True), (keep != EMPTY).sum(-1, keepdim=True)
        if self.old.slots.total:
            most = int(before.max())
            self.old.evict(keep[..., :most].masked_fill(~rounded[..., :most], EMPTY))
            self.old.sweep()
        behind = torch.arange(int((n - before).max()), device=keep.device) + before
        slots = keep.gather(-1, behind.clamp_max(keep.shape[-1] - 1)) - split
        self.new.evict(slots.masked_fill(behind >= n, EMPTY))

    def drop(self, slot: Tensor | int) -> None:
        heads = len(self.counts)
        self.cut([slot] * heads if isinstance(slot, int) else slot.flatten().tolist(), [1] * heads)

    def cut(self, first: list[int], n: list[int]) -> None:
        split = self.old.counts
        rounded = [max(min(slot + lost, old) - slot, 0) for slot, lost, old in zip(first, n, split, strict=True)]
        if any(rounded):
            self.old.cut([min(slot, old) for slot, old in zip(first, split, strict=True)], rounded)
            self.old.sweep()
        behind = [max(slot - old, 0) for slot, old in zip(first, split, strict=True)]
        self.new.cut(behind, [lost - old for lost, old in zip(n, rounded, strict=True)])

    def truncate(self, n: int) -> None:
        lost = [min(n, count) for count in self.counts]
        # Positions come again, so that entries of the same age as those that left may be waiting sooner.
        self._next = 0
        self.cut([count - less for count, less in zip(self.counts, lost, strict=True)], lost)

    def put(self, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        rounded = slot < self._split()
        if bool(rounded.any()):
            self.old.put_where(slot.where(rounded, 0), keys, values, rounded)
        if not bool(rounded.all()):
            self.new.slots.put((slot - self._split()).where(~rounded, 0), {KEYS: keys, VALUES: values}, ~rounded)

    def expand(self, repeats: int) -> None:
        self.old.expand(repeats)
        self.new.expand(repeats)

    def reorder(self, rows: Tensor) -> None:
        self.old.reorder(rows)
        self.new.reorder(rows)

    # ------------------------------------------------------------------ bytes

    @property
    def kv_bytes(self) -> int:
        return self.old.kv_bytes + self.new.kv_bytes

    @property
    def key_bytes(self) -> int:
        return self.old.key_bytes + self.new.key_bytes

    def bytes_of(self, slots: Tensor) -> int | Tensor:
        split = self._split()[..., None]
        older = slots.masked_fill(slots >= split, EMPTY)
        newer = (slots - split).masked_fill(slots < split, EMPTY)
        return self.old.bytes_of(older) + self.new.bytes_of(newer)

    @property
    def allocated_bytes(self) -> int:
        return self.old.allocated_bytes + self.new.allocated_bytes

    def plain(self) -> AsIs:
        return AsIs.of(*(self.read(name) for name in (KEYS, VALUES, POSITIONS)))
