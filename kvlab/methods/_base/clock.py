"""One decoding step of one layer, in this order: append, select, bias, attend, amend. Replays and live runs share it.

The caller then calls `policy.step` (update, evict or merge); before that it may look at the store.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import attention
from kvlab.core.slots import padded
from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import EMPTY, LayerStore, pick
from kvlab.methods import Policy


@dataclass
class Step:
    """The attention of one decoding step: its output, its weights and the slots that it read."""

    output: Tensor  # [rows, heads, 1, head_dim]
    weights: Tensor | None  # [rows, heads, slots read]; None if not asked for
    slots: Tensor | None  # [rows, kv_heads, n] selected slots, -1 padded; None for everything stored

    def read(self, store: LayerStore) -> Tensor:
        """Positions read, `[rows, kv_heads, n]`, -1 padded; call it before the policy evicts."""
        return positions_read(store, self.slots)


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
    slots = append_and_select(policy, store, queries, keys, values, scaling, positions)
    return attend(policy, store, queries, slots, scaling, weigh)


def append_and_select(
    policy: Policy,
    store: LayerStore,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: Scaling,
    positions: Tensor | None = None,
) -> Tensor | None:
    """Append a token's entry, and select: the slots that it reads, `[rows, kv_heads, n]`; None for everything stored.

    Args: as `decode`.
    """
    store.append(keys, values, positions)
    store.quantise_pending()
    return policy.select(store, queries, Softmax.of(scaling).scaling)


def attend(
    policy: Policy,
    store: LayerStore,
    queries: Tensor,
    slots: Tensor | None,
    scaling: Scaling,
    weigh: bool = False,
) -> Step:
    """Attend from a token whose entry has been taken in, and amend.

    Args: as `decode`; `slots` as `append_and_select` gives them.
    """
    softmax, bias = Softmax.of(scaling), policy.bias(store)
    if weigh or not softmax.plain or (policy.weighs and policy.needs.steps):
        keys, values = (store.keys, store.values) if slots is None else store.gather(slots)
        weights = _weights(store, queries, keys, slots, bias, softmax)
        output = attention.output(weights, values).to(queries.dtype)
        return Step(policy.amend(store, output), weights[:, :, 0], slots)
    return Step(policy.amend(store, _fused(store, queries, slots, bias, softmax)), None, slots)


def weigh(store: LayerStore, queries: Tensor, slots: Tensor | None, scaling: Scaling) -> Tensor:
    """The weights alone, `[rows, heads, slots read]`, of a step without a bias.

    Args: as `attend`.
    """
    keys = store.keys if slots is None else store.gather(slots)[0]
    return _weights(store, queries, keys, slots, None, Softmax.of(scaling))[:, :, 0]


def positions_read(store: LayerStore, slots: Tensor | None) -> Tensor:
    """Positions of the slots that a step reads, `[rows, kv_heads, n]`, -1 padded; of everything stored for None."""
    if slots is None:
        return store.positions.clone()
    return pick(store.positions, slots).masked_fill(slots == EMPTY, EMPTY)


def _weights(
    store: LayerStore, queries: Tensor, keys: Tensor, slots: Tensor | None, bias: Tensor | None, softmax: Softmax
) -> Tensor:
    """`[rows, heads, 1, slots read]`; `keys` are those of the slots."""
    heads = queries.shape[1]
    visible = slots != EMPTY if slots is not None else store.occupied if store.ragged else None
    if visible is not None:
        visible = attention.to_query_heads(visible, heads)[:, :, None]
    if bias is not None:
        bias = bias if slots is None else pick(bias, slots)
        bias = attention.to_query_heads(bias, heads)[:, :, None]
    return attention.weights(queries, keys, softmax, visible, bias)


def _fused(store: LayerStore, queries: Tensor, slots: Tensor | None, bias: Tensor | None, softmax: Softmax) -> Tensor:
    """The output by PyTorch's fused kernel, or by kvlab's own where that may run."""
    if bias is None and (own := store.attend(queries, slots, softmax.scale(queries.shape[-1]))) is not None:
        return own
    # The group's heads become the rows of one product, which saves repeating the keys.
    grouped = attention.by_group(queries, store.kv_heads)
    if slots is not None:
        mask = None if bias is None else pick(bias, slots)[:, :, None].to(queries.dtype)
        if padded(slots):
            empty = (slots == EMPTY)[:, :, None]
            blank = torch.zeros_like(empty, dtype=queries.dtype)
            mask = (blank if mask is None else mask).masked_fill(empty, -torch.inf)
        out = F.scaled_dot_product_attention(grouped, *store.gather(slots), attn_mask=mask, scale=softmax.factor)
        return out.reshape(queries.shape)
    each, out = grouped.flatten(0, 1), []
    for heads, keys, values in store.runs():
        mask = None if bias is None else bias.flatten(0, 1)[heads, None, : keys.shape[1]].to(queries.dtype)
        some = each[None, heads], keys[None], values[None]
        out.append(F.scaled_dot_product_attention(*some, attn_mask=mask, scale=softmax.factor))
    return (out[0] if len(out) == 1 else torch.cat(out, 1)).reshape(queries.shape)
