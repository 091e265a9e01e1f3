"""The one place where attention is computed, and the seam through which it is seen inside a transformers model.

Shapes: queries `[..., heads, n, head_dim]`, keys and values `[..., kv_heads, length, head_dim]`; query head `h` reads
the KV head `h // (heads // kv_heads)` (its GQA group). The order of arrival decides which keys a query sees, never
lengths or the assigned positions. A pseudo-query of any position sees the whole prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvlab.core import onednn
from kvlab.core.softmax import Scaling, Softmax

CHUNK = 256
BLOCK = 128  # queries; fewer make too many operations, more compute what is masked
# The kernel behind PyTorch's own fused attention on a CPU. It also returns the logarithms of the sums under the
# softmaxes, `[batch, heads, n]`. FUSED is None where a PyTorch lacks the kernel.
FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def by_group(x: Tensor, kv_heads: int) -> Tensor:
    """`[..., heads, n, m]` seen as `[..., kv_heads, group * n, m]`: the rows that share one KV head, stacked."""
    *batch, heads, n, m = x.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    return x.reshape(*batch, kv_heads, heads // kv_heads * n, m)


def exact(x: Tensor) -> Tensor:
    """In float32, or in float64 where it came so: half precision is for storing, not for softmaxes."""
    return x if x.dtype == torch.float64 else x.float()


def logits(queries: Tensor, keys: Tensor, scaling: Scaling = None) -> Tensor:
    """Scaled dot products in float32 (float64 stays), capped where the model caps them, `[..., heads, n, length]`;
    `scaling` is 1 / sqrt(head_dim) unless given.
    """
    *batch, heads, n, head_dim = queries.shape
    softmax = Softmax.of(scaling)
    rows = by_group(exact(queries), keys.shape[-3]) * softmax.scale(head_dim)
    return softmax.capped(onednn.by_transposed(rows, exact(keys))).view(*batch, heads, n, keys.shape[-2])


def weights(
    queries: Tensor,
    keys: Tensor,
    scaling: Scaling = None,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention weights, softmax over the keys in float32 (float64 stays).

    Args:
        queries: `[..., heads, n, head_dim]`.
        keys: `[..., kv_heads, length, head_dim]`.
        scaling: 1 / sqrt(head_dim) unless given; a `Softmax` where the model caps its logits or has sinks.
        visible: bool, broadcastable to `[..., heads, n, length]`; False is masked out.
        bias: added to the logits before the softmax, broadcastable alike (ZSMerge eq. 8).

    Returns:
        `[..., heads, n, length]`, float32, rows sum to 1; less the sinks' share, where there are any.
    """
    scores = logits(queries, keys, scaling)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return Softmax.of(scaling).shares(scores)


def output(attention: Tensor, values: Tensor) -> Tensor:
    """Weighted sum of values: `[..., heads, n, length]`, `[..., kv_heads, length, head_dim]` -> `[..., heads, n,
    head_dim]`.
    """
    *batch, heads, n, _ = attention.shape
    rows = by_group(attention, values.shape[-3])
    return onednn.by_transposed(rows, exact(values).transpose(-1, -2)).view(*batch, heads, n, values.shape[-1])


