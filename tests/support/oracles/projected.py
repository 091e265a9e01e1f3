"""Scores that need more of the model than queries, keys and values; one layer, float64, plain loops."""

from __future__ import annotations

import numpy as np

from support.oracles.core import heads_of, top_positions
from support.oracles.scorers import oracle_adakv


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


def oracle_criticaladakv(importance, values, projection, heads, budget, first=0.5, epsilon=1e-4, floor=0.2):
    """Each head's number of entries by Ada-KV, and these entries by CriticalKV."""
    shares = [len(positions) for positions in oracle_adakv(importance, budget, floor)]
    sets = [
        oracle_criticalkv(importance, values, projection, heads, share, first, epsilon)[group]
        for group, share in enumerate(shares)
    ]
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
            logits = [
                mean @ key / np.sqrt(size) + (key @ spread @ key / (2 * size) if covariance else 0.0)
                for key in keys[group, sinks:]
            ]
            raised = np.exp(np.array(logits) - max(logits))
            total += raised / raised.sum() / len(members)
        if value_norm:
            total = [(s + epsilon) * np.sqrt(v @ v) for s, v in zip(total, values[group, sinks:])]
        scores.append([np.inf] * sinks + list(total))
    return scores


def repeat_scores(queries, keys, values, length, start, stop, sinks, hidden=None, projection=None):
    """Scores [kv_heads][stop - start] of a part of a prompt by a pass that repeats it.

    Queries [heads, m, d] are the pass's, keys and values [kv_heads, length + m, d] the prompt's and then the pass's.
    With `hidden` [m, width] and `projection` they are those of KVzip+.
    """
    first = list(range(min(sinks, start))) + list(range(start, stop))
    scores = []
    for group in range(len(keys)):
        best = np.zeros(stop - start)
        for head in heads_of(group, len(queries), len(keys)):
            for i, query in enumerate(queries[head]):
                shown = first + list(range(length, length + i + 1))
                logits = np.array([keys[group, p] @ query / np.sqrt(len(query)) for p in shown])
                raised = np.exp(logits - logits.max())
                weights = dict(zip(shown, raised / raised.sum()))
                for p in range(start, stop):
                    score = weights[p]
                    if hidden is not None:
                        value = projected(values[group, p], projection, head)
                        score *= np.sqrt(value @ value) / np.sqrt(hidden[i] @ hidden[i])
                    best[p - start] = max(best[p - start], score)
        scores.append(list(best))
    return scores


def oracle_kvzip(scores, budget, sinks=4):
    """The best entries of all layers and heads together; `scores` is [layers][kv_heads][length]."""
    entries = [
        (0 if p < sinks else 1, -score, p, layer, head)
        for layer, heads in enumerate(scores)
        for head, row in enumerate(heads)
        for p, score in enumerate(row)
    ]
    kept = [[[] for _ in heads] for heads in scores]
    for _, _, p, layer, head in sorted(entries)[: budget * sum(map(len, scores))]:
        kept[layer][head].append(p)
    return [[sorted(positions) for positions in heads] for heads in kept]


def oracle_kvcompose(attended, values, budget, shared=True, value_norm=False):
    """`attended` [layers][kv_heads][length], averaged over groups: sets, as many in each head of a layer."""
    scores, worth = [], []
    for heads, vectors in zip(attended, values):
        rows = [list(row) for row in heads]
        if value_norm:
            rows = [[x * np.sqrt(v @ v) for x, v in zip(row, own)] for row, own in zip(rows, vectors)]
        if shared:
            mean = [sum(column) / len(rows) for column in zip(*rows)]
            rows = [[x + m for x, m in zip(row, mean)] for row in rows]
        ordered = [sorted(row, reverse=True) for row in rows]
        worth.append([sum(column) / len(rows) for column in zip(*ordered)])
        scores.append(rows)
    worth[0] = [max(column) for column in zip(*worth)]
    entries = sorted((n > 0, -x, n, layer) for layer, row in enumerate(worth) for n, x in enumerate(row))
    stay = [layer for *_, layer in entries[: budget * len(worth)]]
    return [[top_positions(row, stay.count(layer)) for row in rows] for layer, rows in enumerate(scores)]


def think_channels(queries, keys, length, window, ratio):
    """The channels that go, a list for each KV head: the smallest mean q^2 x mean k^2; of equal ones the later."""
    gone = []
    for group in range(len(keys)):
        weights = []
        members = heads_of(group, len(queries), len(keys))
        for channel in range(keys.shape[2]):
            asked = [queries[head, p, channel] ** 2 for head in members for p in range(length - window, length)]
            held = [keys[group, p, channel] ** 2 for p in range(length)]
            weights.append(sum(asked) / len(asked) * sum(held) / len(held))
        kept = top_positions(weights, len(weights) - int(ratio * len(weights)))
        gone.append([channel for channel in range(len(weights)) if channel not in kept])
    return gone


