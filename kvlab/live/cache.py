"""What a live session hands to the model in place of a `DynamicCache`: one `LayerStore` for each compressed layer and
group, and transformers' own cache for the layers left alone.

Sequences of a batch whose prompts have different lengths (left padding) do not share a store: each group of equal
length has its own, so that no padding is ever stored and all rows of a store keep in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvlab.core import adapter, hookable
from kvlab.core.hooks import Call
from kvlab.core.layout import Layout
from kvlab.core.rotation import Rotation
from kvlab.core.softmax import Softmax
from kvlab.core.storage import Storage
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.live.groups import Group
from kvlab.live.likelihood import Likelihood
from kvlab.live.memory import Memory, Repeated
from kvlab.live.observed import Observed
from kvlab.methods import Policy

if TYPE_CHECKING:
    from torch import nn
    from transformers.cache_utils import DynamicLayer


class Host(Protocol):
    """What a cache needs to know of the session that it belongs to."""

    policy: Policy

    @property
    def model(self) -> nn.Module: ...

    @property
    def layout(self) -> Layout:
        """Which of the model's layers are compressed."""
        ...

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The attention of these."""
        ...

    def running(self, cache: LiveCache) -> bool:
        """Whether a forward pass on `cache` is under way."""
        ...


class Pass(Protocol):
    """A forward pass that the session makes by itself on what a cache holds, such as that of pseudo-tokens."""

    def attend(self, cache: LiveCache, call: Call) -> Tensor:
        """The output of one layer's attention, `[rows, heads, n, head_dim]`."""
        ...