def to_query_heads(x: Tensor, heads: int) -> Tensor:
    """One row for each query head from one for each KV head: `[..., kv_heads, m]` -> `[..., heads, m]`."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def sum_over_group(x: Tensor, kv_heads: int) -> Tensor:
    """`[..., heads, m]` -> `[..., kv_heads, m]`, summed over the query heads of each GQA group."""
    *batch, heads, m = x.shape
    return x.view(*batch, kv_heads, heads // kv_heads, m).sum(-2)


def last_visible(n: int, length: int, device: torch.device | None = None) -> Tensor:
    """`[n, length]` bool: what the last `n` of `length` arrivals may see (themselves and everything before)."""
    arrival = torch.arange(length, device=device)
    return arrival[None] <= arrival[length - n :, None]


def hide_later(scores: Tensor) -> None:
    """Hide in place, of the keys of `scores` `[..., n, length]`, those that came after a query: the n queries are the
    last arrivals among them.
    """
    # Only the n newest keys are hidden from any query, and masking them alone spares a pass over all.
    n = scores.shape[-2]
    scores[..., -n:].masked_fill_(~last_visible(n, n, scores.device), -torch.inf)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: Scaling,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The output alone; the queries are the last arrivals among the keys.

    PyTorch's fused kernel computes it. With a soft cap or sinks that the kernel lacks, kvlab computes it in chunks.
    Neither way builds a length x length matrix of weights.

    Args:
        padding: `[batch, length]` bool, False for padding; None when there is none.
        mask: `[n, length]` bool, who sees whom, where that is not simply everything that arrived before.

    Returns:
        `[batch, heads, n, head_dim]` in the dtype of the queries.
    """
    softmax = Softmax.of(scaling)
    if not softmax.plain:
        return _attend_by_chunks(queries, keys, values, softmax, padding, mask)
    n, length = queries.shape[-2], keys.shape[-2]
    if padding is None and mask is None and _takes_blocks(queries, keys, values):
        return _attend_by_blocks(queries, keys, values, softmax)
    if padding is None and mask is None and 1 < n < length and FUSED is not None and queries.is_cpu:
        return _attend_past_and_own(queries, keys, values, softmax)
    if padding is None and mask is None and 1 < n < length and queries.device.type == "cuda":
        return _attend_aligned(queries, keys, values, softmax)
    plain_causal = padding is None and mask is None and n == length and n > 1
    if mask is None and (padding is not None or (n > 1 and not plain_causal)):
        mask = last_visible(n, length, queries.device)
    if padding is not None and mask is not None:
        mask = _without_padding(mask, padding)
    group = queries.shape[-3] // keys.shape[-3]
    if n == 1 and mask is None and group > 1:
        # One token: the group's heads become the rows of one product, which saves repeating the keys.
        out = F.scaled_dot_product_attention(by_group(queries, keys.shape[-3]), keys, values, scale=softmax.factor)
        return out.reshape(queries.shape)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=plain_causal, scale=softmax.factor, enable_gqa=group > 1
    )


