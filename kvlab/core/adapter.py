"""A layer's store in the shape of transformers' `Cache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from kvlab.core.store import LayerStore


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
        self.stores = stores
        super().__init__(layers=[StoreLayer(store) for store in stores])
