"""One compressed layer of a `LiveCache`, inside its session and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvlab.core.latent import joined, parted
from kvlab.core.rotation import Rotation
from kvlab.core.softmax import Softmax
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.live.recent_queries import Observed
from kvlab.live.row_groups import Group
from kvlab.methods import Policy

INSIDE = "go on with it inside `with kvlab.compress(...)`"


class Holder(Protocol):
    """The parts of its cache that a layer reads."""

    seen: int
    ended: bool
    policy: Policy

    @property
    def running(self) -> bool:
        """Whether a forward pass of its session is under way on it."""
        ...

    @property
    def compressed(self) -> Sequence[LiveLayer]:
        """All layers that the policy compresses."""
        ...

    def note_outside(self, n: int) -> None:
        """Another `n` tokens were fed by the model alone."""
        ...


class LiveLayer(DynamicLayer):
    """One compressed layer of a `LiveCache`.

    Attributes:
        softmax: what the model makes of the layer's products.
        latent: as in `LayerStore`; what transformers appends and reads are then latents and rotary parts.
        observed: the last queries.
        before_rope: those of the whole prompt before RoPE, until it has ended, where the policy asks for them.
        hidden: what the layer's attention was given, `[batch, 1, n, width]`, in the same way.
        rotation: how the layer turns queries and keys, where the policy asks; None of a way unknown to kvlab.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Holder, softmax: Softmax, latent: int = 0):
        # Not transformers' own, which would set the keys and values that a store has.
        self.is_initialized = True
        self.belong(cache)
        self.softmax, self.latent = softmax, latent
        self.groups: list[Group] = []
        self.observed, self.before_rope, self.hidden = Observed(), Observed(), Observed()
        self.rotation: Rotation | None = None

    def belong(self, cache: Holder) -> None:
        """Be a layer of this cache, without keeping it alive."""
        self._its_cache = ref(cache)

    @property
    def _cache(self) -> Holder:
        cache = self._its_cache()
        assert cache is not None, "whoever asks a layer holds its cache"
        return cache

    def forget(self) -> None:
        self.observed.forget()
        self.before_rope.forget()
        self.hidden.forget()

    def begin(self, keys: Tensor, values: Tensor, index: int) -> LayerStore:
        """Store the beginning of a prompt; `index` is where the layer stands among the compressed ones."""
        store = LayerStore(keys, values, latent=self.latent)
        store.layers = (index,) * len(keys)
        self.groups = [Group(None, store)]
        return store

    def stored(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """transformers' entries in a store's layout."""
        return joined(key_states, value_states) if self.latent else (key_states, value_states)

    def _shown(self, store: LayerStore) -> tuple[Tensor, Tensor]:
        """A store's entries in transformers' layout."""
        return parted(store.keys, self.latent) if self.latent else (store.keys, store.values)

    # ------------------------------------------------------------------ what transformers' layers tell

    @property
    def keys(self) -> Tensor | None:
        """`[batch, kv_heads, slots, head_dim]` as they are stored now, zeros where a head has fewer; None before any.
        Of latent attention these are the latents, and `values` the rotary parts, as in transformers.

        Raises:
            KvlabError: sequences of several lengths, which no one tensor holds.
        """
        store = self._store
        return None if store is None else self._shown(store)[0]

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        store = self._store
        return None if store is None else self._shown(store)[1]

    @property
    def _store(self) -> LayerStore | None:
        if len(self.groups) > 1:
            raise KvlabError(
                "sequences of several lengths are stored apart, so one tensor does not hold them; ask the session "
                "with kept(layer, sequence)"
            )
        return self.groups[0].store if self.groups else None

    @property
    def dtype(self) -> torch.dtype | None:
        return self.groups[0].store.dtype if self.groups else None

    @property
    def device(self) -> torch.device | None:
        return self.groups[0].store.device if self.groups else None

    def plain(self) -> DynamicLayer:
        """transformers' layer with the same entries."""
        layer = DynamicLayer()
        if self.keys is not None and self.values is not None:
            layer.update(self.keys.clone(), self.values.clone())
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise KvlabError("a layer of a kvlab cache is made with its storage")

    def get_seq_length(self) -> int:
        return self._cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        cache = self._cache
        if cache.running or not self.groups:
            return cache.seen + query_length, 0
        # The stored entries lie behind the evicted ones: a window's cache describes itself in this way.
        stored = self.outside().length
        return stored + query_length, cache.seen - stored

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        cache = self._cache
        if cache.running:
            # The session's attention stores them: it knows the phase, and which rows go together.
            return key_states, value_states
        store = self.outside()
        # Autograd may not save tensors that were stored in inference mode.
        past = [x.clone() for x in self._shown(store)]
        with torch.inference_mode():
            store.append(*self.stored(key_states, value_states))
            store.quantise_pending()
        self.groups[0].shadow = None
        self.forget()
        if self is cache.compressed[-1]:
            cache.note_outside(key_states.shape[2])
        if store.rounded:
            keys, values = self._shown(store)
            return keys.clone(), values.clone()
        return torch.cat([past[0], key_states], 2), torch.cat([past[1], value_states], 2)

    def offload(self) -> None:
        raise KvlabError("a cache that a policy compresses cannot be offloaded")

    prefetch = offload

    def outside(self) -> LayerStore:
        """The store, for a forward pass outside of the session.

        Raises:
            KvlabError: the model's own attention over what is stored would not be what the policy makes of it.
        """
        cache = self._cache
        if not self.groups:
            raise KvlabError(f"this cache belongs to a kvlab session; {INSIDE}")
        if not cache.ended:
            raise KvlabError(
                "this cache holds a prompt that no policy has compressed yet; call session.end_prompt() before you "
                f"leave the session, or {INSIDE}"
            )
        policy = self.groups[0].policy or cache.policy
        if policy.needs.acts_while_decoding:
            raise KvlabError(f"{policy.name} acts at every step, so its cache is of no use outside; {INSIDE}")
        # Behind the first layer a pass has begun, and layers are not in step until it is over.
        layers = cache.compressed if self is cache.compressed[0] else [self]
        sizes = {group.store.length for layer in layers for group in layer.groups}
        if len(self.groups) > 1 or len(sizes) > 1 or self.groups[0].store.ragged:
            raise KvlabError(
                f"layers, heads or sequences of this cache hold different numbers of entries, which only kvlab's "
                f"attention takes; {INSIDE}"
            )
        return self.groups[0].store

    # ------------------------------------------------------------------ rows and lengths

    def reset(self) -> None:
        self.groups = []
        self.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for group in self.groups:
            wanted = group.of(beam_idx.to(group.store.device))
            if group.rows is not None:
                row_of = {int(row): i for i, row in enumerate(group.rows)}
                if any(int(row) not in row_of for row in wanted):
                    raise KvlabError("beams cannot change places between prompts of different length")
                wanted = torch.tensor([row_of[int(row)] for row in wanted], device=wanted.device)
            group.reorder(wanted)
        self._select(beam_idx)

    def _select(self, rows: Tensor) -> None:
        self.observed.select(rows)
        self.before_rope.select(rows)
        self.hidden.select(rows)

    def crop(self, tokens_to_remove: int) -> None:
        n = abs(tokens_to_remove)
        if n == 0:
            return
        for group in self.groups:
            group.store.truncate(group.store.length - n)
            if group.shadow is not None:
                group.shadow.store.truncate(group.shadow.store.length - n)
        self.observed.crop(n)
        self.before_rope.crop(n)
        self.hidden.crop(n)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("the cache repeats its layers")

    def batch_select_indices(self, indices: Tensor) -> None:
        if len(self.groups) > 1:
            raise KvlabError("a batch of prompts of different length cannot be cut or repeated while it is generated")
        for group in self.groups:
            group.reorder(indices)
        self._select(indices)
