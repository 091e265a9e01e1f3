"""The KV store of one layer: append, evict, merge. `kvlab.core.adapter` makes it a `Cache` of transformers.

A slot holds a key, a value, its original position (its rotation) and a fusion count. Slots stay sorted by arrival.
Heads may have different numbers of entries. A read gives each head's entries first, then empty slots with position -1.
Empty slots take no memory. Rows are the sequences of a batch in a live run, and the layers of a model in a replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from kvlab.core import fused
from kvlab.core.dense_slots import DenseSlots, RecordedSlots
from kvlab.core.entries import AsIs, Entries, Run
from kvlab.core.latent_entries import LatentEntries
from kvlab.core.slots import EMPTY, KEYS, POSITIONS, VALUES, check_dropped, check_kept, on_device, pick
from kvlab.core.storage import AS_IS, Storage, converted
from kvlab.errors import KvlabError
from kvlab.lib.renamed import Renamed

__all__ = ["EMPTY", "LayerStore", "pick"]

FUSIONS = "fusion counts"


class LayerStore:
    """Entries of one layer.

    Args:
        keys, values: `[rows, kv_heads, length, head_dim]`. They are borrowed: read in place and never written to; the
            first change makes the store's own copy.
        positions: `[rows, kv_heads, length]` int64 original positions; 0 .. length-1 unless given.
        latent: of latent attention, the channels of a key's rotary part. The rest of the key is the value, and is
            stored once. 0 where keys and values are apart.

    Attributes:
        columns: named per-slot tensors `[rows, kv_heads, slots, ...]` of a policy, such as scores or attention
            profiles. They move with their entries, and count as storage.
        memory: anything else a policy keeps for this layer, `[rows, ...]` each; counts as storage.
        scratch: what a policy hands from one verb of a step to the next; not counted, and not kept across steps.
        numbers: plain numbers that a policy remembers for this layer (a page size, the prompt's length).
        layers: the layer of each row.
        seen: how many tokens were ever appended, which is also the next token's position by default.
        repeats: sets of entries that stand for one KV head of the model, see `expand`.
        storage: the form of the stored keys and values, see `set_storage`.
        guard: who evicts, where that is checked.
        rounded: whether a storage may ever have rounded an entry.
    """

    hold = Renamed("set_storage")
    settle = Renamed("quantise_pending")
    calm = Renamed("steps_until_quantised")
    taken = Renamed("gather")

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor | None = None, latent: int = 0):
        rows, kv_heads, length, _ = keys.shape
        if positions is None:
            positions = torch.arange(length, device=keys.device).expand(rows, kv_heads, length)
        self.latent = latent
        self.layers: tuple[int, ...] = (0,) * rows
        self._entries: Entries = self._held(AsIs.of(keys, values, positions), AS_IS)
        # Columns, and fusion counts once something is merged. They are as long as the fullest head, and blank where a
        # head has no entry. A policy writes into them, so it must not get copies.
        self._aux: DenseSlots | None = None
        self.storage: Storage = AS_IS
        self.guard: str | None = None
        self.rounded = False
        self.memory: dict[str, Tensor] = {}
        self.scratch: dict[str, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self._budget: int | None = None
        self.seen, self.repeats = length, 1
        self._bytes_read: int | Tensor = 0
        self._merged: bool | None = False  # None where it is not known

    @classmethod
    def preallocated(cls, keys: Tensor, values: Tensor) -> LayerStore:
        """An empty store that writes into `[rows, kv_heads, capacity, head_dim]` (growing past it copies)."""
        store = cls(keys[:, :, :0], values[:, :, :0])
        positions = torch.full(keys.shape[:3], EMPTY, device=keys.device)
        store._entries = AsIs(DenseSlots({KEYS: keys, VALUES: values, POSITIONS: positions}, owned=True, length=0))
        return store

    @classmethod
    def recorded(cls, keys: Tensor, values: Tensor, length: int, latent: int = 0) -> LayerStore:
        """The first `length` entries of a recording, which are borrowed; what is appended must be its next entries."""
        values = values[..., :0] if latent else values
        store = cls(keys[:, :, :length], values[:, :, :length], latent=latent)
        positions = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        recorded = AsIs(RecordedSlots({KEYS: keys, VALUES: values, POSITIONS: positions}, length))
        store._entries = store._held(recorded, AS_IS)
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

    # ------------------------------------------------------------------ the form of the stored entries

    def set_storage(self, storage: Storage) -> None:
        """Hold keys and values in this form, what is there and what will come; what is in it is not rounded again.

        Raises:
            KvlabError: keys and values in two forms, where values are a part of keys.
        """
        if storage != self.storage:
            self._entries, self.storage = self._held(self._entries.plain(), storage), storage
            self.rounded = self.rounded or not storage.exact
        self.quantise_pending()

    def _held(self, entries: AsIs, storage: Storage) -> Entries:
        if not self.latent:
            return converted(entries, storage, self.layers)
        storage.check_latent()
        return LatentEntries(entries, self.latent, storage.convert)

    def quantise_pending(self) -> None:
        """Round what the storage holds in full precision only as long as it is among the newest."""
        self._entries.quantise(self.seen)

    @property
    def steps_until_quantised(self) -> int:
        """How many tokens may come before `quantise_pending` changes the form of an entry that is there now."""
        return max(self._entries.next_quantisation - self.seen - 1, 0)

    # ------------------------------------------------------------------ what is stored

    @property
    def length(self) -> int:
        """Slots: entries of the fullest head."""
        return self._entries.length

    @property
    def ragged(self) -> bool:
        """Whether heads hold different numbers of entries."""
        return self._entries.ragged

    @property
    def rows(self) -> int:
        return self._entries.shape[0]

    @property
    def kv_heads(self) -> int:
        return self._entries.shape[1]

    @property
    def head_dim(self) -> int:
        return self._entries.head_dim

    @property
    def device(self) -> torch.device:
        return self._entries.device

    @property
    def dtype(self) -> torch.dtype:
        return self._entries.dtype

    @property
    def keys(self) -> Tensor:
        """`[rows, kv_heads, slots, head_dim]` in the model's precision, to be read and not written to; zeros in empty
        slots. Where heads differ, or entries are stored in another form, it is made anew whenever it is asked for.
        """
        return self._entries.read(KEYS)

    @property
    def values(self) -> Tensor:
        """`[rows, kv_heads, slots, head_dim]`, as `keys`."""
        return self._entries.read(VALUES)

    @property
    def positions(self) -> Tensor:
        """`[rows, kv_heads, slots]` int64, -1 in empty slots; to be read, as `keys`."""
        return self._entries.read(POSITIONS)

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots `[rows, kv_heads, n]`, `[rows, kv_heads, n, head_dim]` each; anything for -1."""
        return self._entries.gather(slots)

    def attend(self, queries: Tensor, slots: Tensor | None, scale: float) -> Tensor | None:
        """The output `[rows, heads, 1, head_dim]` of one token's queries by kvlab's own kernel, as `fused.attend`."""
        return fused.attend(self._entries, queries, slots, scale)

    def row(self, row: int) -> list[Tensor]:
        """Keys and values of one row, `[kv_heads, slots, head_dim]` each, and positions `[kv_heads, slots]`."""
        return [self._entries.row(name, row) for name in (KEYS, VALUES, POSITIONS)]

    def since(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values from one slot on, `[rows, kv_heads, slots - slot, head_dim]` each."""
        return self._entries.since(KEYS, slot), self._entries.since(VALUES, slot)

    @property
    def rounded_slots(self) -> Tensor:
        """`[rows, kv_heads, slots]`: which slots hold an entry that is rounded; anything for empty ones."""
        return self._entries.rounded_slots()

    def runs(self) -> Iterator[Run]:
        """All entries, without empty slots: see `Run`."""
        return self._entries.runs()

    @property
    def fusion_counts(self) -> Tensor:
        """`[rows, kv_heads, slots]`: how many tokens an entry stands for, 1 for one that was never merged."""
        if self.has_column(FUSIONS):
            return self.column(FUSIONS)
        return torch.ones(1, 1, 1, dtype=torch.float32, device=self.device).expand(
            self.rows, self.kv_heads, self.length
        )

    def has_column(self, name: str) -> bool:
        return self._aux is not None and name in self._aux.tensors

    def column(self, name: str) -> Tensor:
        """A column that was added, `[rows, kv_heads, slots, ...]`: the stored tensor itself, so that a change in place
        stays. The next append or eviction makes another one of it: ask again after these.
        """
        assert self._aux is not None, "it was added"
        return self._aux.view(name)

    def add_column(self, name: str, values: Tensor) -> None:
        """Keep `values` `[rows, kv_heads, slots, ...]` with the entries; entries appended later start at zero."""
        if values.shape[:3] != (shape := (self.rows, self.kv_heads, self.length)):
            raise ValueError(f"column {name!r} is {tuple(values.shape[:3])}, the store {shape}")
        if self._aux is None:
            self._aux = DenseSlots({name: values.clone(memory_format=torch.contiguous_format)}, owned=True)
        else:
            self._aux.add(name, values)
        self._blank()

    def remove_column(self, name: str) -> Tensor:
        """Forget a column, and give its last values `[rows, kv_heads, slots, ...]`."""
        values = self.column(name)
        assert self._aux is not None, "it was added"
        del self._aux.tensors[name]
        self._aux = self._aux if self._aux.tensors else None
        return values

    def part(self, rows: Tensor, start: int) -> LayerStore:
        """A store of its own of some sequences from slot `start` on, with their columns; their positions begin at 0."""
        store = LayerStore(self.keys[rows, :, start:], self.values[rows, :, start:], latent=self.latent)
        store.layers = self.layers[:1] * len(rows)
        for name in self._columns:
            store.add_column(name, self.column(name)[rows, :, start:])
        return store

    @property
    def _columns(self) -> list[str]:
        return [] if self._aux is None else [name for name in self._aux.tensors if name != FUSIONS]

    @property
    def occupied(self) -> Tensor:
        """`[rows, kv_heads, slots]`: which slots hold an entry."""
        return torch.arange(self.length, device=self.device) < self.counts[..., None]

    @property
    def counts(self) -> Tensor:
        """`[rows, kv_heads]`: entries of each head."""
        if not self.ragged:
            return torch.full(self._entries.shape, self.length, device=self.device)
        return on_device(self._entries.counts, self.device).view(self._entries.shape)

    @property
    def head_counts(self) -> list[int]:
        """Entries of each head, row by row, as numbers that no GPU has to be asked for."""
        return self._entries.counts

    # ------------------------------------------------------------------ bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the entries' keys and values, with their scales and zero points.

        Bookkeeping does not count: positions, and the group that an entry was rounded with.
        """
        return self._entries.kv_bytes

    @property
    def key_bytes(self) -> int:
        """The keys' part of `kv_bytes`."""
        return self._entries.key_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's key and value as the model makes them."""
        return self.vectors * self.head_dim * self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """How many vectors of a head's size an entry is: a key and a value, or a key that holds its value."""
        return 1 if self.latent else 2

    def bytes_of(self, slots: Tensor | None) -> int:
        """Bytes that a read of the slots `[rows, kv_heads, n]` loads, -1 for none; of all that is stored for None."""
        return int(self._bytes_of(slots))

    def _bytes_of(self, slots: Tensor | None) -> int | Tensor:
        return self._entries.kv_bytes if slots is None else self._entries.bytes_of(slots)

    @property
    def bytes_read(self) -> int:
        """Bytes that the last decoding step loaded; 0 before there was one."""
        return int(self._bytes_read)

    def note_read(self, slots: Tensor | None, overhead: int | Tensor) -> None:
        """Note that a step reads these slots, as `bytes_of`, and `overhead` other bytes.

        A GPU is asked only when somebody asks for `bytes_read`.
        """
        self._bytes_read = self._bytes_of(slots) + overhead

    @property
    def aux_bytes(self) -> int:
        """Bytes that a policy keeps with the entries: columns (occupied slots), fusion counts once merged, memory."""
        names = [*self._columns, *([FUSIONS] if self.merged else [])]
        columns = sum(self.column(name).numel() * self.column(name).element_size() for name in names)
        entries = self._entries.counts
        share = sum(entries) / (len(entries) * self.length) if self.ragged else 1.0
        return round(columns * share) + sum(t.nbytes for t in self.memory.values())

    @property
    def merged(self) -> bool:
        """Whether any entry stands for several tokens."""
        if self._merged is None:
            # Asked for at every step: a GPU is asked only where something may have changed.
            self._merged = self.has_column(FUSIONS) and bool(((self.fusion_counts != 1) & self.occupied).any())
        return self._merged

    @property
    def may_be_merged(self) -> bool:
        """Whether any entry may stand for several tokens: `merged`, without a look at the entries."""
        return self.has_column(FUSIONS)

    @property
    def allocated_bytes(self) -> int:
        aux = 0 if self._aux is None else self._aux.nbytes
        return self._entries.allocated_bytes + aux + sum(t.nbytes for t in self.memory.values())

    # ------------------------------------------------------------------ the verbs

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> None:
        """Add `n` entries at the end of every head.

        Args:
            keys, values: `[rows, kv_heads, n, head_dim]`.
            positions: `[n]`, `[rows, 1, n]` or `[rows, kv_heads, n]`; the next `n` positions unless given.
        """
        n = keys.shape[2]
        if self.repeats > 1:
            keys, values = (x.repeat_interleave(self.repeats, dim=1) for x in (keys, values))
        self.seen += n
        # A single token's position is filled in as a number, which spares the hot path a tensor.
        new_positions: Tensor | int = self.seen - 1 if positions is None else positions
        if positions is None and n > 1:
            new_positions = torch.arange(self.seen - n, self.seen, device=keys.device)
        self._entries.append(keys, values, new_positions)
        if self._aux is not None:
            self._aux.append({name: int(name == FUSIONS) for name in self._aux.tensors}, n)

    def evict(self, keep: Tensor, even: bool = False) -> None:
        """Keep only the slots `keep` `[rows, kv_heads, n]`, ascending, -1 at the end where a head keeps fewer.

        Args:
            even: every head keeps `n`. Said by a policy that knows it, which spares a GPU the question.
        """
        if not self.length:
            return
        check_kept(self.guard, keep, self._entries.shape, self.length)
        self._note_fewer()
        self._entries.evict(keep, even)
        if self._aux is not None:
            aux = self._aux.evict(keep.clamp_min(0), even=True)
            assert isinstance(aux, DenseSlots), "every head keeps equally many columns"
            self._aux = aux
            self._blank()

    def drop(self, slot: Tensor | int) -> None:
        """Evict one slot of every head: the same one, or `[rows, kv_heads]` of them."""
        check_dropped(self.guard, slot, self._entries.shape, self.length)
        if self.device.type == "cpu":
            # One entry leaves at a step, and a GPU is not asked at each whether it was the last merged one.
            self._note_fewer()
        self._entries.drop(slot)
        if self._aux is not None:
            self._aux.drop(slot)
            self._blank()

    def cut(self, first: int, n: Tensor) -> None:
        """Evict `n` `[rows, kv_heads]` slots of each head from slot `first` on."""
        lost = n.flatten().tolist()
        self._note_fewer()
        if self._aux is not None:
            slots = torch.arange(self.length, device=self.device)
            slots = (slots + (slots >= first) * n[..., None].to(self.device)).clamp_max(self.length - 1)
            self._aux.evict(slots, even=True)
        self._entries.cut([first] * len(lost), lost)
        self._blank()

    def truncate(self, length: int) -> None:
        """Forget the newest entries of every head (pseudo-tokens, rejected drafts) until the fullest has `length`; what
        a storage has rounded stays rounded.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"a store of {self.length} slots cannot be truncated to {length}")
        n = self.length - length
        self._note_fewer()
        self._entries.truncate(n)
        self.seen -= n
        if self._aux is not None:
            self._aux.truncate(n)
            self._blank()

    def merge(self, source: Tensor, target: Tensor, columns: dict[str, str] | None = None) -> None:
        """Fold the slots `source` `[rows, kv_heads, m]` into one slot `target` `[rows, kv_heads]` of each head.

        The target becomes the mean of all entries weighted by their fusion counts (ZSMerge eq. 7), its count their sum;
        it keeps its position. `columns` names how a column combines, "max" or "sum"; others stay as the target's.
        Evicting the sources is the caller's.

        A storage in another form rounds the mean once more; KIVI with its group's steps, cut to their range.
        """
        if not self.has_column(FUSIONS):
            self.add_column(FUSIONS, torch.ones(self.positions.shape, dtype=torch.float32, device=self.device))
        into = target[..., None]
        slots = torch.cat([into, source], -1)
        counts = pick(self.fusion_counts, slots)
        total = counts.sum(-1, keepdim=True)
        means = [(some * counts[..., None]).sum(2) / total for some in self.gather(slots)]
        self._entries.put(target, *means)
        self._merged = self._merged or source.shape[-1] > 0
        self.fusion_counts.scatter_(2, into, total)
        for name, how in (columns or {}).items():
            column = pick(self.column(name), slots)
            combined = column.amax(2, keepdim=True) if how == "max" else column.sum(2, keepdim=True)
            self.column(name).scatter_(2, into, combined)

    def fold(self, target: Tensor, keys: bool = True) -> None:
        """Fold every slot into the slot `target` `[rows, kv_heads, slots]` of its head; what stays is its own target.

        A target becomes what `merge` would make of it. Without `keys` its key stays, and the values alone are averaged.
        Evicting the sources is the caller's.

        Raises:
            KvlabError: values alone, where they are a part of keys.
        """
        if self.latent and not keys:
            self._refuse_apart()
        if not self.has_column(FUSIONS):
            self.add_column(FUSIONS, torch.ones(self.positions.shape, dtype=torch.float32, device=self.device))
        counts = self.fusion_counts * self.occupied
        total = torch.zeros_like(counts).scatter_add_(2, target, counts)
        index = target[..., None].expand(*target.shape, self.head_dim)

        def means(entries: Tensor) -> Tensor:
            weighed = entries.float() * counts[..., None]
            summed = torch.zeros_like(weighed).scatter_add_(2, index, weighed)
            # Slots that nothing is folded into, not even themselves, are those that leave.
            return torch.where(total[..., None] > counts[..., None], summed / total[..., None], entries).to(self.dtype)

        self._rewrite(means(self.keys) if keys else self.keys, means(self.values))
        self._merged = None
        self.fusion_counts.copy_(torch.where(total > 0, total, counts.clamp_min(1)))

    def rewrite_keys(self, keys: Tensor) -> None:
        """Other keys `[rows, kv_heads, slots, head_dim]` for the same entries, stored in the same form.

        Raises:
            KvlabError: other values with them, where these are a part of keys.
        """
        if self.latent and not torch.equal(keys[..., self.latent :], self.values[..., self.latent :]):
            self._refuse_apart()
        self._rewrite(keys, self._entries.plain().read(VALUES))

    def rewrite_values(self, values: Tensor) -> None:
        """Other values for the same entries, as `rewrite_keys`; KvlabError where they are a part of keys."""
        if self.latent:
            self._refuse_apart()
        self._rewrite(self._entries.plain().read(KEYS), values)

    def _rewrite(self, keys: Tensor, values: Tensor) -> None:
        self._entries = self._held(AsIs.of(keys, values, self._entries.read(POSITIONS)), self.storage)
        self.quantise_pending()

    def _refuse_apart(self) -> NoReturn:
        raise KvlabError(
            "this policy changes keys or values separately, and in latent attention they are one vector; choose a "
            "policy that evicts or merges entries"
        )

    def expand(self, heads: int) -> None:
        """Give every query head a set of its own, now and for what is appended; ValueError where that cannot be."""
        if heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} KV heads cannot be repeated to {heads} query heads")
        repeats = heads // self.kv_heads
        self._entries.expand(repeats)
        if self._aux is not None:
            self._aux.expand(repeats)
        self.repeats *= repeats

    def reorder(self, rows: Tensor) -> None:
        """Replace the present sequences by the sequences `rows` (beam search)."""
        self._note_fewer()
        self._entries.reorder(rows)
        if self._aux is not None:
            self._aux.reorder(rows)
        self.memory = {name: tensor.index_select(0, rows) for name, tensor in self.memory.items()}
        self.layers = self.layers[:1] * len(rows)

    def forget_policy(self) -> None:
        """Drop a policy's columns, memory and budget; the entries are then as good as a new prompt."""
        for name in self._columns:
            self.remove_column(name)
        self.memory, self.scratch, self.numbers, self._budget = {}, {}, {}, None

    def _note_fewer(self) -> None:
        """Entries may leave: whether merged ones are among those that stay is not known."""
        self._merged = None if self._merged else self._merged

    def _blank(self) -> None:
        """Keep the columns as long as the fullest head, and blank where a head has no entry."""
        if self._aux is None:
            return
        self._aux.length = self.length
        if self.ragged:
            empty = ~self.occupied
            for name in self._aux.tensors:
                self.column(name)[empty] = int(name == FUSIONS)
