"""Which positions score highest, and the rank of each: equal scores, the earlier position wins."""

from __future__ import annotations

import torch
from torch import Tensor

PAD = -1


def top_positions(scores: Tensor, k: int | Tensor) -> Tensor:
    """The `k` highest-scored positions in ascending order; of equal scores the earlier position wins.

    Args:
        scores: `[..., length]`.
        k: how many, the same for every row or `[...]` of them; more than there are means all.

    Returns:
        int64 `[..., k]` (the largest k), -1 at the end of rows with fewer.
    """
    length = scores.shape[-1]
    widest = min(int(k.max()) if isinstance(k, Tensor) else int(k), length)
    if 0 < widest < length and not isinstance(k, Tensor):
        # All that reaches the k-th score is several times cheaper than a sort, and exact unless others equal it.
        reached = scores >= scores.topk(widest, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        # Two dimensions and not all: `nonzero` writes an index for each.
        found = reached.reshape(-1, length).nonzero()
        if len(found) == scores[..., :widest].numel():
            return found[:, 1].view(*scores.shape[:-1], widest)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :widest]
    if isinstance(k, Tensor) and widest:
        beyond = torch.arange(widest, device=scores.device) >= k[..., None]
        best = torch.where(beyond, length, best)
    best = best.sort(dim=-1).values
    return best.masked_fill(best == length, PAD)


def ranks(scores: Tensor) -> Tensor:
    """int32 `[..., length]`: 0 for the highest score; of equal scores the earlier position ranks higher."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return torch.empty_like(order, dtype=torch.int32).scatter_(-1, order, place.expand_as(order))


def with_last(scores: Tensor, last: int) -> Tensor:
    """`scores` `[..., length]`, with infinity for the `last` positions, which always stay."""
    forced = scores.clone()
    forced[..., scores.shape[-1] - last :] = torch.inf
    return forced


def positions_of(chosen: Tensor) -> Tensor:
    """The positions that are chosen, bool `[..., length]` -> int64 `[..., most]`, ascending, -1 at the end of rows with
    fewer.
    """
    length, counts = chosen.shape[-1], chosen.sum(-1)
    most = int(counts.max())
    if int(counts.min()) == most:
        return chosen.nonzero()[:, -1].view(*chosen.shape[:-1], most)
    places = torch.arange(length, device=chosen.device).expand(chosen.shape)
    ordered = torch.where(chosen, places, length).sort(dim=-1).values[..., :most]
    return ordered.masked_fill(ordered == length, PAD)
