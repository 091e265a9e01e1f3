"""Retained sets of both sides, compared: how many entries each keeps, and how many of them are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import kvlab
from kvlab.methods import Policy
from kvlab.methods.think import ThinK
from kvlab.traces.trace import Trace


def ours(trace: Trace, policy: Policy) -> Tensor:
    """What kvlab's policy keeps of the trace's prompt, bool `[layers, kv_heads, length]`; of ThinK the channels that
    go, bool `[layers, kv_heads, head_dim]`.
    """
    if isinstance(policy, ThinK):
        return policy.pruned(trace.prompt)
    replay = kvlab.replay(trace, policy)
    return as_mask([replay.kept(layer) for layer in trace.layers], trace.prompt_length)


def as_mask(positions: Iterable[Tensor], length: int) -> Tensor:
    """Positions `[kv_heads, n]` of each layer, -1 padded, as bool `[layers, kv_heads, length]`."""
    rows = []
    for layer in positions:
        mask = torch.zeros(len(layer), length + 1, dtype=torch.bool)
        rows.append(mask.scatter(1, torch.where(layer < 0, length, layer), True)[:, :length])
    return torch.stack(rows)


@dataclass(frozen=True)
class Agreement:
    """Two retained sets of one prompt, over all layers and KV heads.

    Attributes:
        ours, theirs: entries that each keeps of the prompt, for each head on average.
        same: twice the entries that both keep over the sum of what each keeps; 1 for equal sets.
        apart: entries that one of the two keeps.
        heads: layers x KV heads.
    """

    ours: float
    theirs: float
    same: float
    apart: int
    heads: int


def compared(mine: Tensor, other: Tensor) -> Agreement:
    """Bool `[layers, kv_heads, n]` of both sides."""
    heads, both = mine.shape[0] * mine.shape[1], int((mine & other).sum())
    total = int(mine.sum()) + int(other.sum())
    return Agreement(
        int(mine.sum()) / heads, int(other.sum()) / heads, 2 * both / total if total else 1.0, total - 2 * both, heads
    )


def even(mask: Tensor) -> bool:
    """Whether all layers keep equally many entries."""
    return len(set(mask.sum((1, 2)).tolist())) == 1
