"""Pages of consecutive entries, each summed up by the elementwise maximum and minimum of its keys (Quest, RocketKV).

The summaries of a store lie in `memory["pages"]`, `[rows, kv_heads, 2, head_dim, pages]`, maximum first, and count as
storage. Each dimension's pages are contiguous, as in RocketKV (section 3.4, step 1). Selecting some dimensions then
copies whole stretches of memory. The newest page may have fewer entries than the others.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvlab.core import ranking
from kvlab.core.store import EMPTY, LayerStore


def begin(store: LayerStore, size: int) -> None:
    """Fix the number of entries in a page, and forget the summaries of other pages."""
    store.memory.pop("pages", None)
    store.numbers |= {"page": size, "paged": 0}


def number(store: LayerStore) -> int:
    """How many pages the stored entries fill, the newest one perhaps in part."""
    return -(-store.length // store.numbers["page"])


def sizes(store: LayerStore) -> tuple[Tensor, Tensor]:
    """Entries of each page, int64 `[pages]`, and their logarithms; to be read."""
    return _sizes(store.length, store.numbers["page"], store.device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _sizes(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    entries = torch.full((-(-length // size),), size, device=device)
    entries[-1] -= len(entries) * size - length
    return entries, entries.log()


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _within(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


def summaries(store: LayerStore) -> Tensor:
    """`[rows, kv_heads, 2, head_dim, pages]`, brought up to date: only pages with new entries are computed."""
    size, paged = store.numbers["page"], store.numbers["paged"]
    if paged == store.length:
        return store.memory["pages"]
    extremes = store.memory.get("pages")
    if extremes is None:
        shape = store.rows, store.kv_heads, 2, store.head_dim, 0
        extremes = torch.empty(shape, dtype=store.dtype, device=store.device)
    extremes = store.memory["pages"] = extended(extremes, number(store))
    first = paged // size
    if store.length - paged == 1 and paged % size and store.storage.exact:
        # One more entry of the newest page. A storage may round those before it at any step, so that all are looked at.
        key, (highest, lowest) = store.since(paged)[0][:, :, 0], extremes[..., -1].unbind(2)
        torch.maximum(highest, key, out=highest)
        torch.minimum(lowest, key, out=lowest)
        store.numbers["paged"] = store.length
        return extremes
    keys, _ = store.since(first * size)
    whole = keys.shape[2] // size
    for start, part in ((first, keys[:, :, : whole * size]), (first + whole, keys[:, :, whole * size :])):
        if part.shape[2]:
            lowest, highest = part.unflatten(2, (-1, min(size, part.shape[2]))).aminmax(dim=3)
            extremes[:, :, 0, :, start : start + lowest.shape[2]] = highest.transpose(2, 3)
            extremes[:, :, 1, :, start : start + lowest.shape[2]] = lowest.transpose(2, 3)
    store.numbers["paged"] = store.length
    return extremes


def extended(tensor: Tensor, n: int) -> Tensor:
    """`tensor` `[..., m]` extended to `n` >= m on its last axis: in place while its storage lasts. The storage grows by
    an eighth each time, so appending costs amortised constant time; the tensor itself counts only what is used.
    """
    capacity = tensor.stride(-2)
    if tensor.shape[-1] and n <= capacity:
        return tensor.as_strided((*tensor.shape[:-1], n), tensor.stride())
    grown = tensor.new_empty(*tensor.shape[:-1], n + max(16, n // 8))[..., :n]
    grown[..., : tensor.shape[-1]] = tensor
    return grown


def read(store: LayerStore, scores: Tensor, k: int, cut: bool) -> Tensor:
    """Slots of the pages with the largest `scores` `[rows, kv_heads, pages]`, at most `k`; ascending, -1 padded.

    Of equal scores the earlier page comes first.

    Args:
        cut: read exactly `k` entries, the first ones of a page that does not fit. Otherwise pages are read whole, until
            one does not fit; of a best page that is larger than `k` the first `k` entries are read.
    """
    size, n = store.numbers["page"], number(store)
    if size == 1:
        return ranking.top_positions(scores, k)
    newest = store.length - (n - 1) * size
    within = _within(min(size, k), scores.device)
    if k >= size and (k % size == 0 and newest == size if cut else k % size < newest):
        # Whichever pages are the best, so many fit in full, and of the next one nothing is read.
        best = ranking.top_positions(scores, k // size)
        slots = (best[..., None] * size + within).flatten(-2)
        if newest == size:
            return slots
        # To look at all heads spares a mask on the CPU, and makes a GPU wait.
        if slots.is_cpu and bool((best[..., -1] == n - 1).all()):
            return slots[..., : newest - size]
        return slots.masked_fill(slots >= store.length, EMPTY)
    best = ranking.best_first(scores, min(n, max(-(-(k - newest) // size), 0) + 1))
    entries = sizes(store)[0].take(best)
    cumulative = entries.cumsum(-1)
    if cut:
        # Negative where nothing is left for a page.
        counts = torch.minimum(entries - cumulative + k, entries)
    else:
        counts = entries * (cumulative <= k)
        counts[..., 0] = entries[..., 0].clamp_max(k)
        # Pages that are not read go to the end.
        best = best.masked_fill(counts == 0, n)
    best, order = best.sort(-1)
    counts = counts.gather(-1, order)
    slots, wanted = best[..., None] * size + within, within < counts[..., None]
    if cut:
        return ranking.compacted(slots.flatten(-2), wanted.flatten(-2), k)
    most = int(counts.sum(-1).max()) if slots.is_cpu else k
    return slots.masked_fill(~wanted, EMPTY).flatten(-2)[..., :most]
