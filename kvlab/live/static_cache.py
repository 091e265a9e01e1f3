"""A compressed prompt's entries as a cache of fixed size, whose decoding steps torch compiles once.

A step on it has the same shapes as the one before, so `torch.compile` and CUDA graphs need not begin anew with each
token. The model's own attention reads it, outside of the session.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from kvlab.errors import KvlabError, whole
from kvlab.live.cache import LiveCache


class FixedLayer(StaticLayer):
    """One layer's entries with room for more behind them.

    Slots lie behind the evicted entries, and `LiveLayer` describes itself in this way too. The slot of a token that
    comes later has the token's position. The causal mask hides the room that is still empty.

    Args:
        keys, values: `[batch, kv_heads, kept, head_dim]`, as transformers has them.
        evicted: tokens of the sequence less the kept entries.
        room: how many entries may follow.
    """

    def __init__(self, keys: Tensor, values: Tensor, evicted: int, room: int):
        kept = keys.shape[2]
        super().__init__(max_cache_len=kept + room)
        self.evicted = evicted
        self.lazy_initialization(keys, values)
        assert self.keys is not None and self.values is not None, "they were made in the line before"
        self.keys[:, :, :kept], self.values[:, :, :kept] = keys, values
        self.cumulative_length = torch.tensor(kept, device=keys.device)
        torch._dynamo.mark_static_address(self.cumulative_length)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None, "a layer is made with them"
        n = key_states.shape[2]
        slots = torch.arange(n, device=key_states.device) + self.cumulative_length
        self.cumulative_length.add_(n)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:  # type: ignore[reportIncompatibleMethodOverride]  # as StaticLayer's own
        # A number would be another one at each step, and compiled code is for one number.
        return self.cumulative_length + self.evicted

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, self.evicted

    def reset(self) -> None:
        raise KvlabError("a static cache is for the response to one prompt; ask the session of the next for another")


# Compiled code writes into it, in or out of inference mode.
@torch.inference_mode(False)
@torch.no_grad()
def static_cache(cache: LiveCache, room: int) -> Cache:
    """As `Session.static_cache`."""
    if whole("room", room) < 1:
        raise KvlabError(f"room is for at least one token, and is {room}")
    if cache.layout.mixed:
        raise KvlabError(
            "a static cache is for models of which a policy compresses every layer; go on with the session's cache"
        )
    if any(group.store.rounded for layer in cache.compressed for group in layer.groups):
        raise KvlabError("a static cache holds entries as they are; leave out storage=, or go on inside the session")
    layers = []
    for layer in cache.compressed:
        length = layer.outside().length
        keys, values = layer.keys, layer.values
        assert keys is not None and values is not None, "a prompt has been stored"
        layers.append(FixedLayer(keys, values, cache.seen - length, room))
    return Cache(layers=layers)
