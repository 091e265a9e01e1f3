"""Compute the loss of reading some of the recorded entries: many steps of a layer at once, from the full cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import EMPTY, pick
from kvlab.instruments import measures
from kvlab.replays.reference import Reference

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace

# Shares of what weighs less than this in the full softmax are lost to rounding.
TOO_LITTLE = 1e-20

# Bytes that tell of some layers which entries every step reads.
AT_ONCE = 2**25


@dataclass
class Reading:
    """Which of the recorded entries some steps of one layer read, as the model made them.

    Attributes:
        steps: these steps, one behind the other, counted from 0.
        positions: those that any of the steps reads, int64 `[sets, n]`, -1 padded; a set for each KV head or for each
            query head.
        read: which of the positions each step reads, bool `[sets, steps or 1, n]`; None for all that it can see.
    """

    steps: slice
    positions: Tensor
    read: Tensor | None = None

    def __post_init__(self):
        padded = self.positions == EMPTY
        if self.read is None and bool(padded.any()):
            self.read = ~padded[:, None]

    def _of(self, rows: Tensor) -> Tensor:
        """The positions' columns of `rows` `[sets x any, steps, length]`, zero where they are not read."""
        grouped = rows.unflatten(0, (len(self.positions), -1))
        columns = self.positions.clamp_min(0)[:, None, None].expand(*grouped.shape[:3], -1)
        weights = grouped.gather(-1, columns)
        return (weights if self.read is None else weights.masked_fill_(~self.read[:, None], 0)).flatten(0, 1)

    def mass(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The weights `[heads, steps, n]` of what is read, and their sum `[heads, steps]`, of the full cache's weights
        `[heads, steps, length]`.
        """
        weights = self._of(weights)
        return weights, weights.sum(-1)

    def found(self, ranks: Tensor, k: Tensor) -> Tensor:
        """Share of each step's top `k` `[steps]` that it reads, given ranks `[kv_heads, steps, length]`: averaged over
        a KV head's sets where it has several, `[kv_heads, steps]`.
        """
        sets, kv_heads = len(self.positions), len(ranks)
        columns = self.positions.clamp_min(0).unflatten(0, (kv_heads, -1))[:, :, None]
        ranks = ranks[:, None].expand(-1, sets // kv_heads, -1, -1)
        hit = ranks.gather(-1, columns.expand(*ranks.shape[:3], -1)) < k[:, None].to(ranks.dtype)
        if self.read is not None:
            hit &= self.read.unflatten(0, (kv_heads, -1))
        return (hit.sum(-1, dtype=torch.float32) / k).mean(1)

    def output(self, trace: Trace, layer: int, weights: Tensor, weight: Tensor) -> Tensor:
        """Attention output over what is read, `[heads, steps, head_dim]`.

        Args:
            weights: as `mass` gives them.
            weight: of what is read and of the sinks in the full softmax, `[heads, steps]`.
        """
        values = self._entries(trace.values[layer])
        if float(weight.min()) > TOO_LITTLE:
            return attention.output(weights, values) / weight[..., None]
        keys, softmax = self._entries(trace.keys[layer]), trace.softmax.row(layer)
        now = torch.arange(trace.prompt_length, trace.length, device=trace.device)[self.steps, None]
        visible = self.positions[:, None] <= now if self.read is None else self.read & (self.positions[:, None] <= now)
        visible = visible.repeat_interleave(trace.heads // len(self.positions), 0)
        return attention.output(
            attention.weights(trace.response_queries[layer][:, self.steps], keys, softmax, visible), values
        )

    def _entries(self, recorded: Tensor) -> Tensor:
        """Keys or values of the positions, `[sets, n, head_dim]`, of recorded ones `[kv_heads, length, head_dim]`."""
        if len(self.positions) > len(recorded):
            recorded = recorded.repeat_interleave(len(self.positions) // len(recorded), 0)
        return pick(recorded[None], self.positions[None])[0]


def readings(steps: slice, sets: list[Tensor], length: int) -> Iterator[Reading]:
    """The entries that these steps read, layer by layer, from the positions `[layers, sets, n]` of each, -1 padded."""
    layers, heads, _ = sets[0].shape
    # As many layers at once as leave memory small, however long the trace is.
    some = max(1, AT_ONCE // (heads * len(sets) * length))
    for first in range(0, layers, some):
        yield from _readings(steps, [positions[first : first + some] for positions in sets], length)


def _readings(steps: slice, sets: list[Tensor], length: int) -> Iterator[Reading]:
    read = sets[0].new_zeros(*sets[0].shape[:2], len(sets), length + 1, dtype=torch.bool)
    for step, positions in enumerate(sets):
        ranking.mark(read[:, :, step], positions)
    for layer in read[..., :length]:
        # Over bytes, since torch's `any` over another dimension than the last is fifty times slower.
        positions = ranking.positions_of(layer.view(torch.uint8).amax(1).bool())
        weights = layer.gather(-1, positions.clamp_min(0)[:, None].expand(-1, len(sets), -1))
        yield Reading(steps, positions, weights.logical_and_((positions != EMPTY)[:, None]))


def similar_runs(steps: list[int], sizes: list[int]) -> list[slice]:
    """Group steps that follow one another and read about equally many entries.

    A reading looks at each of its places in all of its steps, so steps of very different sizes would waste work.
    MorphKV's first step reads the whole prompt, and no other does.

    Args:
        steps: ascending.
        sizes: how many entries each step reads, those that are not among `steps` included.
    """
    runs: list[slice] = []
    for step in steps:
        if runs and runs[-1].stop == step and 2 * sizes[step] > sizes[runs[-1].start]:
            runs[-1] = slice(runs[-1].start, step + 1)
        else:
            runs.append(slice(step, step + 1))
    return runs


@dataclass
class Losses:
    """The losses of the steps of one layer, `mass` of the attention and `error` of the output `[heads, steps]`; and
    their `recall`, `[kv_heads, steps]`.
    """

    mass: Tensor
    error: Tensor
    recall: Tensor


def losses(side: Reference, layer: int, reading: Reading, k: Tensor) -> Losses:
    """Measured against the full cache; `k` is the size of the top that recall asks for at each step of the trace."""
    weights, mass = reading.mass(side.weights(layer)[:, reading.steps])
    weight = mass if side.sinks is None else mass + side.sinks[layer][:, reading.steps]
    output = reading.output(side.trace, layer, weights, weight)
    return Losses(
        mass=(1 - weight).clamp(0, 1),
        error=measures.output_error(side.outputs[layer][:, reading.steps], output),
        recall=reading.found(side.step_ranks[layer][:, reading.steps], k[reading.steps]),
    )
