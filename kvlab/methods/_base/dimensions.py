"""Approximate scores from the few dimensions in which a query is largest (SparQ, RocketKV)."""

import torch
from torch import Tensor

from kvlab.core import attention
from kvlab.core.slots import firsts
from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import LayerStore


def largest_dimensions(grouped: Tensor, rank: int) -> Tensor:
    """The `rank` dimensions with the largest |q| summed over the group: `[rows, kv_heads, group, head_dim]` -> int64
    `[rows, kv_heads, rank]`.
    """
    size = attention.exact(grouped).abs().sum(2)
    return size.sort(dim=-1, descending=True, stable=True).indices[..., :rank]


def begin(store: LayerStore, length: int, rank: int | None) -> None:
    """Note the length that the sequence is expected to reach, and how many dimensions are wanted (None for a rule)."""
    store.numbers |= {"expected": length, "rank": rank or 0}


def affordable(store: LayerStore, page: int = 1) -> int:
    """How many dimensions a step loads to find what it reads, of one vector for each `page` entries; 1 to head_dim. It
    is the given number, else what half the budget pays for at the expected length (once exceeded, at the true one).
    """
    head_dim, length = store.head_dim, max(store.numbers["expected"], store.length)
    paid = store.budget * store.vectors * head_dim * page // (2 * length)
    return min(store.numbers["rank"] or max(1, paid), head_dim)


def room(store: LayerStore, vectors: int, rank: int) -> int:
    """Return how many entries a step may read after finding them by `rank` dimensions of `vectors` keys.

    It is half the budget, less the cost of finding beyond the other half. It is at least one.
    """
    finding = -(-vectors * rank // (store.vectors * store.head_dim))
    return max(1, min(store.budget // 2, store.budget - finding))


def partial_queries(grouped: Tensor, dims: Tensor, scaling: Scaling) -> Tensor:
    """Queries cut down to some dimensions, scaled to the temperature that makes up for the missing ones.

    Args:
        grouped: `[rows, kv_heads, group, head_dim]`.
        dims: which dimensions, `[rows, kv_heads, r]`.
        scaling: 1 / sqrt(head_dim) if None, or a `Softmax`.

    Returns:
        `[rows, kv_heads, group, r]`: q_r / sqrt(head_dim x |q_r|_1 / |q|_1), whose products with the keys' r dimensions
        are the approximate logits.
    """
    grouped = attention.exact(grouped)
    factor = Softmax.of(scaling).factor
    factor = float(grouped.shape[-1] ** -0.5) if factor is None else factor
    part = grouped.gather(-1, dims[:, :, None].expand(*grouped.shape[:3], -1))
    tiny = torch.finfo(part.dtype).tiny
    some, whole = (x.abs().sum(-1, keepdim=True).clamp_min(tiny) for x in (part, grouped))
    return part * ((some / whole).rsqrt() * factor)


def shares(logits: Tensor, softmax: Softmax) -> Tensor:
    """Attention weights of capped logits in the layout of groups, both `[rows, kv_heads, group, n]`."""
    if softmax.sinks is None:
        return logits.softmax(-1)
    return softmax.shares(logits.flatten(1, 2)[:, :, None])[:, :, 0].unflatten(1, (logits.shape[1], -1))


def logits(part: Tensor, which: Tensor, table: Tensor) -> Tensor:
    """`part` `[rows, kv_heads, group, r]` times the rows `which` `[rows, kv_heads, r]` of `table` `[rows, kv_heads, m,
    n]`: `[rows, kv_heads, group, n]`.
    """
    rows, kv_heads, m, n = table.shape
    r = which.shape[-1]
    if 2 * r >= m or table.stride(-1) != 1:
        # To copy most rows, or rows that are not contiguous, costs more than to multiply the others by zero.
        whole = part.new_zeros(*part.shape[:3], m).scatter_(-1, which[:, :, None].expand(part.shape), part)
        return whole @ attention.exact(table)
    first = firsts(rows, kv_heads, kv_heads * m, m, which.device)
    picked = table.flatten(0, 2).index_select(0, (first + which).flatten()).view(rows, kv_heads, r, n)
    return part @ attention.exact(picked)
