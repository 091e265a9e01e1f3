"""Measures of what a compressed cache loses: pure functions on tensors, each with its definition.

Query heads `h` of one GQA group share a KV head `g`. Position sets are int64, padded with -1 where a head keeps fewer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core import attention
from kvlab.core.attention import attention_over_prompt
from kvlab.core.ranking import PAD
from kvlab.core.softmax import Scaling


def query_similarity(queries: Tensor, others: Tensor) -> Tensor:
    """Cosine of each query with the one that it is aligned with (DapQ table 1 shows its mean).

    Args:
        queries, others: equal shapes `[..., head_dim]`; post-RoPE or pre-RoPE, but both the same.

    Returns:
        `[...]` in [-1, 1].

    Raises:
        ValueError: shapes differ.
    """
    if queries.shape != others.shape:
        raise ValueError(f"queries to compare must be aligned: {tuple(queries.shape)} against {tuple(others.shape)}")
    return F.cosine_similarity(queries.float(), others.float(), dim=-1)


def gold_scores(queries: Tensor, keys: Tensor, scaling: Scaling = None) -> Tensor:
    """Attention over the prompt, summed over the response queries and over the heads of each group.

    The top k of these are the gold set (DapQ eq. 1).

    Args:
        queries: response queries `[..., heads, n, head_dim]`.
        keys: prompt keys `[..., kv_heads, prompt, head_dim]`.

    Returns:
        `[..., kv_heads, prompt]`.
    """
    return attention.sum_over_group(attention_over_prompt(queries, keys, scaling).sum(-2), keys.shape[-3])


def recall(kept: Tensor, gold: Tensor) -> Tensor:
    """Share of the gold positions that were kept (DapQ eq. 3).

    Args:
        kept: `[..., n]`, padded with -1.
        gold: `[..., k]`, padded with -1.

    Returns:
        `[...]` in [0, 1].
    """
    retained = ((gold[..., :, None] == kept[..., None, :]) & (gold[..., :, None] != PAD)).any(-1)
    return retained.sum(-1, dtype=torch.float32) / (gold != PAD).sum(-1).clamp_min(1)


def mass_kept(weights: Tensor, read: Tensor) -> Tensor:
    """Attention mass on the positions that are read: `[..., heads, length]`, `[..., kv_heads, n]` -> `[..., heads]`."""
    rows = attention.to_query_heads(read, weights.shape[-2])
    return weights.gather(-1, rows.clamp_min(0)).masked_fill(rows == PAD, 0).sum(-1)


def mass_lost(weights: Tensor, read: Tensor, sinks: Tensor | None = None) -> Tensor:
    """1 - the attention mass on the positions that are read.

    The share of learnt sinks is not lost, and is subtracted as well. The result is the mass on the keys that are not
    read.

    Args:
        weights: softmax over all keys that a full cache would hold, `[..., heads, length]`.
        read: positions read, `[..., kv_heads, n]`, padded with -1 (tokens merged into another's slot are not among
            them, so they count as lost).
        sinks: `[..., heads]`, the share of each head's learnt sink (`sink_share`); None where there is none.

    Returns:
        `[..., heads]` in [0, 1].
    """
    kept = mass_kept(weights, read)
    return (1 - kept if sinks is None else 1 - sinks - kept).clamp(0, 1)


def sink_share(weights: Tensor) -> Tensor:
    """The share of the attention that learnt sinks take.

    Args:
        weights: of the keys, `[..., heads, length]`.

    Returns:
        What they lack of a sum of 1, `[..., heads]`.
    """
    return (1 - weights.sum(-1)).clamp(0, 1)


def lost_weights(weights: Tensor, read: Tensor) -> Tensor:
    """The attention that falls on each position which is not read; shapes as `mass_lost`, -> `[..., heads, length]`."""
    length = weights.shape[-1]
    rows = attention.to_query_heads(read, weights.shape[-2]).to(weights.device)
    # Padding is scattered into a column of its own.
    return F.pad(weights, (0, 1)).scatter(-1, rows.masked_fill(rows == PAD, length), 0)[..., :length]


def concentrated_loss(weights: Tensor, read: Tensor) -> Tensor:
    """Attention mass lost over the square root of the number of tokens that it is lost on: m / sqrt(n).

    w_i is the attention on the i-th key that is not read, and m = sum w_i. n = m^2 / sum w_i^2 is the effective number
    of tokens (the participation ratio: equal losses on k tokens give k). So it is sqrt(sum w_i^2). A head that loses
    0.4 on two tokens has 0.28, one that loses 0.6 evenly on 900 has 0.02. With the square root instead of n, another
    lost token never lowers the measure. A loss on one token counts in full.

    Args:
        weights, read: as `mass_lost`.

    Returns:
        `[..., heads]` in [0, 1].
    """
    return lost_weights(weights, read).norm(dim=-1)


def output_error(full: Tensor, compressed: Tensor) -> Tensor:
    """Relative error ||o - o'|| / ||o|| of the attention output (ZSMerge figure 4).

    Args:
        full, compressed: `[..., heads, head_dim]`, merging and logit bias included in the second.

    Returns:
        `[..., heads]`.
    """
    full, compressed = full.float(), compressed.float()
    return (full - compressed).norm(dim=-1) / full.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
