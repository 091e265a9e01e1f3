"""ZSMerge and MorphKV, which merge or evict while they decode; see `core` for the shared conventions."""

from __future__ import annotations

import numpy as np

from support.oracles.core import (
    Slot,
    attention_output,
    attention_weights,
    heads_of,
    simulate,
    softmax,
    summed_over_group,
    taken,
    top_positions,
    window_attention,
)


def zsmerge_shares(budget, residual=0.02):
    """(proximity, context, residual) of eq. 3; a share of what proximity leaves, or slots; 0 is the eviction twin."""
    proximity = budget // 2
    slots = max(1, int(residual * (budget - proximity))) if 0 < residual < 1 else residual
    return proximity, budget - proximity - slots, slots


def merged(slot, other, newcomer_score=max):
    """Both as their mean by fusion counts (eq. 7); the slot that was there keeps its position."""
    w = slot.weight + other.weight
    return Slot(
        slot.position,
        (slot.weight * slot.key + other.weight * other.key) / w,
        (slot.weight * slot.value + other.weight * other.value) / w,
        w,
        newcomer_score(slot.score, other.score),
    )


def most_similar(slots, newcomer):
    """Index of the slot with the largest dot product of keys (eq. 6)."""
    return int(np.argmax([float(slot.key @ newcomer.key) for slot in slots]))


def oracle_zsmerge(
    queries,
    keys,
    values,
    prompt_length,
    budget,
    residual=0.02,
    window=8,
    decay=0.98,
    alpha=1.0,
    initial="runs",
    newcomer="competes",
    scored="biased",
):
    """`scored`: scores gather the weights of eq. 8 ("biased"), or those of eq. 2 over the same slots ("plain")."""
    share_p, share_c, share_r = zsmerge_shares(budget, residual)
    residual_positions = [set() for _ in keys]  # per KV head: which slots are residual
    attention, _ = window_attention(queries, keys, prompt_length, window)

    def prefill(group):
        rows = summed_over_group(attention, group, len(keys))
        scores = np.zeros(prompt_length)
        for row in rows:
            scores = decay * scores + row
        slots = [s._replace(score=scores[s.position]) for s in taken(keys, values, group, range(prompt_length))]
        older, recent = slots[:-share_p], slots[-share_p:]
        best = top_positions([s.score for s in older], share_c)
        evicted = [s for s in older if s.position not in best]
        fused = contiguous_runs(evicted, share_r) if initial == "runs" else one_by_one(evicted, share_r)
        residual_positions[group].update(slot.position for slot in fused)
        return sorted([s for s in older if s.position in best] + fused) + recent

    first = queries.shape[1] - (keys.shape[1] - prompt_length)

    def after(group, slots, weights, position):
        if scored == "plain":
            stored = [slot.key for slot in slots]
            asking = [queries[h, first + position - prompt_length] for h in heads_of(group, len(queries), len(keys))]
            weights = np.array([attention_weights(query, stored) for query in asking])
        summed = weights.sum(axis=0)
        slots = [s._replace(score=decay * s.score + a) for s, a in zip(slots, summed)]
        fused = [s for s in slots if s.position in residual_positions[group]]
        plain = [s for s in slots if s.position not in residual_positions[group]]
        context, recent = plain[:-share_p], plain[-share_p:]
        if len(context) > share_c:
            contenders = context if newcomer == "competes" else context[:-1]
            loser = contenders[lowest([s.score for s in contenders])]
            context = [s for s in context if s is not loser]
            if len(fused) + 1 <= share_r:
                fused = [*fused, loser]
                residual_positions[group].add(loser.position)
            elif share_r:
                best = most_similar(fused, loser)
                fused[best] = merged(fused[best], loser)
        return sorted(context + fused + recent)

    return simulate(queries, keys, values, prompt_length, prefill, after, alpha)


def contiguous_runs(evicted, slots):
    """As equal as possible, the first ones one longer, each averaged."""
    fused = []
    for run in np.array_split(range(len(evicted)), min(slots, len(evicted))) if slots and evicted else []:
        slot = evicted[run[0]]
        for i in run[1:]:
            slot = merged(slot, evicted[i])
        fused.append(slot)
    return fused


def one_by_one(evicted, slots):
    """In position order: free slots first, then into the most similar slot."""
    fused = evicted[:slots]
    for slot in evicted[slots:] if slots else []:
        best = most_similar(fused, slot)
        fused[best] = merged(fused[best], slot)
    return fused


def lowest(scores):
    """Index of the lowest score; of equal ones the last, since the earlier position is kept."""
    return max(range(len(scores)), key=lambda i: (-scores[i], i))


def combined(rows, aggregation, distant=0):
    """One row over the keys from those of a group's heads [heads, n]: summed in the paper.

    With `distant` above 0 a softmax counts the first `distant` keys only, so that these have weights of sum 1: that of
    each head before heads are combined, and where logits are combined, the one softmax that follows.
    """

    def over_distant(row):
        return row / row[:distant].sum() if distant > 0 else row

    if aggregation == "logits":
        seen = (rows > 0).all(axis=0)
        result = np.zeros(rows.shape[1])
        result[seen] = softmax(np.log(rows[:, seen]).sum(axis=0))
        return over_distant(result)
    each = [over_distant(row) for row in rows]
    return np.array([{"sum": sum, "max": max}[aggregation](column) for column in zip(*each)])


