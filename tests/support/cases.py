"""What the tests of policies go through: shapes of attention, and policies with their parameters."""

from __future__ import annotations

SHAPES = [(8, 2), (4, 4), (4, 1)]  # grouped-query, multi-head, multi-query


def named(case):
    """The id of a test of a (policy, parameters)."""
    return "-".join([case[0], *(f"{k}{v}" for k, v in case[1].items())])