class LiveLayer(CacheLayerMixin):
    """One compressed layer of a `LiveCache`.

    Attributes:
        softmax: what the model makes of the layer's products.
        observed: the last queries.
        before_rope: those of the whole prompt before RoPE, until it has ended, where the policy asks for them.
        rotation: how the layer turns queries and keys, where the policy asks; None of a way unknown to kvlab.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LiveCache, softmax: Softmax):
        super().__init__()
        self.is_initialized = True
        self.belong(cache)
        self.softmax = softmax
        self.groups: list[Group] = []
        self.observed, self.before_rope = Observed(), Observed()
        self.rotation: Rotation | None = None

    def belong(self, cache: LiveCache) -> None:
        """Be a layer of this cache, without keeping it alive."""
        self._its_cache = ref(cache)

    @property
    def _cache(self) -> LiveCache:
        cache = self._its_cache()
        assert cache is not None, "whoever asks a layer holds its cache"
        return cache

    def forget(self) -> None:
        self.observed.forget()
        self.before_rope.forget()

    def begin(self, keys: Tensor, values: Tensor, place: int) -> LayerStore:
        """Store the beginning of a prompt; `place` is where the layer stands among the compressed ones."""
        store = LayerStore(keys, values)
        store.layers = (place,) * len(keys)
        self.groups = [Group(None, store)]
        return store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        # The session's attention stores them: it knows the phase, and which rows go together.
        if not self._cache.running:
            raise KvlabError("this cache belongs to a kvlab session; go on with it inside `with kvlab.compress(...)`")
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for group in self.groups:
            wanted = group.of(beam_idx.to(group.store.device))
            if group.rows is not None:
                place = {int(row): i for i, row in enumerate(group.rows)}
                if any(int(row) not in place for row in wanted):
                    raise KvlabError("beams cannot change places between prompts of different length")
                wanted = torch.tensor([place[int(row)] for row in wanted], device=wanted.device)
            group.take(wanted)
        self._select(beam_idx)

    def _select(self, rows: Tensor) -> None:
        self.observed.select(rows)
        self.before_rope.select(rows)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove == 0:
            return
        policies = [group.policy or self._cache.policy for group in self.groups] if self._cache.ended else []
        for policy in policies:
            if policy.acts_while_decoding:
                raise KvlabError(f"{policy.name} cannot take tokens back, as assisted decoding asks for")
        n = abs(tokens_to_remove)
        for group in self.groups:
            group.store.truncate(group.store.length - n)
            if group.shadow is not None:
                group.shadow.store.truncate(group.shadow.store.length - n)
        self.observed.crop(n)
        self.before_rope.crop(n)

    def batch_select_indices(self, indices: Tensor) -> None:
        if len(self.groups) > 1:
            raise KvlabError("a batch of prompts of different length cannot be cut or repeated while it is generated")
        for group in self.groups:
            group.take(indices)
        self._select(indices)


class LiveCache(Cache):
    """What a session hands to the model in place of a `DynamicCache`.

    Attributes:
        layers: of the model: a `LiveLayer` where it is compressed, else what transformers keeps.
        compressed: the compressed ones among them, one behind the other.
    """

    layers: list[Any]

    def __init__(self, session: Host):
        self.belong(session)
        self.seen = 0  # tokens fed, padding included
        self.ended = False  # whether the prompt has ended
        self.steps = 0  # single-token steps since
        self.number = 0  # which prompt of its session this is, from 1; 0 before the prompt has ended
        self.padding: Tensor | None = None  # [batch] left padding of each row
        self.own_pass: Pass | None = None  # one of the session itself that is under way on it
        self.ids: list[Tensor] = []
        self.repeated: Repeated = {}  # shared by branches
        self.memory: Memory | None = None  # of the prompt, where branches share one
        self.likelihood = Likelihood()
        self.compressed = [LiveLayer(self, hookable.softmax_of(module)) for module in session.modules]
        super().__init__(layers=adapter.arranged(session.model, session.layout, self.compressed))

    @classmethod
    def of(cls, session: Host, given: DynamicCache) -> LiveCache:
        """What a plain cache holds, taken as the beginning of a prompt."""
        cache = cls(session)
        cache.seen = given.get_seq_length()
        for number in session.layout.others if given.layers else ():
            cache.layers[number] = adapter.twin(given.layers[number])
        if cache.seen:
            for place, (live, number) in enumerate(zip(cache.compressed, session.layout.compressed, strict=True)):
                layer = cast("DynamicLayer", given.layers[number])
                assert layer.keys is not None and layer.values is not None, "it has seen tokens"
                if layer.keys.shape[2] != cache.seen:
                    raise KvlabError("the cache handed in has lost entries already (a sliding window?)")
                live.begin(layer.keys, layer.values, place)
        return cache

    def belong(self, session: Host) -> None:
        """Be a cache of this session.

        A session keeps its cache. Were it kept in turn, both would go only when Python next looks for such circles: few
        and small objects for Python, that may hold all memory of a device.
        """
        self._session = ref(session)
        self.model, self.policy = session.model, session.policy
        self.layout, self.modules = session.layout, session.modules

    def belongs_to(self, session: Host) -> bool:
        return self._session() is session

    @property
    def running(self) -> bool:
        """Whether a forward pass of its session is under way on it."""
        session = self._session()
        return session is not None and session.running(self)

    def __deepcopy__(self, memo: dict) -> LiveCache:
        made = memo[id(self)] = object.__new__(type(self))
        # A copied cache (a prefix that several prompts share) goes on in the same session.
        memo |= {id(same): same for same in (self.model, self.policy, self.layout, self.modules)}
        made.__dict__.update(deepcopy(self.__dict__ | {"memory": None}, memo))
        for layer in made.compressed:
            layer.belong(made)
        return made

    @property
    def others(self) -> dict[int, Any]:
        """What transformers keeps for the layers left alone, by their number in the model."""
        return {number: self.layers[number] for number in self.layout.others}

    def branch(self, session: Host, columns: Sequence[str]) -> LiveCache:
        """Another cache that begins with the same entries, borrowed until one of the two changes.

        Args:
            columns: what of the stores' columns goes along.
        """
        cache = LiveCache(session)
        cache.seen, cache.padding, cache.ids = self.seen, self.padding, list(self.ids)
        cache.likelihood, cache.repeated, cache.memory = self.likelihood.copy(), self.repeated, self.memory
        for number, layer in self.others.items():
            cache.layers[number] = adapter.twin(layer)
        for new, old in zip(cache.compressed, self.compressed, strict=True):
            new.softmax, new.rotation = old.softmax, old.rotation
            new.observed, new.before_rope = old.observed.copy(), old.before_rope.copy()
            for group in old.groups:
                store = LayerStore(group.store.keys, group.store.values)
                store.layers = group.store.layers
                for name in columns:
                    store.add_column(name, group.store.column(name))
                new.groups.append(Group(group.rows, store, group.padded))
        return cache

    @property
    def places(self) -> Tensor | None:
        """`[batch]`, where each row goes on, of joined sequences that have come to several lengths; else None."""
        groups = self.compressed[0].groups
        if self.padding is not None or len({group.store.seen for group in groups}) < 2:
            return None
        places = torch.empty(self.batch, dtype=torch.int64, device=groups[0].store.device)
        for group in groups:
            places[group.rows] = group.store.seen
        return places

    @classmethod
    def joined(cls, session: Host, caches: Sequence[LiveCache], policies: Sequence[Policy]) -> LiveCache:
        """The sequences of several caches as the rows of one batch, each under its own policy of `policies`.

        Args:
            caches: whose prompts have ended, none padded, each with one group; all of one length where there are layers
                that no policy compresses.
        """
        joined = cls(session)
        joined.ended = True  # what was joined before has gone on since, and only its stores know how far
        joined.seen = max(cache.compressed[0].groups[0].store.seen for cache in caches)
        for number in session.layout.others:
            joined.layers[number] = adapter.joined([cache.layers[number] for cache in caches])
        for cache, policy in zip(caches, policies, strict=True):
            rows = torch.arange(cache.batch) + (joined.batch if joined.compressed[0].groups else 0)
            for new, old in zip(joined.compressed, cache.compressed, strict=True):
                (group,) = old.groups
                new.softmax = old.softmax
                own = rows.to(group.store.device)
                new.groups.append(replace(group, rows=own, policy=group.policy or policy))
        return joined

    def start_over(self) -> None:
        """Before another policy takes over: all that is stored is a prompt again, and the first one's scores go."""
        self.ended, self.memory = False, None
        for layer in self.compressed:
            layer.forget()
            for group in layer.groups:
                group.store.forget_policy()
                group.policy = None

    @torch.inference_mode()
    def hold(self, storage: Storage) -> None:
        """Store what has been kept in another form."""
        for group in (group for layer in self.compressed for group in layer.groups):
            group.store.hold(storage)

    @property
    def batch(self) -> int:
        return sum(group.store.rows for group in self.compressed[0].groups)

    @contextmanager
    def on_trial(self, rows: Tensor | None) -> Iterator[None]:
        """While the block runs, the layers left alone hold the sequences `rows` (None: all) and may change: afterwards
        they are what they were.
        """
        before = list(self.layers)
        try:
            for number, layer in self.others.items():
                self.layers[number] = adapter.twin(layer) if rows is None else adapter.rows_of(layer, rows)
            yield
        finally:
            self.layers[:] = before

    @torch.inference_mode()
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.seen, self.memory = self.seen - abs(tokens_to_remove), None
        if self.ids:
            self.ids = [torch.cat(self.ids, 1)[:, : self.seen]]
        self.likelihood.crop(abs(tokens_to_remove))

    @torch.inference_mode()
    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.compressed:
            layer.reorder_cache(beam_idx)
        for layer in self.others.values():
            adapter.take(layer, beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    @torch.inference_mode()
    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.compressed:
            layer.batch_select_indices(indices)
        for layer in self.others.values():
            adapter.take(layer, indices)
        self._select(indices)

    def _select(self, rows: Tensor) -> None:
        self.memory = None
        if self.ids:
            ids = torch.cat(self.ids, 1)
            self.ids = [ids[rows.to(ids.device)]]
        if self.padding is not None:
            self.padding = self.padding[rows.to(self.padding.device)]
        self.likelihood.select(rows)

    def note_padding(self, mask: Tensor | None, fed: int) -> None:
        """Left padding of each row, from the attention mask of a chunk of the prompt."""
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise KvlabError("an attention mask of a kvlab session is [batch, tokens]: who sees whom follows from that")
        if bool(mask.all()):
            return
        visible = mask[:, : self.seen + fed].bool()
        padding = (~visible).sum(1)
        where = torch.arange(visible.shape[1], device=mask.device)
        if bool((visible != (where >= padding[:, None])).any()):
            raise KvlabError("only left padding can be compressed; set tokenizer.padding_side = 'left'")
        if any(not group.padded for group in self.compressed[0].groups):
            if self.padding is None or bool((padding != self.padding).any()):
                raise KvlabError(
                    "a later turn of a batch cannot bring padding of its own; give all rows turns of one length"
                )
            return
        self.padding = padding

    def split_by_length(self) -> None:
        """Strip the padding: sequences of one length share a store from here on."""
        lengths = None if self.padding is None else self.padding.unique().tolist()
        for layer in self.compressed:
            first = layer.groups[0]
            if first.padded and lengths:
                store = first.store
                layer.groups = []
                for pad in lengths:
                    rows = (self.padding == pad).nonzero().flatten()
                    layer.groups.append(Group(rows, store.part(rows, pad)))
            for group in layer.groups:
                group.padded = False