def oracle_morphkv(
    queries, keys, values, prompt_length, budget, window=32, fusion="sum", aggregation="sum", renormalise=False
):
    """budget = C + R, R = window with the current token in it; attention profiles stay as they were attended.

    `renormalise`: a head's row is divided by what it gave to the entries older than the window when it was attended.
    """
    attention, positions = window_attention(queries, keys, prompt_length, window)
    profiles = [{} for _ in keys]  # per KV head: query position -> {key position: weight}
    for group in range(len(keys)):
        for i, p in enumerate(positions):
            rows = [attention[head, i] for head in heads_of(group, len(queries), len(keys))]
            row = combined(np.array(rows), aggregation, prompt_length - window if renormalise else 0)
            profiles[group][p] = {k: row[k] for k in range(p + 1)}

    def after(group, slots, weights, position):
        row = combined(weights, aggregation, len(slots) - window if renormalise else 0)
        profiles[group][position] = {s.position: a for s, a in zip(slots, row)}
        if len(slots) <= budget:
            return slots
        oldest = position - window + 1
        rows = [profiles[group][p] for p in range(max(oldest, 0), position + 1)]
        older = [s for s in slots if s.position < oldest]
        fuse = {"sum": sum, "max": max}[fusion]
        scores = [fuse(row[s.position] for row in rows) for s in older]
        return [older[i] for i in top_positions(scores, budget - window)] + [s for s in slots if s.position >= oldest]

    return simulate(queries, keys, values, prompt_length, lambda g: taken(keys, values, g, range(prompt_length)), after)


def oracle_merged_around(queries, keys, values, prompt_length, kept, least=-1.0, alpha=1.0, averaged="both"):
    """Steps 0 .. T of a prompt whose entries outside `kept` (a list for each KV head) are merged into those in it.

    Each goes into the kept entry whose key has the largest cosine to its own, unless that is below `least`.
    """
    heads, kv_heads, first = len(queries), len(keys), queries.shape[1] - keys.shape[1]
    stored = []
    for group in range(kv_heads):
        parts = {p: [p] for p in kept[group]}
        for p in range(prompt_length):
            if p in parts:
                continue
            own = keys[group, p]
            cosines = [
                own @ keys[group, t] / np.sqrt(own @ own) / np.sqrt(keys[group, t] @ keys[group, t])
                for t in kept[group]
            ]
            best = max(range(len(cosines)), key=lambda i: (cosines[i], -i))
            if cosines[best] >= least:
                parts[kept[group][best]].append(p)
        entries = []
        for p in kept[group]:
            key = sum(keys[group, m] for m in parts[p]) / len(parts[p]) if averaged == "both" else keys[group, p]
            entries.append((p, key, sum(values[group, m] for m in parts[p]) / len(parts[p]), float(len(parts[p]))))
        stored.append(entries)
    steps = [dict(read=[list(k) for k in kept], stored=[list(k) for k in kept])]
    for position in range(prompt_length, keys.shape[1]):
        output = np.zeros((heads, keys.shape[2]))
        for group in range(kv_heads):
            stored[group].append((position, keys[group, position], values[group, position], 1.0))
            for head in heads_of(group, heads, kv_heads):
                counts = [entry[3] for entry in stored[group]]
                weights = attention_weights(
                    queries[head, first + position], [entry[1] for entry in stored[group]], counts, alpha
                )
                output[head] = attention_output(weights, [entry[2] for entry in stored[group]])
        positions = [[entry[0] for entry in entries] for entries in stored]
        steps.append(dict(read=positions, stored=positions, output=output))
    return steps


def oracle_attention_matching(queries, keys, values, again, prompt_length, budget, bound=3.0, iterations=2):
    """Steps 0 .. T. `again` [heads, m, d] are the queries of the prompt as it is read a second time."""
    heads, kv_heads, first = len(queries), len(keys), queries.shape[1] - keys.shape[1]
    kept, entries = [], []
    for group in range(kv_heads):
        prompt_keys, prompt_values = keys[group, :prompt_length], values[group, :prompt_length]
        rows = [
            prompt_keys @ query / np.sqrt(len(query))
            for head in heads_of(group, heads, kv_heads)
            for query in again[head]
        ]
        shares = [softmax(row) for row in rows]
        rms = [np.sqrt(sum(share[p] ** 2 for share in shares) / len(shares)) for p in range(prompt_length)]
        stays = top_positions(rms, budget)
        raised = np.array([[np.exp(row[p] - max(row)) for p in stays] for row in rows])
        total = np.array([sum(np.exp(row - max(row))) for row in rows])
        low, high = np.exp(-bound), np.exp(bound)
        mass = np.clip(np.linalg.lstsq(raised, total, rcond=None)[0], low, high)
        for _ in range(iterations):
            gradient = raised.T @ (raised @ mass - total)
            mass = np.clip(mass - gradient / np.linalg.svd(raised, compute_uv=False)[0] ** 2, low, high)
        bias = np.log(mass)
        matrix = np.array([softmax(row[stays] + bias) for row in rows])
        outputs = np.array([share @ prompt_values for share in shares])
        fitted = np.linalg.lstsq(matrix, outputs, rcond=None)[0]
        kept.append(stays)
        entries.append([(prompt_keys[p], fitted[i], bias[i]) for i, p in enumerate(stays)])
    steps = [dict(read=[list(k) for k in kept], stored=[list(k) for k in kept])]
    for position in range(prompt_length, keys.shape[1]):
        output = np.zeros((heads, keys.shape[2]))
        for group in range(kv_heads):
            kept[group] = [*kept[group], position]
            entries[group].append((keys[group, position], values[group, position], 0.0))
            for head in heads_of(group, heads, kv_heads):
                query = queries[head, first + position]
                logits = [key @ query / np.sqrt(len(query)) + added for key, _, added in entries[group]]
                output[head] = attention_output(softmax(np.array(logits)), [value for _, value, _ in entries[group]])
        positions = [list(k) for k in kept]
        steps.append(dict(read=positions, stored=positions, output=output))
    return steps
