"""Record the inputs of a model's attention during prefill and decode, directly into the trace's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.core import hookable, hooks
from kvlab.core.adapter import StoreCache, layer_bytes
from kvlab.core.geometry import geometry
from kvlab.core.rotation import Rotation
from kvlab.core.slots import EMPTY
from kvlab.core.softmax import Softmax
from kvlab.core.store import LayerStore
from kvlab.methods._base.prompt import Prompt

if TYPE_CHECKING:
    from kvlab.inputs.models import LM
    from kvlab.traces.file_draft import Shapes
    from kvlab.traces.recording import Recording


def shapes(lm: LM, plan: Recording) -> Shapes:
    """The recorded tensors that grow with the prompt, by name: shapes and types."""
    modules, configured = hookable.layers_of(lm.model), geometry(lm.model.config)
    heads = configured.heads
    groups = None if hookable.is_latent(modules[0]) else getattr(modules[0], "num_key_value_groups", None)
    kv_heads = heads // (groups or configured.group)
    head_dim = hookable.head_dim_of(lm.model, modules[0])
    entries = (len(modules), kv_heads, len(plan.ids) + plan.new_tokens, head_dim), lm.dtype
    queries = (len(modules), heads, plan.window + plan.new_tokens, head_dim), lm.dtype
    found: Shapes = {"keys": entries, "values": entries, "queries": queries, "pre_queries": queries}
    if plan.hidden:
        width = hookable.text_config(lm.model).hidden_size
        found["hidden"] = (len(modules), len(plan.ids), width), lm.dtype
    if plan.accumulate:
        found["accumulated"] = (len(modules), heads, len(plan.ids)), torch.float32
    return found


class Recorder:
    """Keeps what one model's attention sees while it prefills and decodes.

    Args:
        tensors: the recorder writes into these. They have the names and shapes of `shapes`, and any content. Each is
            whole, or is one tensor for each layer where layers lie on several devices.
        place: where whole tensors of several devices' layers are joined.

    Attributes:
        cache: what the model runs on, made of the recorded keys and values.
        softmax: what the model makes of its products.
        rotations: how each layer rotates, by its index.
        prefilling: whether what comes is the prompt.
    """

    def __init__(self, lm: LM, plan: Recording, tensors: Mapping[str, Tensor | list[Tensor]], place: torch.device):
        self._length = len(plan.ids)
        self._first = self._length - plan.window  # the first token whose queries are kept
        self._tensors, self._place = tensors, place
        # Of each layer; what is written into these is in the whole tensors, where there are such.
        self._by_layer = {name: list(each) for name, each in tensors.items()}
        for gathered in self._by_layer.get("accumulated", ()):
            gathered.zero_()
        self.layers, self.heads = len(self._by_layer["queries"]), len(self._by_layer["queries"][0])
        pairs = zip(self._by_layer["keys"], self._by_layer["values"], strict=True)
        self.stores = [LayerStore.preallocated(keys[None], values[None]) for keys, values in pairs]
        self.cache, self._rotations = StoreCache(self.stores, lm.model), hooks.Rotations(lm.model)
        self.softmax = Softmax()
        self.rotations: dict[int, Rotation | None] = {}
        self._chosen: dict[int, list[Tensor]] = {}
        self._sinks: dict[int, Tensor] = {}
        self.prefilling = True

    def __call__(self, call: hooks.Call) -> Tensor:
        assert call.pre_rope is not None, "queries before RoPE are asked for"
        seen, n = call.keys.shape[2], call.queries.shape[2]
        kept = min(max(seen - self._first, 0), n)
        rows = slice(seen - self._first - kept, seen - self._first)
        if kept:
            self._by_layer["queries"][call.index][:, rows] = call.queries[0, :, n - kept :]
            self._by_layer["pre_queries"][call.index][:, rows] = call.pre_rope[0, :, n - kept :]
        self.softmax = call.softmax
        if self.prefilling:
            self.rotations[call.index] = self._rotations.of(call)
            if "hidden" in self._by_layer:
                assert call.hidden is not None, "hidden states are asked for"
                self._by_layer["hidden"][call.index][seen - n : seen] = call.hidden[0]
        if call.sinks is not None:
            self._sinks[call.index] = call.sinks
        if call.chosen is not None and not self.prefilling:
            self._chosen.setdefault(call.index, []).append(call.chosen[0, 0].long().sort().values)
        if "accumulated" in self._by_layer and self.prefilling:
            out, (gathered,) = call.attend_and_accumulate()
            self._by_layer["accumulated"][call.index][:, :seen] += gathered
            return out
        return call.attend()

    def whole(self, name: str) -> Tensor:
        """One of the recorded tensors, `[layers, ...]`; of several devices' layers a copy."""
        found = self._tensors[name]
        return found if isinstance(found, Tensor) else torch.stack([each.to(self._place) for each in found])

    def prompt(self) -> Prompt:
        """The end of the prefill as policies see it, one row for each layer, once the prompt has been fed."""
        return Prompt(
            self.whole("queries")[:, :, : self._length - self._first],
            self.whole("keys")[:, :, : self._length],
            self.whole("values")[:, :, : self._length],
            tuple(range(self.layers)),
            self.layers,
            scaling=Softmax(self.softmax.factor, self.softmax.softcap, self.sinks),
        )

    @property
    def chosen(self) -> Tensor | None:
        """The positions that a sparse indexer has chosen at each step of the response.

        They are `[layers, steps, k]`, -1 padded. The value is None before the first step, and without an indexer.
        """
        if not self._chosen:
            return None
        steps = [torch.nn.utils.rnn.pad_sequence(self._chosen[i], True, EMPTY) for i in range(self.layers)]
        return torch.stack([each.to(self._place) for each in steps])

    @property
    def uncompressed_bytes(self) -> int:
        """The present bytes of the layers left alone."""
        return sum(map(layer_bytes, self.cache.others.values()))

    @property
    def sinks(self) -> Tensor | None:
        """The sinks of all layers, `[layers, heads]`, minus infinity where a layer has none; None if none has any."""
        if not self._sinks:
            return None
        none = torch.full((self.heads,), -torch.inf, dtype=torch.float32)
        return torch.stack([self._sinks.get(index, none).float().to(self._place) for index in range(self.layers)])
