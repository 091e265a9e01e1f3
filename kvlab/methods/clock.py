"""One decoding step of one layer, in this order: append, select, bias, attend, amend. Replays and live runs share it.

The caller then calls `policy.step` (update, evict or merge); before that it may look at the store.
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
    weights: Tensor | None  # [rows, heads, slots read]; None if not asked for
    slots: Tensor | None  # [rows, kv_heads, n] selected slots, -1 padded; None for everything stored

    def read(self, store: LayerStore) -> Tensor:
        """Positions read, `[rows, kv_heads, n]`, -1 padded; call it before the policy evicts."""
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
    store.settle()
    softmax = Softmax.of(scaling)
    slots = policy.select(store, queries, softmax.told)
    bias = policy.bias(store)
    if weigh or not softmax.plain or (policy.weighs and policy.steps):
        weights, output = _weighed(store, queries, slots, bias, softmax)
        return Step(policy.amend(store, output), weights[:, :, 0], slots)
    return Step(policy.amend(store, _fused(store, queries, slots, bias, softmax)), None, slots)


def _weighed(
    store: LayerStore, queries: Tensor, slots: Tensor | None, bias: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """The weights `[rows, heads, 1, slots read]`, and the output."""
    heads = queries.shape[1]
    if slots is None:
        keys, values = store.keys, store.values
        visible = store.occupied if store.ragged else None
    else:
        keys, values = store.taken(slots)
        bias = None if bias is None else pick(bias, slots)
        visible = slots != EMPTY
    if visible is not None:
        visible = attention.to_query_heads(visible, heads)[:, :, None]
    if bias is not None:
        bias = attention.to_query_heads(bias, heads)[:, :, None]
    weights = attention.weights(queries, keys, softmax, visible, bias)
    return weights, attention.output(weights, values).to(queries.dtype)


def _fused(store: LayerStore, queries: Tensor, slots: Tensor | None, bias: Tensor | None, softmax: Softmax) -> Tensor:
    """The output by PyTorch's fused kernel."""
    # The group's heads become the rows of one product, which saves repeating the keys.
    grouped = attention.by_group(queries, store.kv_heads)
    if slots is not None:
        mask = None if bias is None else pick(bias, slots)[:, :, None].to(queries.dtype)
        if not bool((visible := slots != EMPTY).all()):
            blank = torch.zeros_like(visible[:, :, None], dtype=queries.dtype)
            mask = (blank if mask is None else mask).masked_fill(~visible[:, :, None], -torch.inf)
        out = F.scaled_dot_product_attention(grouped, *store.taken(slots), attn_mask=mask, scale=softmax.factor)
        return out.reshape(queries.shape)
    each, out = grouped.flatten(0, 1), []
    for heads, keys, values in store.runs():
        mask = None if bias is None else bias.flatten(0, 1)[heads, None, : keys.shape[1]].to(queries.dtype)
        some = each[None, heads], keys[None], values[None]
        out.append(F.scaled_dot_product_attention(*some, attn_mask=mask, scale=softmax.factor))
    return (out[0] if len(out) == 1 else torch.cat(out, 1)).reshape(queries.shape)
