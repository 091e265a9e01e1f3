"""The KV store of one layer, with three verbs: append, evict, merge; and its adapter to transformers' `Cache`.

A slot holds a key, a value, its original position (its rotation) and a fusion count. Slots stay sorted by arrival.
Heads may hold different numbers of entries: each head's entries lie at the front, empty slots carry position -1.
Rows are the sequences of a batch in a live run and the layers of a model in a replay; the store does not care.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlab.errors import KvlabError

EMPTY = -1


class LayerStore:
    """Entries of one layer.

    Args:
        keys, values: `[rows, kv_heads, length, head_dim]`. They are borrowed: read in place and never written to; the
            first change makes the store's own copy.
        positions: `[rows, kv_heads, length]` int64 original positions; 0 .. length-1 unless given.

    Attributes:
        columns: named per-slot tensors `[rows, kv_heads, slots, ...]` that a policy keeps beside the entries (scores,
            attention profiles); they move with their entries, and count as storage.
        memory: anything else a policy keeps for this layer; counts as storage.
        budget: entries that each head may hold once the prompt is compressed; None before.
        seen: how many tokens were ever appended, which is also the next token's position by default.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor | None = None):
        rows, kv_heads, length, _ = keys.shape
        if positions is None:
            positions = torch.arange(length, device=keys.device).expand(rows, kv_heads, length)
        self._keys, self._values, self._positions = keys, values, positions
        self._weights = torch.ones(rows, kv_heads, length, device=keys.device)
        self._columns: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}
        self.budget: int | None = None
        self.length = length
        self.seen = length
        self.ragged = bool((positions == EMPTY).any())
        self._owned = False

    @classmethod
    def preallocated(cls, keys: Tensor, values: Tensor) -> LayerStore:
        """An empty store that writes into the given storage `[rows, kv_heads, capacity, head_dim]` (growing past it
        copies).
        """
        store = cls(keys[:, :, :0], values[:, :, :0])
        rows, kv_heads, capacity, _ = keys.shape
        store._keys, store._values = keys, values
        store._positions = torch.full((rows, kv_heads, capacity), EMPTY, device=keys.device)
        store._weights = torch.ones(rows, kv_heads, capacity, device=keys.device)
        store._owned = True
        return store

    # ------------------------------------------------------------------ what is stored

    @property
    def keys(self) -> Tensor:
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        return self._values[:, :, : self.length]

    @property
    def positions(self) -> Tensor:
        """`[rows, kv_heads, slots]` int64, -1 in empty slots."""
        return self._positions[:, :, : self.length]

    @property
    def weights(self) -> Tensor:
        """Fusion counts `[rows, kv_heads, slots]`: how many tokens an entry stands for, 1 for one that was never
        merged.
        """
        return self._weights[:, :, : self.length]

    def column(self, name: str) -> Tensor:
        return self._columns[name][:, :, : self.length]

    def add_column(self, name: str, values: Tensor) -> None:
        """Keep `values` `[rows, kv_heads, slots, ...]` beside the entries; entries appended later start at zero."""
        if values.shape[:3] != self.positions.shape:
            raise ValueError(f"column {name!r} is {tuple(values.shape[:3])}, the store {tuple(self.positions.shape)}")
        column = values.new_zeros(*values.shape[:2], self.capacity, *values.shape[3:])
        column[:, :, : self.length] = values
        self._columns[name] = column

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
        entries = int(self.counts.sum()) if self.ragged else self.positions.numel()
        return entries * (
            self._keys.shape[-1] * self._keys.element_size() + self._values.shape[-1] * self._values.element_size()
        )

    @property
    def aux_bytes(self) -> int:
        """Bytes that a policy keeps beside the entries: columns (occupied slots), fusion counts once merged, memory."""
        share = float(self.occupied.float().mean()) if self.ragged and self.length else 1.0
        columns = sum(self.column(name).numel() * c.element_size() for name, c in self._columns.items())
        if self.merged:
            columns += self.weights.numel() * self._weights.element_size()
        return round(columns * share) + sum(t.numel() * t.element_size() for t in self.memory.values())

    @property
    def merged(self) -> bool:
        return bool(((self.weights != 1) & self.occupied).any()) if self.ragged else bool((self.weights != 1).any())

    @property
    def allocated_bytes(self) -> int:
        tensors = [
            self._keys,
            self._values,
            self._positions,
            self._weights,
            *self._columns.values(),
            *self.memory.values(),
        ]
        return sum(t.numel() * t.element_size() for t in tensors)

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        """Add `n` entries at the end of every head.

        Args:
            keys, values: `[rows, kv_heads, n, head_dim]`.
            positions: `[n]`, `[rows, 1, n]` or `[rows, kv_heads, n]`; the next `n` positions unless given.
        """
        n = keys.shape[2]
        if positions is None:
            positions = torch.arange(self.seen, self.seen + n, device=keys.device)
        self._reserve(self.length + n)
        new = slice(self.length, self.length + n)
        if self.ragged:
            self._append_ragged(keys, values, positions)
        else:
            self._keys[:, :, new], self._values[:, :, new], self._positions[:, :, new] = keys, values, positions
            self._weights[:, :, new] = 1
            for column in self._columns.values():
                column[:, :, new] = 0
        self.length += n
        self.seen += n
        if self.ragged:
            self.length = int(self.counts.max())

    def _append_ragged(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        n = keys.shape[2]
        new = slice(self.length, self.length + n)
        # A head with fewer entries has an empty slot there: zeros, since 0 x whatever lies in fresh memory may be NaN.
        self._keys[:, :, new], self._values[:, :, new], self._weights[:, :, new] = 0, 0, 1
        self._positions[:, :, self.length :] = EMPTY
        slots = self.counts[..., None] + torch.arange(n, device=keys.device)
        wide = slots[..., None].expand(*slots.shape, keys.shape[-1])
        self._keys.scatter_(2, wide, keys.to(self._keys.dtype))
        self._values.scatter_(2, slots[..., None].expand(*slots.shape, values.shape[-1]), values.to(self._values.dtype))
        self._positions.scatter_(2, slots, positions.expand(slots.shape))
        self._weights.scatter_(2, slots, 1.0)
        for column in self._columns.values():
            column[:, :, new] = 0
            where = slots.view(*slots.shape, *[1] * (column.dim() - 3)).expand(*slots.shape, *column.shape[3:])
            column.scatter_(2, where, 0)

    def evict(self, keep: Tensor) -> None:
        """Keep only the slots `keep` `[rows, kv_heads, n]`, ascending, -1 at the end where a head keeps fewer."""
        n = keep.shape[2]
        empty = keep == EMPTY
        self.ragged = bool(empty.any()) or (self.ragged and bool((self._pick(self._positions, keep) == EMPTY).any()))
        roomy = not self._owned or not n <= self.capacity <= 2 * n + 64
        for name in ("_keys", "_values", "_positions", "_weights"):
            setattr(self, name, self._moved(getattr(self, name), keep, roomy))
        self._columns = {name: self._moved(column, keep, roomy) for name, column in self._columns.items()}
        self.length, self._owned = n, True
        if bool(empty.any()):
            self._positions[:, :, :n].masked_fill_(empty, EMPTY)
        if self.ragged:
            self.length = int(self.counts.max())

    def drop(self, slot: Tensor) -> None:
        """Evict one slot of every head: `slot` `[rows, kv_heads]`."""
        rest = torch.arange(self.length - 1, device=slot.device).expand(*slot.shape, self.length - 1)
        self.evict(rest + (rest >= slot[..., None]))

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
        into = target[..., None]
        slots = torch.cat([into, source], -1)
        counts = self._pick(self._weights, slots)
        total = counts.sum(-1, keepdim=True)
        for tensor in (self._keys, self._values):
            mean = (self._pick(tensor, slots) * counts[..., None]).sum(2, keepdim=True) / total[..., None]
            tensor.scatter_(2, into[..., None].expand_as(mean), mean.to(tensor.dtype))
        self._weights.scatter_(2, into, total)
        for name, how in (columns or {}).items():
            column = self._pick(self._columns[name], slots)
            combined = column.amax(2, keepdim=True) if how == "max" else column.sum(2, keepdim=True)
            self._columns[name].scatter_(2, into, combined)

    # ------------------------------------------------------------------ storage

    @staticmethod
    def _pick(tensor: Tensor, slots: Tensor) -> Tensor:
        slots = slots.clamp_min(0)
        return tensor.gather(
            2, slots.view(*slots.shape, *[1] * (tensor.dim() - 3)).expand(*slots.shape, *tensor.shape[3:])
        )

    def _moved(self, tensor: Tensor, keep: Tensor, roomy: bool) -> Tensor:
        n = keep.shape[2]
        out = tensor.new_empty(*tensor.shape[:2], n + max(16, n // 8), *tensor.shape[3:]) if roomy else tensor
        if tensor.dim() == 3 or tensor.is_cuda:
            out[:, :, :n] = self._pick(tensor, keep)
            return out
        # On a CPU, copying whole rows of one head at a time is ten times faster than one gather, and needs no second
        # store: each head's entries pass through a buffer that stays in the processor's cache.
        slots = keep.clamp_min(0)
        for row in range(tensor.shape[0]):
            for head in range(tensor.shape[1]):
                out[row, head, :n] = tensor[row, head].index_select(0, slots[row, head])
        return out

    def _own(self) -> None:
        if not self._owned:
            self._reserve(self.length + 1)

    def _reserve(self, capacity: int) -> None:
        """Own storage for `capacity` slots, growing by an eighth so that appending costs amortised constant time."""
        if self._owned and capacity <= self.capacity:
            return
        room = capacity + max(16, capacity // 8)

        def grown(tensor: Tensor) -> Tensor:
            out = tensor.new_zeros(*tensor.shape[:2], room, *tensor.shape[3:])
            out[:, :, : self.length] = tensor[:, :, : self.length]
            return out

        for name in ("_keys", "_values", "_positions", "_weights"):
            setattr(self, name, grown(getattr(self, name)))
        self._columns = {name: grown(column) for name, column in self._columns.items()}
        self._owned = True


class StoreLayer(CacheLayerMixin):
    """One layer of `StoreCache`: transformers appends, kvlab's store keeps."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, store: LayerStore):
        super().__init__()
        self.store = store
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise KvlabError("a kvlab cache is made with its storage")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.store.append(key_states, value_states)
        return self.store.keys, self.store.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.seen

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        # transformers hands a negative number over; 0 crops nothing.
        self.store.truncate(self.store.length - abs(tokens_to_remove))


class StoreCache(Cache):
    """transformers' `Cache` over one `LayerStore` for each layer."""

    def __init__(self, stores: list[LayerStore]):
        super().__init__(layers=[StoreLayer(store) for store in stores])
