"""Scores of what is stored, for the oracles that score again while decoding: one group's keys and latest queries."""

from __future__ import annotations

import numpy as np

from support import oracles


def by_norm(latest, keys):
    return [-np.sqrt(key @ key) for key in keys]


def by_window(window, kernel):
    """SnapKV's pooled scores of what is stored, by the latest queries of one group."""

    def score(latest, keys):
        importance = oracles.snapkv_importance(np.asarray(latest), np.asarray(keys)[None], window, kernel)
        return importance[0]

    return score