def leverage(keys, turn_back, sketch, ridge=1e-2):
    """Scores [kv_heads][length]: x_i (X'X + ridge)^-1 x_i of the sketched keys before RoPE, less their mean."""
    scores = []
    for head in keys:
        before = [turn_back(key, position) for position, key in enumerate(head)]
        mean = sum(before) / len(before)
        rows = [(key - mean) @ sketch for key in before]
        gram = sum(np.outer(row, row) for row in rows) + ridge * np.eye(sketch.shape[1])
        scores.append([row @ np.linalg.solve(gram, row) for row in rows])
    return scores


def compactor(queries, keys, values, turn_back, sketch, chunk=256, blend=0.5, sinks=8, recent=4):
    """Scores [kv_heads][length]: blend x leverage + attention inside chunks, each standardised over all heads."""
    length = keys.shape[1]
    between = range(sinks, length - recent)
    lever, attended = leverage(keys[:, between], lambda key, at: turn_back(key, at + sinks), sketch), []
    for group in range(len(keys)):
        got = dict.fromkeys(between, 0.0)
        members = heads_of(group, len(queries), len(keys))
        for head in members:
            for asking in between:
                first = sinks + (asking - sinks) // chunk * chunk
                together = range(first, min(first + chunk, length - recent))
                products = [np.exp(queries[head, asking] @ keys[group, at]) for at in together]
                for at, product in zip(together, products):
                    got[at] += product / sum(products) / len(members)
        weighed = [got[at] * np.sqrt(values[group, at] @ values[group, at]) for at in between]
        padded = [0.0, *weighed, 0.0]
        attended.append([sum(padded[i : i + 3]) / 3 for i in range(len(weighed))])
    both = np.zeros((len(keys), len(between)))
    for weight, scores in ((blend, lever), (1.0, attended)):
        every = [score for head in scores for score in head]
        mean = sum(every) / len(every)
        deviation = np.sqrt(sum((score - mean) ** 2 for score in every) / len(every))
        both += weight * (np.array(scores) - mean) / deviation
    return [[np.inf] * sinks + list(head) + [np.inf] * recent for head in both]


def oracle_triattention(pre_queries, keys, prompt_length, budget, interval, frequencies, turn_back, reach):
    """Steps 0 .. T of each KV head: (read, stored). Pairs of channels i and i + pairs are complex numbers.

    `turn_back(key, position)` is the key before RoPE.
    """
    heads, kv_heads, pairs = len(pre_queries), len(keys), len(frequencies)
    offsets = [2**i for i in range(64) if 2**i <= reach]

    def complex_pairs(vector):
        return np.array([vector[i] + 1j * vector[i + pairs] for i in range(pairs)])

    seen = [[complex_pairs(query) for query in head[:prompt_length]] for head in pre_queries]
    centre = [sum(head) / len(head) for head in seen]
    size = [sum(np.abs(query) for query in head) / len(head) for head in seen]
    beyond = [head[:prompt_length, 2 * pairs :].mean(axis=0) for head in pre_queries]

    def scores(head, group, kept, now):
        found = []
        for p in kept:
            before = turn_back(keys[group, p], p)
            key = complex_pairs(before)
            trig = 0.0
            for f in range(pairs):
                phase = np.angle(centre[head][f] * np.conj(key[f]))
                turns = [np.cos(frequencies[f] * (now - p + offset) + phase) for offset in offsets]
                trig += abs(centre[head][f]) * abs(key[f]) * sum(turns) / len(turns)
            norm = sum((size[head][f] - abs(centre[head][f])) * abs(key[f]) for f in range(pairs))
            found.append(trig + norm + beyond[head] @ before[2 * pairs :])
        return (np.array(found) - np.mean(found)) / np.std(found)

    sets = []
    for group in range(kv_heads):

        def compressed(kept, now, group=group):
            if len(kept) <= budget:
                return kept
            best = np.max([scores(head, group, kept, now) for head in heads_of(group, heads, kv_heads)], axis=0)
            return [kept[i] for i in top_positions(best, budget - interval)]

        kept = compressed(list(range(prompt_length)), prompt_length)
        steps = [(kept, kept)]
        for position in range(prompt_length, keys.shape[1]):
            read = [*kept, position]
            kept = compressed(read, position + 1)
            steps.append((read, kept))
        sets.append(steps)
    return [([s[0] for s in step], [s[1] for s in step]) for step in zip(*sets)]
