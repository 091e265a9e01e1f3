"""The KV store of one layer, with three verbs: append, evict, merge; and its adapter to transformers' `Cache`.

A slot holds a key, a value, its original position (its rotation) and a fusion count. Slots stay sorted by arrival.
Heads may hold different numbers of entries: each head's entries lie at the front, empty slots carry position -1.
Rows are the sequences of a batch in a live run and the layers of a model in a replay; the store does not care.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.core.slots import EMPTY, pick


class LayerStore:
    """Entries of one layer.

    Args:
        keys, values: `[rows, kv_heads, length, head_dim]`. They are borrowed: read in place and never written to; the
            first change makes the store's own copy.
        positions: `[rows, kv_heads, length]` int64 original positions; 0 .. length-1 unless given.

    Attributes:
        columns: named per-slot tensors `[rows, kv_heads, slots, ...]` that a policy keeps beside the entries (scores,
            attention profiles); they move with their entries, and count as storage.
        memory: anything else a policy keeps for this layer, `[rows, ...]` each; counts as storage.
        scratch: what a policy hands from one verb of a step to the next; not counted, and not kept across steps.
        numbers: plain numbers that a policy remembers for this layer (a page size, the prompt's length).
        layers: the layer of each row.
        seen: how many tokens were ever appended, which is also the next token's position by default.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor | None = None):
        rows, kv_heads, length, _ = keys.shape
        if positions is None:
            positions = torch.arange(length, device=keys.device).expand(rows, kv_heads, length)
        self._keys, self._values, self._positions = keys, values, positions
        # Made when something is first merged: until then all counts are 1.
        self._fusion_counts: Tensor | None = None
        # Entries lie from here on; what is evicted near the front moves the few before it up instead of all after it.
        self._start = 0
        self._columns: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        self.scratch: dict[str, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self.layers: tuple[int, ...] = (0,) * rows
        self._budget: int | None = None
        self.length = length
        self.seen = length
        self.ragged = bool((positions == EMPTY).any())
        self._owned = False
        self._repeats = 1

    @classmethod
    def preallocated(cls, keys: Tensor, values: Tensor) -> LayerStore:
        """An empty store that writes into the given storage `[rows, kv_heads, capacity, head_dim]` (growing past it
        copies).
        """
        store = cls(keys[:, :, :0], values[:, :, :0])
        rows, kv_heads, capacity, _ = keys.shape
        store._keys, store._values = keys, values
        store._positions = torch.full((rows, kv_heads, capacity), EMPTY, device=keys.device)
        store._owned = True
        return store

    # ------------------------------------------------------------------ the policy's budget

    @property
    def budget(self) -> int:
        """Entries that each head may hold; known once the policy has compressed the prompt."""
        assert self._budget is not None, "a budget is set when the prompt is compressed"
        return self._budget

    @budget.setter
    def budget(self, entries: int) -> None:
        self._budget = entries

    @property
    def compressed(self) -> bool:
        """Whether a policy has seen the prompt to its end and has set the budget."""
        return self._budget is not None

    # ------------------------------------------------------------------ what is stored

    def _used(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, self._start : self._start + self.length]

    @property
    def keys(self) -> Tensor:
        return self._used(self._keys)

    @property
    def values(self) -> Tensor:
        return self._used(self._values)

    @property
    def positions(self) -> Tensor:
        """`[rows, kv_heads, slots]` int64, -1 in empty slots."""
        return self._used(self._positions)

    @property
    def fusion_counts(self) -> Tensor:
        """Fusion counts `[rows, kv_heads, slots]`: how many tokens an entry stands for, 1 for one that was never
        merged.
        """
        if self._fusion_counts is None:
            return torch.ones(1, 1, 1, device=self._keys.device).expand(self.positions.shape)
        return self._used(self._fusion_counts)

    def has_column(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> Tensor:
        return self._used(self._columns[name])

    def add_column(self, name: str, values: Tensor) -> None:
        """Keep `values` `[rows, kv_heads, slots, ...]` beside the entries; entries appended later start at zero."""
        if values.shape[:3] != self.positions.shape:
            raise ValueError(f"column {name!r} is {tuple(values.shape[:3])}, the store {tuple(self.positions.shape)}")
        column = values.new_zeros(*values.shape[:2], self.capacity, *values.shape[3:])
        self._used(column).copy_(values)
        self._columns[name] = column

    def remove_column(self, name: str) -> Tensor:
        """Forget a column, and give its last values `[rows, kv_heads, slots, ...]`."""
        return self._used(self._columns.pop(name))

    def part(self, rows: Tensor, start: int) -> LayerStore:
        """A store of its own of some sequences from slot `start` on, with their columns; their positions begin at 0."""
        store = LayerStore(self.keys[rows, :, start:], self.values[rows, :, start:])
        store.layers = self.layers[:1] * len(rows)
        for name in self._columns:
            store.add_column(name, self.column(name)[rows, :, start:])
        return store

    @property
    def occupied(self) -> Tensor:
        return self.positions != EMPTY

    @property
    def counts(self) -> Tensor:
        """`[rows, kv_heads]`: entries of each head."""
        return self.occupied.sum(-1)

    @property
    def capacity(self) -> int:
        return self._keys.shape[2]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that hold an entry (original positions are bookkeeping and not counted)."""
        return (int(self.counts.sum()) if self.ragged else self.entries) * self.entry_bytes

    @property
    def entries(self) -> int:
        """Slots of all heads, empty ones included."""
        return self._keys.shape[0] * self._keys.shape[1] * self.length

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value."""
        return sum(tensor.shape[-1] * tensor.element_size() for tensor in (self._keys, self._values))

    @property
    def aux_bytes(self) -> int:
        """Bytes that a policy keeps beside the entries: columns (occupied slots), fusion counts once merged, memory."""
        share = float(self.occupied.float().mean()) if self.ragged and self.length else 1.0
        columns = sum(self.column(name).numel() * c.element_size() for name, c in self._columns.items())
        if self._fusion_counts is not None and self.merged:
            columns += self.fusion_counts.numel() * self._fusion_counts.element_size()
        return round(columns * share) + sum(t.numel() * t.element_size() for t in self.memory.values())

    @property
    def merged(self) -> bool:
        """Whether any entry stands for several tokens."""
        if self._fusion_counts is None:
            return False
        return bool(((self.fusion_counts != 1) & self.occupied).any())

    @property
    def allocated_bytes(self) -> int:
        tensors = [*self._everything().values(), *self.memory.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        """Add `n` entries at the end of every head.

        Args:
            keys, values: `[rows, kv_heads, n, head_dim]`.
            positions: `[n]`, `[rows, 1, n]` or `[rows, kv_heads, n]`; the next `n` positions unless given.
        """
        n = keys.shape[2]
        if self._repeats > 1:
            keys, values = (x.repeat_interleave(self._repeats, dim=1) for x in (keys, values))
        if not self._owned or self._start + self.length + n > self.capacity:
            self._reserve(n)
        # The new slots are in use from here on: an empty slot holds zeros, since 0 x whatever lies there may be NaN.
        first = self._start + self.length
        self.length += n
        self.seen += n
        if self.ragged:
            if positions is None:
                positions = torch.arange(self.seen - n, self.seen, device=keys.device)
            self._append_ragged(keys, values, positions)
            return
        if positions is None and n > 1:
            positions = torch.arange(self.seen - n, self.seen, device=keys.device)
        self._keys[:, :, first : first + n] = keys
        self._values[:, :, first : first + n] = values
        # A single token's position is filled in as a number, which spares the hot path a tensor.
        self._positions[:, :, first : first + n] = self.seen - 1 if positions is None else positions
        if self._fusion_counts is not None:
            self._fusion_counts[:, :, first : first + n] = 1
        for column in self._columns.values():
            column[:, :, first : first + n] = 0

    def _append_ragged(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        n = keys.shape[2]
        for tensor, value in ((self.keys, 0), (self.values, 0), (self.positions, EMPTY)):
            tensor[:, :, self.length - n :] = value
        slots = self.counts[..., None] + torch.arange(n, device=keys.device)
        self.keys.scatter_(2, slots[..., None].expand_as(keys), keys.to(self._keys.dtype))
        self.values.scatter_(2, slots[..., None].expand_as(values), values.to(self._values.dtype))
        self.positions.scatter_(2, slots, positions.expand(slots.shape))
        if self._fusion_counts is not None:
            self.fusion_counts[:, :, self.length - n :] = 1
            self.fusion_counts.scatter_(2, slots, 1.0)
        for name in self._columns:
            column = self.column(name)
            column[:, :, self.length - n :] = 0
            where = slots.view(*slots.shape, *[1] * (column.dim() - 3)).expand(*slots.shape, *column.shape[3:])
            column.scatter_(2, where, 0)
        self.length = int(self.counts.max())

    def evict(self, keep: Tensor) -> None:
        """Keep only the slots `keep` `[rows, kv_heads, n]`, ascending, -1 at the end where a head keeps fewer."""
        if not self.length:
            return
        n = keep.shape[2]
        empty = keep == EMPTY
        self.ragged = bool(empty.any()) or (self.ragged and bool((pick(self.positions, keep) == EMPTY).any()))
        roomy = not self._owned or not self._start + n <= self.capacity <= 2 * n + 64
        moved = {name: self._moved(tensor, keep, roomy) for name, tensor in self._everything().items()}
        self._replace(moved)
        self.length, self._owned = n, True
        if roomy:
            self._start = 0
        if bool(empty.any()):
            self.positions.masked_fill_(empty, EMPTY)
        if self.ragged:
            self.length = int(self.counts.max())

    def drop(self, slot: Tensor | int) -> None:
        """Evict one slot of every head: the same one, or `[rows, kv_heads]` of them."""
        if isinstance(slot, Tensor):
            whole = self._keys.is_contiguous() and self._values.is_contiguous()
            if self.ragged or not self._owned or self._keys.device.type != "cpu" or not whole:
                rest = torch.arange(self.length - 1, device=slot.device).expand(*slot.shape, self.length - 1)
                self.evict(rest + (rest >= slot[..., None]))
            else:
                self._close(slot)
            return
        self._own()
        for tensor in map(self._used, self._everything().values()):
            if slot < self.length // 2:
                tensor[:, :, 1 : slot + 1] = tensor[:, :, :slot].clone()
            else:
                tensor[:, :, slot:-1] = tensor[:, :, slot + 1 :].clone()
        self._start += slot < self.length // 2
        self.length -= 1

    def _close(self, slot: Tensor) -> None:
        """Move up what lies behind `slot` of each head; nothing else is touched."""
        gaps, end = (slot + self._start).flatten().tolist(), self._start + self.length
        for tensor in self._everything().values():
            # NumPy moves a stretch of one axis into one that overlaps it, which PyTorch does only by way of a copy.
            bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            heads = bits.view(len(gaps), -1).numpy()
            width = heads.shape[1] // self.capacity
            for entries, gap in zip(heads, gaps, strict=True):
                entries[gap * width : (end - 1) * width] = entries[(gap + 1) * width : end * width]
        self.length -= 1

    def truncate(self, length: int) -> None:
        """Forget the newest entries of every head, until the fullest has `length` (pseudo-tokens, rejected drafts)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a store of {self.length} slots cannot be truncated to {length}")
        if self.ragged:
            # A head with fewer entries holds its newest further to the front.
            left = (self.counts - (self.length - length))[..., None]
            self._own()
            self.positions.masked_fill_(torch.arange(self.length, device=left.device) >= left, EMPTY)
        self.seen -= self.length - length
        self.length = length

    def merge(self, source: Tensor, target: Tensor, columns: dict[str, str] | None = None) -> None:
        """Fold the slots `source` `[rows, kv_heads, m]` into one slot `target` `[rows, kv_heads]` of each head.

        The target becomes the mean of all entries weighted by their fusion counts (ZSMerge eq. 7), its count their sum;
        it keeps its position. `columns` names how a column combines, "max" or "sum"; others stay as the target's.
        Evicting the sources is the caller's.
        """
        self._own()
        if self._fusion_counts is None:
            self._fusion_counts = torch.ones(self._positions.shape, device=self._keys.device)
        into = target[..., None]
        slots = torch.cat([into, source], -1)
        counts = pick(self.fusion_counts, slots)
        total = counts.sum(-1, keepdim=True)
        for tensor in (self.keys, self.values):
            mean = (pick(tensor, slots) * counts[..., None]).sum(2, keepdim=True) / total[..., None]
            tensor.scatter_(2, into[..., None].expand_as(mean), mean.to(tensor.dtype))
        self.fusion_counts.scatter_(2, into, total)
        for name, how in (columns or {}).items():
            column = pick(self.column(name), slots)
            combined = column.amax(2, keepdim=True) if how == "max" else column.sum(2, keepdim=True)
            self.column(name).scatter_(2, into, combined)

    def rewrite_keys(self, keys: Tensor) -> None:
        """Other keys `[rows, kv_heads, slots, head_dim]` for the same entries."""
        self._own()
        self.keys.copy_(keys)

    def expand(self, heads: int) -> None:
        """Give every query head a set of its own: keys and values are repeated for each head of a GQA group, and so is
        what is appended from here on. Raises ValueError where the KV heads do not divide `heads`.
        """
        if heads % self._keys.shape[1]:
            raise ValueError(f"{self._keys.shape[1]} KV heads cannot be repeated to {heads} query heads")
        repeats = heads // self._keys.shape[1]
        self._replace({name: x.repeat_interleave(repeats, dim=1) for name, x in self._everything().items()})
        self._repeats *= repeats
        self._owned = True

    def reorder(self, rows: Tensor) -> None:
        """Take the sequences `rows` in place of the present ones (beam search)."""
        self._replace({name: tensor.index_select(0, rows) for name, tensor in self._everything().items()})
        self.memory = {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()}
        self.layers = self.layers[:1] * len(rows)
        self._owned = True

    def forget_policy(self) -> None:
        """Drop what a policy kept beside the entries, and its budget: what is stored is as good as a new prompt."""
        self._columns, self.memory, self.scratch, self.numbers, self._budget = {}, {}, {}, {}, None

    # ------------------------------------------------------------------ storage

    def _everything(self) -> dict[str, Tensor]:
        core = {"keys": self._keys, "values": self._values, "positions": self._positions}
        if self._fusion_counts is not None:
            core["fusion counts"] = self._fusion_counts
        return core | {f"column {name}": column for name, column in self._columns.items()}

    def _replace(self, tensors: dict[str, Tensor]) -> None:
        self._keys, self._values = tensors["keys"], tensors["values"]
        self._positions, self._fusion_counts = tensors["positions"], tensors.get("fusion counts")
        self._columns = {name: tensors[f"column {name}"] for name in self._columns}

    def _moved(self, tensor: Tensor, keep: Tensor, roomy: bool) -> Tensor:
        n, used = keep.shape[2], self._used(tensor)
        whole = tensor.new_empty(*tensor.shape[:2], n + max(16, n // 8), *tensor.shape[3:]) if roomy else tensor
        start = 0 if roomy else self._start
        out = whole[:, :, start : start + n]
        if tensor.dim() == 3 or not tensor.is_cpu:
            out.copy_(pick(used, keep))
            return whole
        # On a CPU, copying whole rows of one head at a time is ten times faster than one gather, and needs no second
        # store: each head's entries pass through a buffer that stays in the processor's cache.
        slots = keep.clamp_min(0)
        for row in range(tensor.shape[0]):
            for head in range(tensor.shape[1]):
                out[row, head] = used[row, head].index_select(0, slots[row, head])
        return whole

    def _own(self) -> None:
        if not self._owned:
            self._reserve(1)

    def _reserve(self, n: int) -> None:
        """Own storage with room for `n` more slots, growing by an eighth: appending costs amortised constant time."""
        if self._owned and self._start + self.length + n <= self.capacity:
            return
        fits = self._owned and self.length + n <= self.capacity
        room = self.length + n + max(16, (self.length + n) // 8)

        def moved(tensor: Tensor) -> Tensor:
            out = tensor if fits else tensor.new_zeros(*tensor.shape[:2], room, *tensor.shape[3:])
            used = self._used(tensor)
            out[:, :, : self.length] = used.clone() if fits else used
            return out

        self._replace({name: moved(tensor) for name, tensor in self._everything().items()})
        self._start, self._owned = 0, True
