"""How much of the gap between random eviction and an oracle a policy closes, at one budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvlab.methods import Policy
from kvlab.methods._base.given_sets import GivenSets
from kvlab.methods.random import Random

GAPS = {"mass_gap_closed": "mass_lost", "error_gap_closed": "output_error"}
"""Columns of replays, and the loss that each is about."""


def is_oracle(policy: Policy) -> bool:
    """Whether it sees the response, or holds sets that an oracle has found."""
    return policy.needs.response or (isinstance(policy, GivenSets) and policy.oracle)


def gaps_closed(losses: Sequence[tuple[Policy, float | None, float]]) -> list[float]:
    """The share of the gap from `random` (0) to the oracle (1) that each policy closes.

    The loss of `random` is the mean over its seeds; those with sinks count where there are any. Of several oracles the
    one that loses least counts.

    Args:
        losses: policy, budget and loss of each, on the same documents. Only equal budgets are compared.

    Returns:
        One number for each; NaN where the budget has no `random`, no oracle, or no gap between the two.
    """
    found = []
    for _, budget, loss in losses:
        here = [(policy, each) for policy, at, each in losses if at == budget]
        draws = [(policy.sinks > 0, each) for policy, each in here if isinstance(policy, Random)]
        start = [each for sinks, each in draws if sinks == max(draws)[0]]
        end = [each for policy, each in here if is_oracle(policy)]
        gap = sum(start) / len(start) - min(end) if start and end else 0.0
        found.append((sum(start) / len(start) - loss) / gap if gap > 0 else math.nan)
    return found
