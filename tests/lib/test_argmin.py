"""Which setting is best: that of the mean curve, with the interval of its bootstrap over documents."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest


def best_of(rows, columns):
    from kvlab.lib.intervals import argmin

    return argmin(pd.DataFrame(rows, columns=columns))


def test_the_mean_curve_decides_not_the_mean_of_the_best():
    """Each document alone prefers an end; together they prefer the middle."""
    value, (low, high) = best_of([[0.0, 0.1, 1.0], [1.0, 0.1, 0.0]] * 10, [0.1, 0.5, 0.9])
    assert value == 0.5 and low <= 0.5 <= high


def test_documents_that_agree_leave_no_doubt():
    assert best_of([[0.3, 0.1, 0.2]] * 5, [1, 2, 4]) == (2.0, (2.0, 2.0))


def test_a_flat_curve_has_a_wide_interval_of_settings_that_were_tried():
    noise = np.random.default_rng(0).normal(size=(12, 5))
    _, (low, high) = best_of(noise, [1, 2, 4, 8, 16])
    assert low < high and {low, high} <= {1.0, 2.0, 4.0, 8.0, 16.0}


def test_the_growth_of_the_best_resamples_the_same_documents_in_both():
    from kvlab.lib.intervals import argmin_difference

    short = pd.DataFrame([[0.1, 0.2, 0.3]] * 4, columns=[0.0, 1.0, 2.0])
    long = pd.DataFrame([[0.3, 0.2, 0.1]] * 4, columns=[0.0, 1.0, 2.0])
    assert argmin_difference(long, short) == (2.0, (2.0, 2.0))


def test_one_document_has_no_interval():
    value, interval = best_of([[0.3, 0.1, 0.2]], [1, 2, 4])
    assert value == 2.0 and interval == (2.0, 2.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_numbers_give_the_same_interval(seed):
    rows = np.random.default_rng(seed).normal(size=(8, 4))
    assert best_of(rows, [1, 2, 3, 4]) == best_of(rows, [1, 2, 3, 4])
