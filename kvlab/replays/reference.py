"""The full cache on a trace: computed once, and the reference of every policy."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import EMPTY
from kvlab.instruments import measures

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace

# Attention of every step over every key is kept for all policies of a trace, that of as many layers as fit in here.
# Where that is not all, that of a step in all layers is computed with its neighbours', which fit into a part of it.
KEPT_BYTES = 3 * 2**29
BLOCK = 1 / 6
# The attention and the ranks of all traces together: beyond it, those of the traces replayed longest ago are given up.
CACHE_BYTES = 2 * 2**30


class Reference:
    """The full cache on a trace: computed once, and the reference of every policy. `layer` is a place among the
    recorded layers.
    """

    def __init__(self, trace: Trace):
        # The trace keeps this object. If this kept the trace as well, both would stay until Python looks for circles.
        self._trace = ref(trace)
        layer = 4 * trace.heads * trace.steps * trace.length
        self._fits = trace.n_layers if layer * trace.n_layers <= KEPT_BYTES else KEPT_BYTES // layer
        self.free()

    @property
    def trace(self) -> Trace:
        trace = self._trace()
        assert trace is not None, "whoever asks holds the trace"
        return trace

    def __reduce__(self) -> tuple[Any, ...]:
        # In a copy or a pickle it is computed again, for the trace that goes with it.
        return reference, (self.trace,)

    def free(self) -> None:
        """Free what is large; it is computed again where it is asked for again."""
        self._rows: dict[int, Tensor] = {}
        self._block: tuple[int, Tensor] | None = None
        for large in ("step_ranks", "outputs"):
            self.__dict__.pop(large, None)

    @property
    def cached_bytes(self) -> int:
        """Bytes that `free` gives back."""
        large = [self._block and self._block[1], *map(self.__dict__.get, ("step_ranks", "outputs"))]
        return sum(tensor.nbytes for tensor in [*self._rows.values(), *large] if tensor is not None)

    def weights(self, layer: int) -> Tensor:
        """Attention of the response over all keys, `[heads, steps, length]`; zero on what a step cannot see yet."""
        trace = self.trace
        if layer in self._rows:
            return self._rows[layer]
        visible = attention.last_visible(trace.steps, trace.length, trace.device)
        softmax = trace.softmax.row(layer)
        rows = attention.weights(trace.response_queries[layer], trace.keys[layer], softmax, visible)
        if layer < self._fits:
            self._rows[layer] = rows
        return rows

    def at(self, step: int) -> Tensor:
        """Attention of the decoding query `step` (from 1) of all layers, `[layers, heads, prompt + step]`."""
        trace, seen = self.trace, self.trace.prompt_length + step
        if self._fits < trace.n_layers:
            first, rows = self._around(step)
            return rows[:, :, step - 1 - first, :seen]
        return torch.stack([self.weights(layer)[:, step - 1, :seen] for layer in range(trace.n_layers)])

    def _around(self, step: int) -> tuple[int, Tensor]:
        """Return the first of several decoding queries (from 0), the `step`-th among them, and their attention.

        The attention is `[layers, heads, n, prompt + the last]`. Steps come one after the other, so each layer's keys
        need not be read for each step.
        """
        trace = self.trace
        n = max(int(BLOCK * KEPT_BYTES) // (4 * trace.n_layers * trace.heads * trace.length), 1)
        first = (step - 1) // n * n
        if self._block is None or self._block[0] != first:
            self._block = None  # its memory is free for the next
            last = min(first + n, trace.steps)
            seen = trace.prompt_length + last
            visible = attention.last_visible(last - first, seen, trace.device)
            rows = torch.empty(
                (trace.n_layers, trace.heads, last - first, seen), dtype=torch.float32, device=trace.device
            )
            for layer, queries in enumerate(trace.response_queries[:, :, first:last]):
                rows[layer] = attention.weights(queries, trace.keys[layer, :, :seen], trace.softmax.row(layer), visible)
            self._block = first, rows
        return self._block

    @cached_property
    def sinks(self) -> Tensor | None:
        """The share of learnt sinks in the attention, `[layers, heads, steps]`; None where the model has none."""
        if self.trace.sinks is None:
            return None
        return torch.stack([measures.sink_share(self.weights(layer)) for layer in range(self.trace.n_layers)])

    @cached_property
    def outputs(self) -> Tensor:
        """`[layers, heads, steps, head_dim]`."""
        trace = self.trace
        return torch.stack(
            [attention.output(self.weights(layer), trace.values[layer]) for layer in range(trace.n_layers)]
        )

    @cached_property
    def gold_ranks(self) -> Tensor:
        """Rank of each prompt position by the response's attention over the prompt, `[layers, kv_heads, prompt]`."""
        trace = self.trace
        pairs = enumerate(zip(trace.response_queries, trace.prompt_keys, strict=True))
        scores = (measures.gold_scores(q, k, trace.softmax.row(layer)) for layer, (q, k) in pairs)
        return torch.stack([ranking.ranks(each) for each in scores])

    @cached_property
    def step_ranks(self) -> Tensor:
        """Rank of each key at each step by the group's summed attention, `[layers, kv_heads, steps, length]`."""
        trace = self.trace
        shape = trace.n_layers, trace.kv_heads, trace.steps, trace.length
        ranks = torch.empty(shape, dtype=torch.int32, device=trace.device)
        for layer in range(trace.n_layers):
            rows = self.weights(layer).transpose(0, 1)
            ranks[layer] = ranking.ranks(attention.sum_over_group(rows, trace.kv_heads)).transpose(0, 1)
        return ranks

    def share_found(self, ranks: Tensor, positions: Tensor, k: int | Tensor) -> Tensor:
        """Share of the top `k` among `positions`, given ranks: averaged over a KV head's sets where it has several.

        Args:
            ranks: `[..., kv_heads, length]`.
            positions: `[..., kv_heads or heads, n]`, -1 padded, on any device.
            k: one number, or `[..., 1, 1]`.

        Returns:
            `[..., kv_heads]`.
        """
        kv_heads = ranks.shape[-2]
        sets, positions = positions.shape[-2], positions.to(ranks.device)
        ranks = ranks if sets == kv_heads else attention.to_query_heads(ranks, sets)
        hit = (ranks.gather(-1, positions.clamp_min(0)) < k) & (positions != EMPTY)
        return (hit.sum(-1, keepdim=True, dtype=torch.float32) / k)[..., 0].unflatten(-1, (kv_heads, -1)).mean(-1)


_latest: list[ref[Reference]] = []
"""Those of all traces there are, the one asked for last at the end."""


def reference(trace: Trace) -> Reference:
    """Return the full cache's side of a trace, made on first use and kept as long as the trace.

    Of many traces, only the latest keep their large tensors.
    """
    found = trace.share("reference", lambda: Reference(trace))
    others = [each for each in _latest if each() not in (None, found)]
    _latest[:] = [*others, ref(found)]
    alive = [each for known in _latest if (each := known()) is not None]
    in_use = sum(each.cached_bytes for each in alive)
    for oldest in alive[:-1]:
        if in_use <= CACHE_BYTES:
            break
        in_use -= oldest.cached_bytes
        oldest.free()
    return found
