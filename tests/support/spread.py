"""The 95 % interval of a mean of few numbers, with quantiles as tables of Student's distribution print them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

QUANTILES = {2: 12.706205, 3: 4.302653, 4: 3.182446, 5: 2.776445, 6: 2.570582}
"""97.5 % quantiles of Student's t, by how many numbers there are."""


def students(values: Iterable[float]) -> tuple[float, float]:
    """Low and high end of the interval of the mean."""
    listed = [float(value) for value in values]
    mean = statistics.fmean(listed)
    reach = QUANTILES[len(listed)] * statistics.stdev(listed) / len(listed) ** 0.5
    return mean - reach, mean + reach
