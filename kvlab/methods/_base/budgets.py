"""Budgets shared out among layers or heads: whole entries in proportion to weights, with nothing lost to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# Shares are computed in float64; smaller differences are rounding noise and count as ties.
_NOISE_DIGITS = 9


def share_out(weights: Tensor, total: int, ceiling: int, floor: int = 0) -> Tensor:
    """Whole numbers in proportion to `weights` that sum to exactly min(total, n x ceiling).

    A share is clamp(c x weight, floor, ceiling), with the one level c at which the shares sum to the total. So the part
    above the ceiling goes to the other shares in proportion. Lifting shares to the floor costs the others in
    proportion. If only weights of zero are left to give to, they get equal shares. Shares are rounded by largest
    remainder; of equal remainders the earlier one is rounded up.

    Args:
        weights: `[..., n]`, not negative.
        total: what there is to share, at least n x floor.
        ceiling: the largest share.
        floor: the smallest share; at most the ceiling.

    Returns:
        int64 `[..., n]`.

    Raises:
        ValueError: a floor above the ceiling, a total that does not pay for the floors, or weights that are negative or
            not finite.
    """
    n = weights.shape[-1]
    if not 0 <= floor <= ceiling or total < n * floor:
        raise ValueError(f"{n} shares of {floor} .. {ceiling} cannot be made of {total}")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError("weights to share by must be finite and not negative")
    total = min(total, n * ceiling)
    # On the CPU, since not every GPU has float64.
    device, weights = weights.device, weights.cpu().double()
    positive = weights > 0
    starved = torch.where(positive, ceiling, floor).sum(-1, keepdim=True) < total
    weights = torch.where(starved, torch.where(positive, 1e18, 1.0), weights)

    # The sum of the clamped shares is piecewise linear in the level: it bends where a share leaves the floor or meets
    # the ceiling. The total lies in the piece that begins at the last bend whose sum is not above it.
    finite = torch.where(weights > 0, weights, 1.0)
    bends = torch.cat([floor / finite, ceiling / finite], -1).sort(-1).values
    spent = (bends[..., None] * weights[..., None, :]).clamp(floor, ceiling).sum(-1)
    piece = ((spent <= total).sum(-1, keepdim=True) - 1).clamp(0, 2 * n - 2)
    # Any level inside the piece tells which shares lie between floor and ceiling.
    inside = (bends.gather(-1, piece) + bends.gather(-1, piece + 1)) / 2 * weights
    low, high = inside <= floor, inside >= ceiling
    between = ~(low | high)
    left = total - floor * low.sum(-1, keepdim=True) - ceiling * high.sum(-1, keepdim=True)
    level = left / (weights * between).sum(-1, keepdim=True)
    shares = torch.where(between, level * weights, torch.where(low, float(floor), float(ceiling)))

    whole = (shares + 0.1**_NOISE_DIGITS).floor()
    remainders = (shares - whole).round(decimals=_NOISE_DIGITS)
    missing = total - whole.sum(-1, keepdim=True)
    order = remainders.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(n, device=order.device).expand_as(order))
    return (whole + (rank < missing)).clamp(floor, ceiling).long().to(device)
