"""Scores by keys, values and the last query, and methods around another's scores; one layer, float64, plain loops."""

from __future__ import annotations

import numpy as np

from support.oracles.core import heads_of, summed_over_group, top_positions, window_attention
from support.oracles.eviction import attention_row


def unit(vector):
    return vector / np.sqrt(vector @ vector)


def oracle_knorm(queries, keys, values, budget):
    return [top_positions([-np.sqrt(key @ key) for key in head], budget) for head in keys]


def difference(keys):
    """Negative cosine of each key to the mean of all unit vectors."""
    anchor = sum(unit(key) for key in keys) / len(keys)
    return [-(unit(key) @ unit(anchor)) for key in keys]


def oracle_keydiff(queries, keys, values, budget, block=None):
    sets = []
    for head in keys:
        kept = list(range(len(head) if block is None else min(budget, len(head))))
        start = len(kept)
        while True:
            kept = [kept[i] for i in top_positions(difference([head[p] for p in kept]), budget)]
            if start >= len(head):
                break
            kept += range(start, min(start + block, len(head)))
            start += block
        sets.append(kept)
    return sets


def standing_out(own, following):
    """One partition's tokens against the next one's range: the softmax of each token's spread over its channels."""
    spreads = []
    for token in own:
        scaled = []
        for channel, x in enumerate(token):
            low, high = min(t[channel] for t in following), max(t[channel] for t in following)
            scaled.append((x - low) / (high - low))
        mean = sum(scaled) / len(scaled)
        spreads.append(np.sqrt(sum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1)))
    raised = np.exp(np.array(spreads) - max(spreads))
    return raised / raised.sum()


def oracle_lagkv(queries, keys, values, budget, sinks=4, lag=128):
    sets = []
    for k, v in zip(keys, values):
        starts = list(range(sinks, len(k) - lag + 1, lag))
        forced = list(range(sinks)) + list(range(starts[-1] if starts else sinks, len(k)))
        if len(forced) > budget:
            sets.append(list(range(sinks)) + list(range(len(k) - budget + sinks, len(k))))
            continue
        order = []
        for start, after in zip(starts, starts[1:]):
            parts = [(x[start:after], x[after : after + lag]) for x in (k, v)]
            scores = sum(standing_out(*part) for part in parts) / 2
            best = sorted(range(lag), key=lambda i: (-scores[i], i))
            order += [(place, start + i) for place, i in enumerate(best)]
        sets.append(sorted(forced + [p for _, p in sorted(order)[: budget - len(forced)]]))
    return sets


