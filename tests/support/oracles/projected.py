"""Scores that need more of the model than queries, keys and values; one layer, float64, plain loops."""

from __future__ import annotations

import numpy as np

from support.oracles.core import heads_of, top_positions


def projected(value, projection, head):
    """What one value becomes in the hidden state when query head `head` reads it: [hidden]."""
    size = len(value)
    return np.array([row[head * size : (head + 1) * size] @ value for row in projection])


def oracle_criticalkv(importance, values, projection, heads, budget, first=0.5, epsilon=1e-4):
    """The first part by the scores, the rest by (score + epsilon) x the mean |W_o v|_1 of the group."""
    sets = []
    for group, scores in enumerate(importance):
        surely = set(top_positions(scores, int(first * budget)))
        surely |= {p for p, score in enumerate(scores) if np.isinf(score)}
        lowest = min(0.0, *(score for score in scores if np.isfinite(score)))
        weighed = {}
        for p, score in enumerate(scores):
            members = heads_of(group, heads, len(values))
            norm = sum(np.abs(projected(values[group][p], projection, head)).sum() for head in members) / len(members)
            weighed[p] = (score - lowest + epsilon) * norm
        rest = sorted((p for p in weighed if p not in surely), key=lambda p: (-weighed[p], p))
        sets.append(sorted([*surely, *rest[: budget - len(surely)]]))
    return sets


def turned(vector, position, frequencies, interleaved=False, factor=1.0):
    """RoPE of one vector, pair by pair; channels beyond the pairs stay as they are."""
    result = np.array(vector, dtype=float)
    pairs = len(frequencies)
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        cosine, sine = np.cos(position * frequency), np.sin(position * frequency)
        result[a] = factor * (vector[a] * cosine - vector[b] * sine)
        result[b] = factor * (vector[b] * cosine + vector[a] * sine)
    return result


def expected_attention(
    pre_queries, keys, values, turn, future=512, sinks=4, covariance=True, value_norm=True, epsilon=0
):
    """Scores [kv_heads][length] and infinity for the sinks; `turn(vector, position)` is the layer's rotation."""
    (heads, length, size), kv_heads = pre_queries.shape, len(keys)
    matrix = sum(
        np.stack([turn(axis, position) for axis in np.eye(size)], axis=1) for position in range(length, length + future)
    )
    matrix = matrix / future
    scores = []
    for group in range(kv_heads):
        total = np.zeros(length - sinks)
        members = heads_of(group, heads, kv_heads)
        for head in members:
            seen = pre_queries[head, sinks:]
            mean = sum(seen) / len(seen)
            spread = sum(np.outer(query - mean, query - mean) for query in seen) / len(seen)
            mean, spread = matrix @ mean, matrix @ spread @ matrix.T
            logits = []
            for key in keys[group, sinks:]:
                logits.append(mean @ key / np.sqrt(size) + (key @ spread @ key / (2 * size) if covariance else 0.0))
            raised = np.exp(np.array(logits) - max(logits))
            total += raised / raised.sum() / len(members)
        if value_norm:
            total = [(s + epsilon) * np.sqrt(v @ v) for s, v in zip(total, values[group, sinks:])]
        scores.append([np.inf] * sinks + list(total))
    return scores
