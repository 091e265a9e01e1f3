"""Retained sets of both sides, compared: how many entries each keeps, and how many of them are the same."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers_methods import Cut, Method
from peers_process import Process
from safetensors.torch import load_file
from torch import Tensor

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods import Policy
from kvlab.methods.think import ThinK
from kvlab.traces.trace import Trace


def ours(trace: Trace, policy: Policy) -> Tensor:
    """Return the entries of the trace's prompt that kvlab's policy keeps, bool `[layers, kv_heads, length]`.

    For ThinK return the channels that it removes, bool `[layers, kv_heads, head_dim]`.
    """
    if isinstance(policy, ThinK):
        return policy.pruned(trace.prompt)
    replay = kvlab.replay(trace, policy)
    return as_mask([replay.kept(layer) for layer in trace.layers], trace.prompt_length)


def retained(peer: Process, ids: list[int], presses: list[dict[str, Any]]) -> list[Tensor]:
    """Return the entries of a prompt that each press keeps, bool `[layers, kv_heads, n]`."""
    with tempfile.TemporaryDirectory(prefix="kvlab-peers-") as place:
        file = Path(place) / "sets.safetensors"
        peer.ask("retain", ids=ids, presses=presses, into=str(file))
        masks = load_file(file)
    return [masks[str(number)].bool() for number in range(len(presses))]


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


def counterpart(method: Method, theirs: Tensor, length: int, group: int) -> Policy | None:
    """kvlab's policy that keeps what a press kept of `length` tokens, bool `[layers, kv_heads, n]`, as far as
    parameters go; None where none can.

    Args:
        group: query heads that share a KV head.
    """
    if method.alike is None:
        return None
    entries = round(int(theirs.sum()) / (theirs.shape[0] * theirs.shape[1]))
    # Whole chunks may come to less than a window, which kvlab refuses.
    with contextlib.suppress(KvlabError):
        return method.alike(Cut(length, entries, even(theirs), group))
    return None