def oracle_tova(queries, keys, values, prompt_length, budget):
    """Steps 0 .. T. The heads share one set: the lowest attention of the latest query, averaged over them, leaves."""
    heads, kv_heads = len(queries), len(keys)

    def averaged(query_index, positions):
        rows = [attention_row(queries[h, query_index], keys[h * kv_heads // heads, positions]) for h in range(heads)]
        return sum(rows) / heads

    first = queries.shape[1] - keys.shape[1]
    kept = list(range(prompt_length))
    steps = []
    for position in range(prompt_length - 1, keys.shape[1]):
        if position >= prompt_length:
            kept = [*kept, position]
        read = list(kept)
        if len(kept) > budget:
            kept = [kept[i] for i in top_positions(averaged(first + position, kept), budget)]
        steps.append((read if steps else kept, list(kept)))
    return steps


def snapkv_importance(queries, keys, window, kernel):
    """Pooled scores of the older tokens and infinity for the window, a list for each KV head."""
    attention, _ = window_attention(queries, keys, keys.shape[1], window)
    importance = []
    for group in range(len(keys)):
        scores = summed_over_group(attention, group, len(keys)).sum(axis=0)[: keys.shape[1] - window]
        padded = [0.0] * (kernel // 2) + list(scores) + [0.0] * (kernel // 2)
        pooled = [sum(padded[i : i + kernel]) / kernel for i in range(len(scores))]
        importance.append(pooled + [np.inf] * window)
    return importance


def oracle_adakv(importance, budget, floor=0.2):
    """Each head's forced and surest entries, then the best of all heads; ties by position, then by head."""
    sure = []
    for scores in importance:
        forced = sum(np.isinf(scores))
        sure.append(set(top_positions(scores, forced + int(floor * (budget - forced)))))
    rest = [(-scores[p], p, h) for h, scores in enumerate(importance) for p in range(len(scores)) if p not in sure[h]]
    for _, p, h in sorted(rest)[: budget * len(importance) - sum(map(len, sure))]:
        sure[h].add(p)
    return [sorted(s) for s in sure]


def oracle_chunkkv(importance, budget, chunk=20):
    """One set for all heads."""
    length = len(importance[0])
    forced = [p for p in range(length) if any(np.isinf(scores[p]) for scores in importance)]
    total = [sum(scores[p] for scores in importance) for p in range(length)]
    free = [
        [p for p in range(start, min(start + chunk, length)) if p not in forced] for start in range(0, length, chunk)
    ]
    means = [sum(total[p] for p in tokens) / len(tokens) if tokens else 0.0 for tokens in free]
    kept = list(forced)
    for index in sorted(range(len(free)), key=lambda i: (-means[i], i)):
        tokens = sorted(free[index], key=lambda p: (-total[p], p))
        kept += tokens[: budget - len(kept)]
    return [sorted(kept)] * len(importance)


def redundancy(keys, threshold):
    """Softmax over the tokens of the mean cosine to all keys; each key lets its most recent similar one off."""
    n = len(keys)
    cosines = [[unit(a) @ unit(b) for b in keys] for a in keys]
    for i in range(n):
        cosines[i][i] = 0.0
        similar = [j for j in range(n) if j != i and cosines[i][j] > threshold]
        if similar:
            cosines[i][similar[-1]] = 0.0
    means = np.array([sum(cosines[i][j] for i in range(n)) / n for j in range(n)])
    raised = np.exp(means - means.max())
    return raised / raised.sum()


def oracle_rkv(queries, keys, values, prompt_length, budget, interval, window=8, kernel=7, mix=0.07, threshold=0.5):
    """Steps 0 .. T of each KV head: (read, stored). Attention rows stand as they were attended, over all entries."""
    heads, kv_heads, first = len(queries), len(keys), queries.shape[1] - keys.shape[1]
    sets = []
    for group in range(kv_heads):
        members = [h for h in range(heads) if h * kv_heads // heads == group]
        rows = {}  # query position -> {key position: weight}

        def attend(position, kept, rows=rows, members=members, group=group):
            own = [attention_row(queries[h, first + position], keys[group, kept]) for h in members]
            rows[position] = {p: max(row[i] for row in own) for i, p in enumerate(kept)}

        def compressed(kept, now, rows=rows, group=group):
            older = kept[:-window]
            observed = [rows[p] for p in range(now - window + 1, now + 1)]
            attended = [sum(row.get(p, 0.0) for row in observed) / window for p in older]
            reach = kernel // 2
            pooled = [max(attended[max(i - reach, 0) : i + reach + 1]) for i in range(len(older))]
            redundant = redundancy([keys[group, p] for p in kept], threshold)
            scores = [mix * a - (1 - mix) * r for a, r in zip(pooled, redundant)]
            return [older[i] for i in top_positions(scores, budget - interval - window)] + kept[-window:]

        for p in range(prompt_length - window, prompt_length):
            attend(p, list(range(p + 1)))
        kept = list(range(prompt_length))
        kept = compressed(kept, prompt_length - 1) if len(kept) > budget else kept
        steps = [(kept, kept)]
        for position in range(prompt_length, keys.shape[1]):
            read = [*kept, position]
            attend(position, read)
            kept = compressed(read, position) if len(read) > budget else read
            steps.append((read, kept))
        sets.append(steps)
    return [([s[0] for s in step], [s[1] for s in step]) for step in zip(*sets)]


def oracle_decoding(queries, keys, values, prompt_length, budget, interval, score, observed):
    """Steps 0 .. T: (read, stored). Every `interval` tokens what is stored is scored as a prompt by `score`.

    `score`: (queries [heads, n, d] of the latest tokens, keys of one group [m, d], members of the group) -> [m].
    """
    heads, kv_heads, first = len(queries), len(keys), queries.shape[1] - keys.shape[1]
    kept = [list(range(prompt_length)) for _ in range(kv_heads)]

    def passed(now):
        for group in range(kv_heads):
            stored = kept[group]
            if len(stored) <= budget:
                continue
            members = [h for h in range(heads) if h * kv_heads // heads == group]
            latest = queries[members, first + now - observed : first + now]
            scores = list(score(latest, keys[group, stored]))
            older = len(stored) - observed
            best = top_positions(scores[:older], budget - observed)
            kept[group] = [stored[i] for i in [*best, *range(older, len(stored))]]

    passed(prompt_length)
    steps = [([list(k) for k in kept], [list(k) for k in kept])]
    for position in range(prompt_length, keys.shape[1]):
        kept = [[*stored, position] for stored in kept]
        read = [list(k) for k in kept]
        if (position + 1 - prompt_length) % interval == 0:
            passed(position + 1)
        steps.append((read, [list(k) for k in kept]))
    return steps


def oracle_threshold(queries, keys, values, prompt_length, at, window, interval, score, observed):
    """Steps 0 .. T: (read, stored). What is older than `window` and scores below `at` leaves at a pass.

    `score` as in `oracle_decoding`.
    """
    heads, kv_heads, first = len(queries), len(keys), queries.shape[1] - keys.shape[1]
    kept = [list(range(prompt_length)) for _ in range(kv_heads)]
    steps = []
    for position in range(prompt_length - 1, keys.shape[1]):
        if steps:
            kept = [[*stored, position] for stored in kept]
        read = [list(stored) for stored in kept]
        if (position + 1 - prompt_length) % interval == 0:
            for group in range(kv_heads):
                members = [h for h in range(heads) if h * kv_heads // heads == group]
                latest = queries[members, first + position + 1 - observed : first + position + 1]
                if len(kept[group]) > window:
                    scores = score(latest, keys[group, kept[group]])
                    young = len(kept[group]) - window
                    kept[group] = [p for i, p in enumerate(kept[group]) if i >= young or scores[i] >= at]
        stored = [list(s) for s in kept]
        steps.append((read if steps else stored, stored))
    return steps


def oracle_rerotated(keys, kept, frequencies):
    """Keys of one layer [kv_heads, n, d] turned so that those in `kept` (a list for each KV head) end without gaps.

    Channels i and i + pairs are a pair, which the model turns by position x frequency.
    """
    sets, pairs, length = [], len(frequencies), keys.shape[1]
    for head, positions in zip(keys, kept):
        turned = []
        for rank, position in enumerate(positions):
            key = np.array(head[position])
            by = (length - len(positions) + rank) - position
            for pair, frequency in enumerate(frequencies):
                x, y = head[position][pair], head[position][pair + pairs]
                key[pair] = x * np.cos(by * frequency) - y * np.sin(by * frequency)
                key[pair + pairs] = y * np.cos(by * frequency) + x * np.sin(by * frequency)
            turned.append(key)
        sets.append(np.array(turned))
    return sets


def oracle_curdkv(keys, values, budget, sinks=4, leverage="product", local=16, drawn=None):
    """The sinks, and the best by the squared norms of keys and values, each over the sum within its block."""
    sets = []
    for k, v in zip(keys, values):
        shares = []
        for vectors in (k, v):
            sizes = [sum(x * x for x in (vector if drawn is None else vector @ drawn)) for vector in vectors]
            step = local or len(sizes)
            blocks = [sizes[start : start + step] for start in range(0, len(sizes), step)]
            shares.append([size / sum(block) for block in blocks for size in block] if local else sizes)
        scores = []
        for key, value in zip(*shares):
            scores.append({"key": key, "value": value, "mean": (key + value) / 2, "product": key * value}[leverage])
        sets.append(top_positions([np.inf] * sinks + scores[sinks:], budget))
    return sets


def main_direction(queries):
    """The unit vector along which squared products with the queries are largest, on the side of most queries."""
    gram = sum(np.outer(query, query) for query in queries)
    vector = np.ones(len(gram)) + np.arange(len(gram)) / 7
    for _ in range(3000):
        vector = unit(gram @ vector)
    ahead = sum(query @ vector > 0 for query in queries)
    return vector if 2 * ahead > len(queries) else -vector


def oracle_qfilters(queries, keys, budget):
    """Tokens by the product of their key with the mean of the group's main directions."""
    sets = []
    for group in range(len(keys)):
        members = heads_of(group, len(queries), len(keys))
        mean = sum(main_direction(queries[head]) for head in members) / len(members)
        sets.append(top_positions([key @ mean for key in keys[group]], budget))
    return sets


def oracle_kvzap(hidden, weight, bias, budget, window, sinks, at=None):
    """Tokens of one layer by a linear map of their hidden states; the first stay, and the latest, but not as more than
    half of the rest (rounded up).
    """
    sets = []
    for own, constant in zip(weight, bias):
        scores = [sum(w * x for w, x in zip(own, state)) + constant for state in hidden]
        for place in [*range(sinks), *range(-min(window, (budget - sinks + 1) // 2), 0)]:
            scores[place] = np.inf
        sets.append([p for p in top_positions(scores, budget) if at is None or scores[p] >= at])
    return sets
