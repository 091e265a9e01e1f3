"""The attention rows of the latest queries, stored with the entries as they were attended and never computed again."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.core.store import LayerStore

PROFILE = "profile"


def begin(store: LayerStore, window: int, rows: Tensor) -> None:
    """Keep the prompt's last rows, `[rows, kv_heads, slots, n]` with n <= window, the oldest first."""
    # Column r holds the row of the token at position r modulo the window, so that a new row replaces the oldest.
    ring = torch.arange(store.seen - rows.shape[-1], store.seen, device=rows.device) % window
    profile = torch.zeros(*store.positions.shape, window, dtype=rows.dtype, device=rows.device)
    profile[..., ring] = rows
    store.add_column(PROFILE, profile)
    store.numbers["rows"] = store.seen


def follow(store: LayerStore, window: int, row: Tensor) -> Tensor:
    """Keep the newest token's row `[rows, kv_heads, slots]` in the place of the oldest; returns the whole profile."""
    profile = store.column(PROFILE)
    # Tokens of a chat turn that was stored whole have no attention rows; older tokens' rows must not replace them.
    unseen = range(max(store.numbers["rows"], store.seen - window), store.seen - 1)
    if unseen:
        ring = torch.arange(unseen.start, unseen.stop, device=profile.device) % window
        profile.index_fill_(-1, ring, 0)
    store.numbers["rows"] = store.seen
    profile[..., (store.seen - 1) % window] = row
    return profile
