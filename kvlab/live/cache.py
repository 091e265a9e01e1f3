"""The cache of a live session: one `LayerStore` for each compressed layer and group, and transformers' own cache for
the layers left alone.

A `DynamicCache` that the caller made becomes a `LiveCache` in place. The session fills the caller's own object. Its
length, layers and methods are correct inside the session and after it.

Sequences of a batch whose prompts have different lengths (left padding) do not share a store. Each group of equal
length has its own. So no padding is ever stored, and all rows of a store keep in step.
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
from transformers.cache_utils import Cache, DynamicCache

from kvlab.core import adapter, hookable
from kvlab.core.hooks import Handler
from kvlab.core.layout import Layout
from kvlab.core.storage import Storage
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.lib.renamed import Renamed
from kvlab.live.layer import LiveLayer
from kvlab.live.prompt_likelihood import Likelihood
from kvlab.live.row_groups import Group
from kvlab.live.shared_findings import Memory, Repeated
from kvlab.methods import Policy

if TYPE_CHECKING:
    from torch import nn
    from transformers.cache_utils import DynamicLayer


class Host(Protocol):
    """The parts of a session that its cache reads."""

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


class LiveCache(DynamicCache):
    """transformers' cache, whose layers a policy compresses.

    Attributes:
        layers: of the model: a `LiveLayer` where it is compressed, else what transformers keeps.
        compressed: the compressed ones among them, one behind the other.
        prompt_end: how many tokens there are when the prompt of `generate` has been fed. None outside `generate`; there
            the number of tokens in a forward pass decides.
        drafting: whether that `generate` may feed several tokens of its response at once.
        from_caller: whether the caller made it, and so may go on with it after the session.
        failed: whether a forward pass or the compression failed half-way, so that its layers may not fit together.
    """

    layers: list[Any]
    hold = Renamed("set_storage")
    places = Renamed("next_positions")
    lent = Renamed("from_caller")
    torn = Renamed("failed")

    def __init__(self, session: Host):
        self.belong(session)
        self.seen = 0  # tokens fed, padding included
        self.ended = False  # whether the prompt has ended
        self.steps = 0  # single-token steps since
        self.number = 0  # which prompt of its session this is, from 1; 0 before the prompt has ended
        self.padding: Tensor | None = None  # [batch] left padding of each row
        self.own_pass: Handler | None = None  # attends in a pass that the session itself makes
        self.ended_at = 0  # how many tokens there were when it ended
        self.prompt_end: int | None = None
        self.drafting = self.from_caller = False
        self.failed = False
        self.ids: list[Tensor] = []
        self._position_ids: list[Tensor] = []  # [batch or 1, fed] of every pass, where the policy asks for places
        self.repeated: Repeated = {}  # shared by branches
        self.memory: Memory | None = None  # of the prompt, where branches share one
        self.likelihood = Likelihood()
        self.compressed = [
            LiveLayer(self, hookable.softmax_of(module), hookable.latent_of(module)) for module in session.modules
        ]
        Cache.__init__(self, layers=adapter.arrange_layers(session.model, session.layout, self.compressed))

    @classmethod
    def of(cls, session: Host, plain: DynamicCache) -> LiveCache:
        """The caller's own cache, which becomes one of this session; what it holds is the beginning of a prompt."""
        layers, seen = list(plain.layers), plain.get_seq_length()
        compressed = [cast("DynamicLayer", layers[number]) for number in session.layout.compressed] if seen else []
        entries = [
            (layer.keys, layer.values) for layer in compressed if layer.keys is not None and layer.values is not None
        ]
        if len(entries) < len(compressed) or any(keys.shape[2] != seen for keys, _ in entries):
            raise KvlabError("the cache handed in has lost entries already (a sliding window?)")
        plain.__class__ = cls
        cache = cast("LiveCache", plain)
        LiveCache.__init__(cache, session)
        cache.seen, cache.from_caller = seen, True
        for number in session.layout.others if layers else ():
            cache.layers[number] = layers[number]
        for index, (live, entry) in enumerate(zip(cache.compressed, entries, strict=False)):
            live.begin(*live.stored(*entry), index)
        return cache

    def belong(self, session: Host) -> None:
        """Be a cache of this session.

        The session refers to its cache, and the cache has only a weak reference back. A circle would live until
        Python's next collection. These few small objects may hold all memory of a device.
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
        """transformers' caches of the layers left alone, by their number in the model."""
        return {number: self.layers[number] for number in self.layout.others}

    def branch(self, session: Host, columns: Sequence[str]) -> LiveCache:
        """Another cache that begins with the same entries, borrowed until one of the two changes.

        Args:
            columns: what of the stores' columns goes along.
        """
        cache = LiveCache(session)
        cache.seen, cache.padding = self.seen, self.padding
        cache.ids, cache._position_ids = list(self.ids), list(self._position_ids)
        cache.likelihood, cache.repeated, cache.memory = self.likelihood.copy(), self.repeated, self.memory
        for number, layer in self.others.items():
            cache.layers[number] = adapter.copy_layer(layer)
        for new, old in zip(cache.compressed, self.compressed, strict=True):
            new.softmax, new.rotation = old.softmax, old.rotation
            new.observed, new.before_rope, new.hidden = (
                seen.copy() for seen in (old.observed, old.before_rope, old.hidden)
            )
            for group in old.groups:
                store = LayerStore(group.store.keys, group.store.values, latent=group.store.latent)
                store.layers = group.store.layers
                for name in columns:
                    store.add_column(name, group.store.column(name))
                new.groups.append(Group(group.rows, store, group.padded))
        return cache

    @property
    def next_positions(self) -> Tensor | None:
        """`[batch]`, where each row goes on, of joined sequences that have come to several lengths; else None."""
        groups = self.compressed[0].groups
        if self.padding is not None or len({group.store.seen for group in groups}) < 2:
            return None
        positions = torch.empty(self.batch, dtype=torch.int64, device=groups[0].store.device)
        for group in groups:
            positions[group.rows] = group.store.seen
        return positions

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
            joined.layers[number] = adapter.join_layers([cache.layers[number] for cache in caches])
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
    def set_storage(self, storage: Storage) -> None:
        """Store what has been kept in another form."""
        for group in (group for layer in self.compressed for group in layer.groups):
            group.store.set_storage(storage)

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
                self.layers[number] = adapter.copy_layer(layer) if rows is None else adapter.copy_rows(layer, rows)
            yield
        finally:
            self.layers[:] = before

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be removed; not once a policy may have evicted or merged for them."""
        # Transformers 5.16 has no such attribute.
        return getattr(super(), "is_croppable", True) and not self._acting

    @property
    def _acting(self) -> list[Policy]:
        """The policies that do something at every step."""
        policies = [group.policy or self.policy for group in self.compressed[0].groups] or [self.policy]
        return [policy for policy in policies if policy.needs.acts_while_decoding]

    @torch.inference_mode()
    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest tokens back.

        Raises:
            KvlabError: some of them were evicted or merged, or others were for their sake.
        """
        tokens_to_remove = int(tokens_to_remove)  # a tensor, from older versions of transformers
        n = abs(tokens_to_remove)
        if tokens_to_remove > 0:
            raise KvlabError(f"crop takes the number of tokens to remove, negative: crop(-{n})")
        if n > self.seen:
            raise KvlabError(f"crop(-{n}) removes more tokens than the {self.seen} that this cache has seen")
        if n and self.ended and self._acting:
            raise KvlabError(
                f"{self._acting[0].name} cannot take tokens back, since it acts on every one that it is fed"
            )
        stores = [group.store for layer in self.compressed for group in layer.groups]
        if self.seen - n < self.ended_at and any(store.length < store.seen for store in stores):
            raise KvlabError(
                f"crop(-{n}) reaches into a prompt of which entries have been evicted; only the {self.seen} - "
                f"{self.ended_at} tokens after it can be cropped"
            )
        super().crop(tokens_to_remove)
        if n == 0:
            return
        self.seen, self.memory = self.seen - n, None
        for pieces in (self.ids, self._position_ids):
            if pieces:
                whole = torch.cat(pieces, 1)
                pieces[:] = [whole[:, : whole.shape[1] - n]]
        self.likelihood.crop(n)

    def note_outside(self, n: int) -> None:
        """Another `n` tokens were fed by the model alone, without a session to see them."""
        self.seen, self._position_ids, self.memory, self.prompt_end = self.seen + n, [], None, None
        self.likelihood.crop(n)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget everything that was fed; the next token begins a new prompt of the same session."""
        super().reset()
        self.seen, self.ended_at, self.steps, self.number, self.ended, self.padding = 0, 0, 0, 0, False, None
        self.ids, self._position_ids, self.repeated, self.memory = [], [], {}, None
        self.likelihood, self.prompt_end, self.failed = Likelihood(), None, False

    @property
    def batch_size(self) -> int:
        """Sequences that it holds; -1 while it holds none."""
        return self.batch if self.compressed[0].groups else -1

    @property
    def is_initialized(self) -> bool:
        return bool(self.compressed[0].groups)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a plain cache of the same entries, as far as one can hold them.

        Raises:
            KvlabError: it has lost entries, whose places no plain cache knows.
        """
        stores = [group.store for layer in self.compressed for group in layer.groups]
        if any(store.length < self.seen for store in stores):
            raise KvlabError("a cache that has lost entries cannot be pickled; save the tokens, and feed them again")
        if any(store.merged or store.rounded for store in stores):
            raise KvlabError("a cache with merged or rounded entries cannot be pickled; save the tokens instead")
        plain = [layer.plain() if isinstance(layer, LiveLayer) else layer for layer in self.layers]
        return _plain, (plain,)

    @torch.inference_mode()
    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.compressed:
            layer.reorder_cache(beam_idx)
        for layer in self.others.values():
            adapter.reorder_rows(layer, beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    @torch.inference_mode()
    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.compressed:
            layer.batch_select_indices(indices)
        for layer in self.others.values():
            adapter.reorder_rows(layer, indices)
        self._select(indices)

    def _select(self, rows: Tensor) -> None:
        self.memory = None
        if self.ids:
            ids = torch.cat(self.ids, 1)
            self.ids = [ids[rows.to(ids.device)]]
        if self._position_ids:
            ids = torch.cat(self._expanded_position_ids, 1)
            self._position_ids = [ids[rows.to(ids.device)]]
        if self.padding is not None:
            self.padding = self.padding[rows.to(self.padding.device)]
        self.likelihood.select(rows)

    # ------------------------------------------------------------------ where its tokens stand

    @property
    def _expanded_position_ids(self) -> list[Tensor]:
        """Those of all passes, `[batch, fed]` each."""
        return [ids.expand(self.batch, -1) for ids in self._position_ids]

    def note_positions(self, position_ids: Tensor | None, fed: int, device: torch.device) -> None:
        """Where the `fed` tokens of a pass stand: `position_ids` as the model takes them, or one behind the other."""
        if position_ids is None:
            position_ids = torch.arange(self.seen, self.seen + fed, device=device)[None]
        # Models that see images have several positions for each token, which are the same in a text.
        ids = position_ids if position_ids.dim() < 3 else position_ids[0]
        self._position_ids.append(ids)

    def offsets(self, number: int, policy: Policy) -> list[int]:
        """How far the positions that one group's sequences were fed at are ahead of their order, for each row.

        Raises:
            KvlabError: they leave gaps, so that nothing says where the next tokens stand.
        """
        group = self.compressed[0].groups[number]
        if not self._position_ids:
            return [0] * group.store.rows
        positions = group.of(torch.cat(self._expanded_position_ids, 1))[:, -group.store.seen :]
        order = torch.arange(group.store.seen - positions.shape[1], group.store.seen, device=positions.device)
        ahead = positions - order
        if bool((ahead != ahead[:, -1:]).any()):
            raise KvlabError(
                f"{policy.name} places queries behind the prompt, and these position_ids leave gaps; number the tokens "
                "one behind the other"
            )
        return ahead[:, -1].tolist()

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
                    rows = (self.padding == pad).nonzero().flatten().to(store.device)
                    layer.groups.append(Group(rows, store.part(rows, pad)))
            for group in layer.groups:
                group.padded = False


def _plain(layers: list[Any]) -> DynamicCache:
    """transformers' cache with these layers."""
    cache = DynamicCache()
    Cache.__init__(cache, layers=layers)
    return cache
