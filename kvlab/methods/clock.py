"""One decoding step of one layer by the clock: append, select, bias, attend, amend. Replays and live runs share it.

What follows, `policy.step` (update, evict or merge), is the caller's, who may want to look in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import attention
from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import EMPTY, LayerStore, pick
from kvlab.methods import Policy


@dataclass
class Step:
    """What one decoding step attended to."""

    output: Tensor  # [rows, heads, 1, head_dim]
    weights: Tensor | None  # [rows, heads, slots read]; None where nobody asked
    slots: Tensor | None  # [rows, kv_heads, n] selected slots, -1 padded; None for everything stored

    def read(self, store: LayerStore) -> Tensor:
        """Positions read, `[rows, kv_heads, n]`, -1 padded; to be asked before the policy evicts."""
        if self.slots is None:
            return store.positions.clone()
        return pick(store.positions, self.slots).masked_fill(self.slots == EMPTY, EMPTY)


def decode(
    policy: Policy,
    store: LayerStore,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: Scaling,
    positions: Tensor | None = None,
    weigh: bool = False,
) -> Step:
    """Append a token's entry and attend from it.

    Args:
        queries: `[rows, heads, 1, head_dim]`.
        keys, values: `[rows, kv_heads, 1, head_dim]`, its own entry.
        scaling: factor of the logits, 1 / sqrt(head_dim) if None, or a `Softmax`.
        positions: of the new entry; the next one unless given.
        weigh: the caller needs the attention weights even if the policy does not.
    """
    store.append(keys, values, positions)
    softmax = Softmax.of(scaling)
    slots = policy.select(store, queries, softmax.told)
    bias = policy.bias(store)
    keys, values = store.keys, store.values
    visible = store.occupied if store.ragged else None
    if slots is not None:
        keys, values = pick(keys, slots), pick(values, slots)
        bias = None if bias is None else pick(bias, slots)
        visible = slots != EMPTY
        visible = None if bool(visible.all()) else visible

    heads = queries.shape[1]
    if weigh or not softmax.plain or (policy.weighs and policy.steps):
        if visible is not None:
            visible = attention.to_query_heads(visible, heads)[:, :, None]
        if bias is not None:
            bias = attention.to_query_heads(bias, heads)[:, :, None]
        weights = attention.weights(queries, keys, softmax, visible, bias)
        out = policy.amend(store, attention.output(weights, values).to(queries.dtype))
        return Step(out, weights[:, :, 0], slots)
    mask = None if bias is None else bias[:, :, None].to(queries.dtype)
    if visible is not None:
        blank = torch.zeros_like(visible[:, :, None], dtype=queries.dtype)
        mask = (blank if mask is None else mask).masked_fill(~visible[:, :, None], -torch.inf)
    # The group's heads become the rows of one product, which saves repeating the keys.
    out = F.scaled_dot_product_attention(
        attention.by_group(queries, keys.shape[1]), keys, values, attn_mask=mask, scale=softmax.factor
    )
    return Step(policy.amend(store, out.reshape(queries.shape)), None, slots)
