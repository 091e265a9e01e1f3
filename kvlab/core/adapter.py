"""Layers' stores in the shape of transformers' `Cache`, with transformers' own caches for the layers left alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlab.core.hookable import latent_of, layers_of, layout_of, own_layers
from kvlab.core.latent import joined, parted
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from torch import nn

    from kvlab.core.layout import Layout

STATES = ("conv_states", "recurrent_states")


class StoreLayer(CacheLayerMixin):
    """One layer of `StoreCache`: transformers appends, kvlab's store keeps.

    Args:
        latent: as in `LayerStore`: what transformers appends and reads are latents and rotary parts.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, store: LayerStore, latent: int = 0):
        super().__init__()
        self.store, self.latent = store, latent
        self.indexer_keys: Tensor | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise KvlabError("a kvlab cache is made with its storage")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.store.append(*self._stored(key_states, value_states))
        return self._shown(self.store.keys, self.store.values)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Keys of a sparse indexer `[batch, length, channels]`, which lie next to the store."""
        self.indexer_keys = self._with_indexer_keys(indexer_key_states)
        return self.indexer_keys

    def _with_indexer_keys(self, new: Tensor) -> Tensor:
        return new if self.indexer_keys is None else torch.cat([self.indexer_keys, new], 1)

    def _stored(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Entries as the store holds them."""
        return joined(key_states, value_states) if self.latent else (key_states, value_states)

    def _shown(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Entries as transformers has them."""
        return parted(keys, self.latent) if self.latent else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length`'s name before transformers 5.14."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        # A negative number of tokens to remove; 0 crops nothing. Before transformers 5.16 also the length to keep.
        length = self.store.length
        self.store.truncate(min(tokens_to_remove, length) if tokens_to_remove > 0 else length + tokens_to_remove)


class TransientLayer(StoreLayer):
    """The view of one forward pass on top of a layer, which stays as it is."""

    def __init__(self, layer: StoreLayer):
        super().__init__(layer.store, layer.latent)
        self.indexer_keys = layer.indexer_keys

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = self._stored(key_states, value_states)
        return self._shown(torch.cat([self.store.keys, keys], 2), torch.cat([self.store.values, values], 2))


class StoreCache(Cache):
    """transformers' `Cache` over one `LayerStore` for each compressed layer.

    Args:
        stores: of the compressed layers.
        model: whose other layers keep their own cache; None where all are compressed.
        latent: of latent attention, as in `LayerStore`; found in the model where one is given.
    """

    def __init__(self, stores: list[LayerStore], model: nn.Module | None = None, latent: int = 0):
        self.stores = stores
        latent = latent if model is None else latent_of(layers_of(model)[0])
        compressed: list[Any] = [StoreLayer(store, latent) for store in stores]
        super().__init__(layers=compressed if model is None else arrange_layers(model, layout_of(model), compressed))

    def transient(self) -> StoreCache:
        """Return a cache for one forward pass on top of these entries; nothing of that pass stays.

        Each layer joins its stored and its new entries only while it attends. So no second cache is ever made.
        """
        copied = copy.copy(self)
        copied.layers = [
            TransientLayer(layer) if isinstance(layer, StoreLayer) else copy_layer(layer) for layer in self.layers
        ]
        return copied

    @property
    def others(self) -> dict[int, Any]:
        """transformers' caches of the layers left alone, by their number in the model."""
        return {number: layer for number, layer in enumerate(self.layers) if not isinstance(layer, StoreLayer)}


# ------------------------------------------------------------------------------ what the layers left alone keep


def arrange_layers(model: nn.Module, layout: Layout, compressed: Sequence[CacheLayerMixin]) -> list[Any]:
    """All layers of a model's cache: `compressed` at their numbers, and transformers' own for the others."""
    layers: list[Any] = own_layers(model) if layout.mixed else [None] * len(compressed)
    for number, layer in zip(layout.compressed, compressed, strict=True):
        layers[number] = layer
    return layers


# States are written into by the model, in or out of inference mode: what is made of them here belongs to neither.
@torch.inference_mode(False)
@torch.no_grad()
def copy_layer(layer: Any) -> Any:
    """A layer of transformers' cache with the same contents, which goes on by itself."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        # Windows make new tensors whenever they change; convolutions and linear states are written into.
        if isinstance(value, dict):
            setattr(copied, name, {key: x.clone() if isinstance(x, Tensor) else x for key, x in value.items()})
    return copied


def copy_rows(layer: Any, rows: Tensor) -> Any:
    """A twin of a layer that holds the sequences `rows` only."""
    copied = copy_layer(layer)
    reorder_rows(copied, rows)
    return copied


@torch.inference_mode(False)
@torch.no_grad()
def reorder_rows(layer: Any, rows: Tensor) -> None:
    """Let a layer hold the sequences `rows` instead of the present ones."""
    layer.reorder_cache(rows.clone())


@torch.inference_mode(False)
@torch.no_grad()
def join_layers(layers: Sequence[Any]) -> Any:
    """One layer that holds the sequences of several, which have seen equally many tokens."""
    joined = copy_layer(layers[0])
    for name in _entries(joined):
        setattr(joined, name, torch.cat([getattr(layer, name) for layer in layers]))
    for name in STATES:
        for key, value in (getattr(joined, name, None) or {}).items():
            if value is not None:
                getattr(joined, name)[key] = torch.cat([getattr(layer, name)[key] for layer in layers])
    return joined


def layer_bytes(layer: Any) -> int:
    """Bytes that a layer of transformers' cache holds: keys and values of a window, or states."""
    states = [x for name in STATES for x in (getattr(layer, name, None) or {}).values() if x is not None]
    return sum(x.numel() * x.element_size() for x in [*_entries(layer).values(), *states])


def _entries(layer: Any) -> dict[str, Tensor]:
    found = {name: getattr(layer, name, None) for name in ("keys", "values")}
    return {name: x for name, x in found.items() if x is not None}
