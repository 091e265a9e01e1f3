"""Which positions score highest, and the rank of each: equal scores, the earlier position wins."""

from __future__ import annotations

import numpy as np
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
    if 0 < widest < length:
        found = _reaching(scores, k, widest)
        if found is not None:
            return found
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :widest]
    if isinstance(k, Tensor) and widest:
        beyond = torch.arange(widest, device=scores.device) >= k[..., None]
        best = torch.where(beyond, length, best)
    best = best.sort(dim=-1).values
    return best.masked_fill(best == length, PAD)


def best_first(scores: Tensor, k: int) -> Tensor:
    """The `k` highest-scored positions from the best on, int64 `[..., k]`; of equal scores the earlier comes first."""
    best = top_positions(scores, k)
    return best.gather(-1, scores.gather(-1, best).sort(dim=-1, descending=True, stable=True).indices)


def _reaching(scores: Tensor, k: int | Tensor, widest: int) -> Tensor | None:
    """All that are not below the k-th score, as `top_positions`; None where they are more, since others equal it.

    To find that score and compare with it is several times cheaper than a sort. NaN ranks highest, as in a sort.
    """
    by_numpy = scores.is_cpu and scores.dtype in (torch.float32, torch.float64)
    return (_reaching_by_numpy if by_numpy else _reaching_by_torch)(scores, k, widest)


def _reaching_by_torch(scores: Tensor, k: int | Tensor, widest: int) -> Tensor | None:
    if isinstance(k, Tensor):
        return None
    least, unknown = scores.topk(widest, dim=-1).values[..., -1:], scores.isnan()
    above = (scores > least) | (unknown & ~least.isnan())
    equal = (scores == least) | (unknown & least.isnan())
    chosen = above | (equal & (equal.cumsum(-1) <= widest - above.sum(-1, keepdim=True)))
    return compacted(torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape), chosen, widest)


def compacted(values: Tensor, chosen: Tensor, n: int) -> Tensor:
    """The `n` values of each row that are chosen, in their order: `[..., m]` and bool `[..., m]` -> `[..., n]`."""
    if values.is_cpu:
        return values[chosen].view(*values.shape[:-1], n)
    # A GPU would have to say how many are chosen before anything else could be asked of it.
    place = chosen.cumsum(-1).masked_fill(~chosen, n + 1) - 1
    return values.new_empty(*values.shape[:-1], n + 1).scatter_(-1, place, values)[..., :n]


def _reaching_by_numpy(scores: Tensor, k: int | Tensor, widest: int) -> Tensor | None:
    # NumPy selects by vector instructions, three to ten times faster than `torch.topk`. The calls are few and short,
    # since every layer of every step runs them.
    length = scores.shape[-1]
    table = scores.detach().numpy().reshape(-1, length)
    if isinstance(k, Tensor):
        return _reaching_by_row(table, k, widest)
    ordered = table.copy()
    ordered.partition(-widest)
    found = (~(table < ordered[:, -widest, None])).ravel().nonzero()[0]
    if len(found) != len(table) * widest:
        return None
    positions = found.reshape(-1, widest)
    positions -= np.arange(0, table.size, length)[:, None]
    return torch.from_numpy(positions.reshape(*scores.shape[:-1], widest))


def _reaching_by_row(table: np.ndarray, k: Tensor, widest: int) -> Tensor | None:
    counts = k.detach().flatten().clamp(0, table.shape[1]).numpy()
    padded = np.full((len(table), widest), PAD)
    for row, out, n in zip(table, padded, counts.tolist(), strict=True):
        found = (~(row < np.partition(row, -n)[-n])).nonzero()[0] if n else ()
        if len(found) != n:
            return None
        out[:n] = found
    return torch.from_numpy(padded.reshape(*k.shape, widest))


def ranks(scores: Tensor) -> Tensor:
    """int32 `[..., length]`: 0 for the highest score; of equal scores the earlier position ranks higher."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return torch.empty_like(order, dtype=torch.int32).scatter_(-1, order, rank.expand_as(order))


def with_last(scores: Tensor, last: int) -> Tensor:
    """`scores` `[..., length]`, with infinity for the `last` positions, which always stay."""
    forced = scores.clone()
    forced[..., scores.shape[-1] - last :] = torch.inf
    return forced


def mark(chosen: Tensor, positions: Tensor) -> None:
    """Mark positions `[..., n]` in place in `chosen`, bool `[..., length + 1]`: what pads with -1 falls into the last
    column, which is no position.
    """
    chosen.scatter_(-1, positions.masked_fill(positions == PAD, chosen.shape[-1] - 1), True)


def marked(positions: Tensor, length: int) -> Tensor:
    """Which of `length` positions are among `positions` `[..., n]`, -1 padded: bool `[..., length]`."""
    chosen = torch.zeros(*positions.shape[:-1], length + 1, dtype=torch.bool, device=positions.device)
    mark(chosen, positions)
    return chosen[..., :-1]


def positions_of(chosen: Tensor) -> Tensor:
    """The positions that are chosen, bool `[..., length]` -> int64 `[..., most]`, ascending, -1 at the end of rows with
    fewer.
    """
    length, counts = chosen.shape[-1], chosen.sum(-1)
    most = int(counts.max())
    if int(counts.min()) == most:
        return chosen.nonzero()[:, -1].view(*chosen.shape[:-1], most)
    positions = torch.arange(length, device=chosen.device).expand(chosen.shape)
    ordered = torch.where(chosen, positions, length).sort(dim=-1).values[..., :most]
    return ordered.masked_fill(ordered == length, PAD)
