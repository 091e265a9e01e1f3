"""Every published number carries its spread: bootstrap intervals over repeated trials, documents or tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy import stats


def interval(
    values: Iterable[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean.

    Args:
        values: independent repetitions (documents, trials); with fewer than two the interval is the value itself.
        confidence: coverage of the interval.

    Returns:
        (low, high).
    """
    sample = np.asarray(list(values), dtype=float)
    if len(sample) < 2 or np.ptp(sample) == 0:
        mean = float(sample.mean()) if len(sample) else float("nan")
        return mean, mean
    result = stats.bootstrap(
        (sample,),
        np.mean,
        confidence_level=confidence,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def summarise(values: Iterable[float], **options) -> tuple[float, tuple[float, float]]:
    """The mean and its interval."""
    sample = np.asarray(list(values), dtype=float)
    return float(sample.mean()), interval(sample, **options)