def attend_and_accumulate(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the output of `attend` and the attention on each key of `accumulate`.

    Both use the same weights where `attend` has them all.

    Args:
        queries: `[batch, heads, n, head_dim]`, the last arrivals among the keys.
        padding: `[batch, length]` bool, False for padding; None when there is none.

    Returns:
        `[batch, heads, n, head_dim]`, and `[batch, heads, length]`, over all n queries.
    """
    softmax = Softmax.of(scaling)
    if softmax.plain and padding is None and _takes_blocks(queries, keys, values):
        gathered = queries.new_zeros(*queries.shape[:2], keys.shape[2])
        return _attend_by_blocks(queries, keys, values, softmax, gathered), gathered
    return attend(queries, keys, values, scaling, padding), accumulate(queries, keys, scaling, padding=padding)


def _takes_blocks(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    # Broadcasting, and heads that no KV heads share evenly, are left to torch, whose errors say so.
    shaped = queries.dim() == keys.dim() == values.dim() == 4 and len(queries) == len(keys) == len(values)
    even = shaped and queries.shape[2] >= BLOCK // 2 and not queries.shape[1] % keys.shape[1]
    return even and onednn.plain(queries, keys, values) and onednn.wanted()


def _attend_by_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, gathered: Tensor | None = None
) -> Tensor:
    """Compute the output of `n` last arrivals by oneDNN's products, a block of queries and a KV head at a time.

    PyTorch's fused kernel multiplies by MKL (`core/onednn.py`), and takes up to twice as long where that is slow.

    Args:
        gathered: `[batch, heads, length]`, or None. The weights of all queries are added to it.
    """
    batch, heads, n, head_dim = queries.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    rows = (queries * softmax.scale(head_dim)).reshape(batch, kv_heads, heads // kv_heads, n, head_dim)
    keys, values = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (keys, values))
    out = queries.new_empty(*rows.shape[:4], values.shape[3])
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1)
    # Blocks end at multiples of BLOCK among the keys: oneDNN makes a kernel for each length that it meets.
    past = length - n
    ends = [*range((past // BLOCK + 1) * BLOCK - past, n, BLOCK), n]
    for b, h in itertools.product(range(batch), range(kv_heads)):
        for start, stop in itertools.pairwise([0, *ends]):
            seen, own = past + stop, stop - start
            block = rows[b, h, :, start:stop]
            scores = onednn.onednn(block.reshape(-1, head_dim), keys[b, h, :seen]).view(*block.shape[:2], seen)
            scores[..., seen - own :].masked_fill_(later[:own, :own], -torch.inf)
            shares = scores.softmax(-1)
            if gathered is not None:
                gathered[b].unflatten(0, (kv_heads, -1))[h, :, :seen] += shares.sum(-2)
            attended = onednn.onednn(shares.view(-1, seen), values[b, h, :seen].T)
            out[b, h, :, start:stop] = attended.view(*block.shape[:2], -1)
    return out.view(batch, heads, n, values.shape[3])


def _attend_past_and_own(queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
    """Compute the output where `n` queries come after others, from two parts: the past and their own tokens.

    All queries see the whole past; over their own tokens attention is causal. The sums under the two softmaxes join the
    parts. This needs no mask of n x length, which costs a fused kernel a quarter of its time.
    """
    assert FUSED is not None, "the caller has asked"
    n, heads, scale = queries.shape[-2], queries.shape[-3], softmax.scale(queries.shape[-1])
    before = keys.shape[-2] - n
    own = (x[..., before:, :].repeat_interleave(heads // x.shape[-3], -3) for x in (keys, values))
    output, own_sums = FUSED(queries, *own, 0.0, True, scale=scale)
    # The group's heads become the rows of one product, since no row is hidden from any of them.
    past = by_group(queries, keys.shape[-3]), keys[..., :before, :], values[..., :before, :]
    of_past, past_sums = FUSED(*past, 0.0, False, scale=scale)
    share = (past_sums.reshape(own_sums.shape) - own_sums).sigmoid()[..., None]
    return torch.lerp(exact(output), exact(of_past.view(output.shape)), exact(share)).to(queries.dtype)


def _attend_aligned(queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
    """The output where `n` queries come after others, by a kernel that aligns its causal mask with the last key.

    With a mask of n x length no fused kernel of CUDA takes grouped heads, and what does writes down all weights. Where
    no kernel aligns (another precision or head size), torch makes the mask.
    """
    mask = causal_lower_right(queries.shape[-2], keys.shape[-2])
    group = queries.shape[-3] // keys.shape[-3]
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=softmax.factor, enable_gqa=group > 1
    )


def _attend_by_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, padding: Tensor | None, mask: Tensor | None
) -> Tensor:
    n, length = queries.shape[-2], keys.shape[-2]
    parts = []
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        seen = length if mask is not None else length - n + stop
        visible = last_visible(stop - start, seen, keys.device) if mask is None else mask[start:stop]
        if padding is not None:
            visible = _without_padding(visible, padding[:, :seen], length - n + start)
        rows = weights(queries[..., start:stop, :], keys[..., :seen, :], softmax, visible)
        parts.append(output(rows, values[..., :seen, :]).to(queries.dtype))
    return torch.cat(parts, -2)


def _without_padding(mask: Tensor, padding: Tensor, first: int | None = None) -> Tensor:
    """Who sees whom `[n, length]` less what is padding: `[batch, 1, n, length]`; `first` is the first query's arrival,
    where the queries are not the last ones.
    """
    n, length = mask.shape
    first = length - n if first is None else first
    # A padding query sees nothing, and a softmax over nothing is NaN: let it see itself.
    itself = torch.arange(length, device=mask.device) == torch.arange(first, first + n, device=mask.device)[:, None]
    return (mask & padding[:, None, None, :]) | itself


def accumulate(
    queries: Tensor,
    keys: Tensor,
    scaling: Scaling = None,
    chunk: int = CHUNK,
    padding: Tensor | None = None,
) -> Tensor:
    """Attention that each key gathers from all queries, `[..., heads, length]`, without a length x length matrix.

    The queries are the last arrivals among the keys. H2O's accumulated score (its eq. 3) over the whole prompt.

    Args:
        padding: `[batch, length]` bool, False for padding, which neither gives nor gathers; None when there is none.
    """
    total = torch.zeros(*queries.shape[:-2], keys.shape[-2], dtype=torch.float32, device=queries.device)
    for heads, asking, softmax, scores in by_blocks(queries, keys, Softmax.of(scaling), chunk):
        seen = scores.shape[-1]
        if padding is not None:
            scores.masked_fill_(~padding[:, None, None, :seen], -torch.inf)
        shares = softmax.shares(scores)
        if padding is not None:
            shares.masked_fill_(~padding[:, None, seen - (asking.stop - asking.start) : seen, None], 0)
        total[..., heads, :seen] += shares.sum(-2)
    return total


def by_blocks(
    queries: Tensor, keys: Tensor, softmax: Softmax, block: int
) -> Iterator[tuple[slice, slice, Softmax, Tensor]]:
    """Compute the logits of the last arrivals among the keys, for one KV head and `block` queries at a time.

    Such a block stays in the processor's cache between two passes over it. Memory is linear in the number of queries.

    Yields:
        Which query heads and which queries; the softmax of these heads; logits `[..., heads, queries, seen]`, later
        keys hidden.
    """
    n, length, kv_heads = queries.shape[-2], keys.shape[-2], keys.shape[-3]
    group = queries.shape[-3] // kv_heads
    for head, start in itertools.product(range(kv_heads), range(0, n, block)):
        heads, asking = slice(head * group, (head + 1) * group), slice(start, min(start + block, n))
        seen, of_group = length - n + asking.stop, softmax.group(head, kv_heads)
        scores = logits(queries[..., heads, asking, :], keys[..., head : head + 1, :seen, :], of_group)
        hide_later(scores)
        yield heads, asking, of_group, scores


def attention_over_prompt(queries: Tensor, keys: Tensor, scaling: Scaling = None, inside: bool = False) -> Tensor:
    """softmax(q . K / sqrt(d)) over prompt keys only (DapQ eq. 1-2), and over a model's sinks where it has them.

    Args:
        queries: `[..., heads, n, head_dim]`.
        keys: `[..., kv_heads, prompt, head_dim]`.
        scaling: 1 / sqrt(head_dim) unless given.
        inside: the queries are the last `n` prompt tokens, and each sees itself and earlier tokens. Otherwise they come
            after the prompt (response tokens, pseudo-tokens) and see all of it.

    Returns:
        `[..., heads, n, prompt]`, rows sum to 1, less the sinks' share.
    """
    visible = last_visible(queries.shape[-2], keys.shape[-2], keys.device) if inside else None
    return weights(queries, keys, scaling, visible)


def projected_norms(values: Tensor, projection: Tensor, heads: int, order: int) -> Tensor:
    """Norms of W_o v for each query head that reads a value.

    Args:
        values: `[kv_heads, length, head_dim]`.
        projection: W_o, `[hidden, heads x head_dim]`.
        order: 1 or 2.

    Returns:
        `[heads, length]`.
    """
    group = heads // values.shape[0]
    # One head at a time: projected values are as wide as the hidden states.
    norms = [
        (exact(values[head // group]) @ exact(part).T).norm(p=order, dim=-1)
        for head, part in enumerate(projection.chunk(heads, dim=1))
    ]
    return torch.stack(norms)


def entropy(weights: Tensor) -> Tensor:
    """Entropy of attention rows in nats: `[..., length]` -> `[...]`, between 0 and log(length)."""
    return torch.special.entr(weights.float()).sum(-1)
