"""What one model's attention sees while it prefills and decodes, written where the trace will have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.core import attention, hookable, hooks
from kvlab.core.adapter import StoreCache, held_bytes
from kvlab.core.rotation import Rotation, candidates
from kvlab.core.softmax import Softmax
from kvlab.core.store import LayerStore

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.recording import Recording


class Recorder:
    """Keeps what one model's attention sees while it prefills and decodes.

    Attributes:
        keys, values: `[layers, kv_heads, prompt + response, head_dim]`; the cache that the model runs on is made of
            them.
        queries, pre_queries: `[layers, heads, window + response, head_dim]`.
        accumulated: `[layers, heads, prompt]`; None where the plan does not ask for it.
        softmax: what the model makes of its products.
        rotations: how each layer turns, by its place.
        prefilling: whether what comes is the prompt.
    """

    def __init__(self, lm: LM, plan: Recording):
        config, modules = hookable.text_config(lm.model), hookable.layers_of(lm.model)
        self.layers, self.heads = len(modules), config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        kv_heads = self.heads // getattr(modules[0], "num_key_value_groups", self.heads // kv_heads)
        head_dim = getattr(modules[0], "head_dim", None) or config.hidden_size // self.heads
        prompt, stop = len(plan.ids), len(plan.ids) + plan.new_tokens
        self._first = prompt - plan.window  # the first token whose queries are kept
        storage = self.layers, kv_heads, stop, head_dim
        self.keys, self.values = (torch.empty(storage, dtype=lm.dtype, device=lm.device) for _ in range(2))
        pairs = zip(self.keys[:, None], self.values[:, None], strict=True)
        self.stores = [LayerStore.preallocated(keys, values) for keys, values in pairs]
        self.cache, self._model = StoreCache(self.stores, lm.model), lm.model
        shape = self.layers, self.heads, stop - self._first, head_dim
        self.queries, self.pre_queries = (torch.empty(shape, dtype=lm.dtype, device=lm.device) for _ in range(2))
        self.accumulated = None
        if plan.accumulate:
            self.accumulated = torch.zeros(self.layers, self.heads, prompt, device=lm.device)
        self.softmax = Softmax()
        self.rotations: dict[int, Rotation | None] = {}
        self._choices: list[Rotation] = []
        self._sinks: dict[int, Tensor] = {}
        self.prefilling = True

    def __call__(self, call: hooks.Call) -> Tensor:
        assert call.pre_rope is not None, "queries before RoPE are asked for"
        seen, n = call.keys.shape[2], call.queries.shape[2]
        kept = min(max(seen - self._first, 0), n)
        rows = slice(seen - self._first - kept, seen - self._first)
        if kept:
            self.queries[call.place, :, rows] = call.queries[0, :, n - kept :]
            self.pre_queries[call.place, :, rows] = call.pre_rope[0, :, n - kept :]
        self.softmax = call.softmax
        if self.prefilling:
            # The tables may have been made anew for the length of this very prompt.
            self._choices = list(candidates(self._model)) if call.place == 0 else self._choices
            self.rotations[call.place] = call.rotation(self._choices)
        if call.sinks is not None:
            self._sinks[call.place] = call.sinks
        if self.accumulated is not None and self.prefilling:
            gathered = attention.accumulate(call.queries[0], call.keys[0], call.softmax)
            self.accumulated[call.place, :, :seen] += gathered
        return call.attend()

    @property
    def uncompressed_bytes(self) -> int:
        """What the layers left alone hold now."""
        return sum(map(held_bytes, self.cache.others.values()))

    @property
    def sinks(self) -> Tensor | None:
        """The sinks of all layers, `[layers, heads]`, minus infinity where a layer has none; None if none has any."""
        if not self._sinks:
            return None
        none = torch.full((self.heads,), -torch.inf, device=self.keys.device)
        return torch.stack([self._sinks.get(place, none).float() for place in range(self.layers)])
