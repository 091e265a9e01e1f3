"""Slow second implementations of the policies that look at all layers: budgets by layer, and ragged heads.

As in `core`, but with all layers at once: queries are [layers, heads, n, d], keys and values [layers, kv_heads,
prompt_length + T, d]. A prefill-only policy gives its retained sets [layer][kv_head] (ascending positions), one that
goes on while decoding a list over the steps for each layer, as `core.simulate` makes it.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log

import numpy as np

from support.oracles.core import entropy, heads_of, simulate, summed_over_group, taken, top_positions, window_attention

# Shares


def ideal_shares(weights, total, ceiling, floor=0):
    """Fractions c * weight, cut to [floor, ceiling], with the one c for which they sum to min(total, n * ceiling).

    c grows from one bound that is met to the next. Where only weights of zero have room left, these share alike.
    """
    weights = [Fraction(w) for w in weights]
    total = min(total, len(weights) * ceiling)
    positive = [i for i, w in enumerate(weights) if w > 0]

    def at(c):
        return [min(max(c * w, Fraction(floor)), Fraction(ceiling)) for w in weights]

    if not positive:
        return [Fraction(total, len(weights))] * len(weights)
    stops = sorted({Fraction(0)} | {Fraction(bound) / weights[i] for bound in (floor, ceiling) for i in positive})
    for low, high in zip(stops, stops[1:]):
        below, above = sum(at(low)), sum(at(high))
        if below <= total <= above:
            return at(low + (high - low) * (total - below) / (above - below)) if above > below else at(low)
    rest = total - len(positive) * ceiling
    empty = len(weights) - len(positive)
    return [Fraction(ceiling) if w > 0 else Fraction(rest, empty) for w in weights]


def share_out(weights, total, ceiling, floor=0):
    """The ideal shares in whole numbers, by largest remainder; of equal remainders the earlier one is rounded up."""
    ideal = ideal_shares(weights, total, ceiling, floor)
    shares = [int(x) for x in ideal]
    missing = int(sum(ideal)) - sum(shares)
    order = sorted(range(len(ideal)), key=lambda i: (shares[i] - ideal[i], i))
    for i in order[:missing]:
        shares[i] += 1
    return shares


# Scores


def averaged(scores, kernel):
    """Average pooling that keeps the length; what lies outside counts as zero."""
    n = len(scores)
    around = range(-(kernel // 2), kernel // 2 + 1)
    return [sum(scores[i + j] for j in around if 0 <= i + j < n) / kernel for i in range(n)]


def pooled_scores(queries, keys, prompt_length, window, kernel):
    """SnapKV's scores of one layer outside the window, a list for each KV head."""
    attention, _ = window_attention(queries, keys, prompt_length, window)
    older = prompt_length - window
    return [
        averaged(list(summed_over_group(attention, g, len(keys)).sum(axis=0)[:older]), kernel) for g in range(len(keys))
    ]


def everything(keys, prompt_length):
    return [[list(range(prompt_length))] * len(layer) for layer in keys]


def best_and_window(scores, share, window, prompt_length):
    """`share` entries: the window, and the best older ones, for each KV head of a layer."""
    return [top_positions(row, share - window) + list(range(prompt_length - window, prompt_length)) for row in scores]


# Layer budgets


def pyramidkv_shares(layers, prompt_length, budget, window=32, beta=20):
    """From 2 * mean - smallest in the first layer down to mean / beta in the last, evenly; the window in every one."""
    mean = Fraction(budget - window)
    smallest = mean / Fraction(beta)
    largest = 2 * mean - smallest
    wanted = [largest - (largest - smallest) * Fraction(i, max(1, layers - 1)) for i in range(layers)]
    if layers == 1:
        wanted = [mean]
    return [window + share for share in share_out(wanted, layers * (budget - window), prompt_length - window)]


def oracle_pyramidkv(queries, keys, values, prompt_length, budget, window=32, kernel=7, beta=20):
    if prompt_length <= budget:
        return everything(keys, prompt_length)
    shares = pyramidkv_shares(len(keys), prompt_length, budget, window, beta)
    return [
        best_and_window(pooled_scores(q, k, prompt_length, window, kernel), share, window, prompt_length)
        for q, k, share in zip(queries, keys, shares)
    ]


def uncertainty(queries, keys, prompt_length, window, mass):
    """How many tokens gather `mass` of the window's attention over the prompt, averaged over the heads."""
    attention, _ = window_attention(queries, keys, prompt_length, window)
    counts = []
    for rows in attention:
        total = rows.sum(axis=0)
        gathered, count = 0.0, 0
        for weight in sorted(total, reverse=True):
            gathered += weight
            count += 1
            if gathered >= mass * total.sum():
                break
        counts.append(count)
    return Fraction(sum(counts), len(counts))


def zigzagkv_shares(queries, keys, prompt_length, budget, window=32, mass=0.9, floor=0.1):
    weights = [uncertainty(q, k, prompt_length, window, mass) for q, k in zip(queries, keys)]
    return share_out(weights, len(keys) * budget, prompt_length, max(window, int(floor * budget)))


def oracle_zigzagkv(queries, keys, values, prompt_length, budget, window=32, kernel=7, mass=0.9, floor=0.1):
    if prompt_length <= budget:
        return everything(keys, prompt_length)
    shares = zigzagkv_shares(queries, keys, prompt_length, budget, window, mass, floor)
    return [
        best_and_window(pooled_scores(q, k, prompt_length, window, kernel), share, window, prompt_length)
        for q, k, share in zip(queries, keys, shares)
    ]


def dynamickv_shares(scores, prompt_length, budget, window=32, reach=10.0):
    """`scores` [layer][kv_head]: how many of the best of all layers, heads and positions fall into each layer."""
    layers, kv_heads, older = len(scores), len(scores[0]), prompt_length - window
    every = [
        (-score, layer, head, i)
        for layer, rows in enumerate(scores)
        for head, row in enumerate(rows)
        for i, score in enumerate(row)
    ]
    best = sorted(every)[: layers * kv_heads * (budget - window)]
    weights = [Fraction(sum(layer == found[1] for found in best), kv_heads) for layer in range(layers)]
    ceiling = min(older, int(reach * budget) - window)
    return [window + share for share in share_out(weights, layers * (budget - window), ceiling)]


def oracle_dynamickv(queries, keys, values, prompt_length, budget, window=32, kernel=7, reach=10.0):
    if prompt_length <= budget:
        return everything(keys, prompt_length)
    scores = [pooled_scores(q, k, prompt_length, window, kernel) for q, k in zip(queries, keys)]
    shares = dynamickv_shares(scores, prompt_length, budget, window, reach)
    return [best_and_window(rows, share, window, prompt_length) for rows, share in zip(scores, shares)]


def cake_layer(queries, keys, prompt_length, window, kernel, gamma, tau1, tau2):
    """One layer's preference, and the pooled indicators of its older tokens, a list for each KV head."""
    attention, _ = window_attention(queries, keys, prompt_length, window)
    older, spread, restless, indicators = prompt_length - window, 0.0, 0.0, []
    for head in attention:
        indicator = []
        for token in range(older):
            column = [head[at][token] for at in range(window)]
            mean = sum(column) / window
            variance = sum((weight - mean) ** 2 for weight in column) / (window - 1)
            spread -= sum(weight * log(weight + 1e-10) for weight in column)
            restless += variance
            indicator.append(mean + gamma * variance)
        indicators.append(averaged(indicator, kernel))
    rows = []
    for group in range(len(keys)):
        members = heads_of(group, len(queries), len(keys))
        rows.append([sum(indicators[head][token] for head in members) / len(members) for token in range(older)])
    return spread ** (1 / tau1) * restless ** (1 / tau2), rows


def oracle_cake(queries, keys, values, prompt_length, budget, window=32, kernel=5, gamma=200.0, tau1=1.0, tau2=1.0):
    if prompt_length <= budget:
        return everything(keys, prompt_length)
    found = [cake_layer(q, k, prompt_length, window, kernel, gamma, tau1, tau2) for q, k in zip(queries, keys)]
    spare = len(keys) * (budget - window)
    shares = share_out([preference for preference, _ in found], spare, prompt_length - window)
    return [best_and_window(rows, window + share, window, prompt_length) for (_, rows), share in zip(found, shares)]


# Patterns


def lacache_layer(layer, layers, prompt_length, budget, sinks=4, recent=0.25, span=0.25, overlap=0.5):
    """The rungs climb from the first token behind the sinks to the last one before the recent part."""
    if prompt_length <= budget:
        return list(range(prompt_length))
    last = max(1, int(recent * budget))
    between, kept = prompt_length - sinks - last, budget - sinks - last
    shared = max(1, round(span * layers))
    stride = max(1, shared - int(overlap * shared))
    rungs = ceil(layers / stride)
    start = 0
    if rungs > 1:
        start = int(Fraction(layer // stride * (between - kept), rungs - 1) + Fraction(1, 2))
    middle = range(sinks + start, sinks + start + kept)
    return [*range(sinks), *middle, *range(prompt_length - last, prompt_length)]


def oracle_lacache(queries, keys, values, prompt_length, budget, **how):
    return [[lacache_layer(i, len(keys), prompt_length, budget, **how)] * len(layer) for i, layer in enumerate(keys)]


def streaming_part(prompt_length, budget, sinks=None, recent=None):
    """Sinks and recent tokens of a streaming head. What is not given is RocketKV's appendix, printed for 16,000 tokens:
    128 and 512; all heads stream at 640 and below, and a fifth of 256 and less are sinks.
    """

    def at_this_length(printed):
        return Fraction(printed * prompt_length, 16000)

    if sinks is None:
        sinks = int(at_this_length(128)) if budget > at_this_length(256) else budget // 5
        sinks = min(max(sinks, 1), budget - (1 if recent is None else recent))
    if recent is None:
        recent = budget - sinks
        if recent > at_this_length(512):
            recent = max(1, int(at_this_length(512)))
    return sinks, recent


def retrieval_heads(layers, kv_heads, prompt_length, budget, sinks, recent, scores=None):
    """(layer, head) of those that keep everything: the best, as many as layers * kv_heads * budget entries allow.

    None where the streaming heads' parts take all of the budget, so that it holds for the response of a short prompt
    as well. `scores` [layers][query heads]: a KV head is worth the best of its group.
    """
    if sinks + recent == budget:
        return set()
    every = [(layer, head) for layer in range(layers) for head in range(kv_heads)]
    if scores is not None:
        best = {at: max(scores[at[0]][h] for h in heads_of(at[1], len(scores[0]), kv_heads)) for at in every}
        every = sorted(every, key=lambda at: (-best[at], at))
    spent = len(every) * min(prompt_length, sinks + recent)
    chosen = set()
    for at in every:
        spent += prompt_length - min(prompt_length, sinks + recent)
        if spent > len(every) * budget:
            break
        chosen.add(at)
    return chosen


def oracle_duoattention(queries, keys, values, prompt_length, budget, sinks=None, recent=None, scores=None):
    """Steps of every layer; a streaming head is `sinks` first and `recent` last tokens, after every step."""
    sinks, recent = streaming_part(prompt_length, budget, sinks, recent)
    retrieval = retrieval_heads(len(keys), len(keys[0]), prompt_length, budget, sinks, recent, scores)

    def of_layer(layer):
        def ends(group, slots):
            if (layer, group) in retrieval or len(slots) <= sinks + recent:
                return slots
            return slots[:sinks] + slots[len(slots) - recent :]

        return simulate(
            queries[layer],
            keys[layer],
            values[layer],
            prompt_length,
            lambda g: ends(g, taken(keys[layer], values[layer], g, range(prompt_length))),
            lambda g, slots, weights, position: ends(g, slots),
        )

    return [of_layer(layer) for layer in range(len(keys))]


def simlayerkv_laziness(queries, keys, prompt_length, sinks, recent):
    """One layer: the last query's attention to the first and last tokens, averaged over heads."""
    attention, _ = window_attention(queries, keys, prompt_length, 1)
    ends = [at for at in range(prompt_length) if at < sinks or at >= prompt_length - recent]
    return sum(row[0][at] for row in attention for at in ends) / len(attention)


def oracle_simlayerkv(queries, keys, values, prompt_length, budget=None, threshold=0.9, sinks=4, recent=1024):
    """Lazy are the layers above the threshold; with a budget those that are laziest, until the rest can be paid."""
    if budget is not None:
        recent = min(recent, max(1, budget // 2 - sinks))
        if prompt_length <= budget:
            return everything(keys, prompt_length)
    if prompt_length <= sinks + recent:
        return everything(keys, prompt_length)
    found = [simlayerkv_laziness(q, k, prompt_length, sinks, recent) for q, k in zip(queries, keys)]
    lazy = {layer for layer, score in enumerate(found) if score > threshold}
    if budget is not None:
        lazy, busiest_first = set(range(len(keys))), sorted(range(len(keys)), key=lambda layer: (found[layer], layer))
        for layer in busiest_first:
            spent = sum(sinks + recent if each in lazy - {layer} else prompt_length for each in range(len(keys)))
            if spent > len(keys) * budget:
                break
            lazy.discard(layer)
    ends = [*range(sinks), *range(prompt_length - recent, prompt_length)]
    return [[ends if layer in lazy else list(range(prompt_length))] * len(keys[layer]) for layer in range(len(keys))]


# CompilerKV


def bin_of(x, low, high, bins):
    """Bins of equal width; what lies outside belongs to the first or the last."""
    for i in range(bins - 1):
        if x < low + (high - low) * (i + 1) / bins:
            return i
    return bins - 1


def risk_bins(attention_entropy, perplexity, bins=(20, 4), entropies=(2, 10), perplexities=(1, 100)):
    return (
        bin_of(attention_entropy, *entropies, bins[0]),
        bin_of(log(perplexity), log(perplexities[0]), log(perplexities[1]), bins[1]),
    )


def global_attention(queries, keys, prompt_length, window):
    """[w, P]: the attention of the last queries, averaged over all layers and heads (eq. 6)."""
    rows = [head for q, k in zip(queries, keys) for head in window_attention(q, k, prompt_length, window)[0]]
    return sum(rows) / len(rows)


def relative_norms(values):
    """Eq. 7 for one KV head's values [P, d]."""
    norms = [np.sqrt((value**2).sum()) for value in values]
    return [norm / (sum(norms) / len(norms)) for norm in norms]


def compilerkv_entropy(queries, keys, prompt_length, window=64):
    """Eq. 11-12."""
    rows = global_attention(queries, keys, prompt_length, window)
    mean = rows.sum(axis=0) / len(rows)
    return entropy(mean / mean.sum())


def compilerkv_scores(
    queries,
    keys,
    values,
    prompt_length,
    window=64,
    utility_window=32,
    kernel=1,
    heads=None,
    recent=0,
    norms="relative",
    scale="largest",
):
    """Eq. 6-10: [layer] lists over the prompt, each divided by its maximum or its mean; what stays is infinite."""
    rows = global_attention(queries, keys, prompt_length, window)
    gathered = rows[max(0, len(rows) - utility_window) :].sum(axis=0)
    result = []
    for layer in range(len(keys)):
        best = [-np.inf] * prompt_length
        for group in range(len(keys[layer])):
            sizes = relative_norms(values[layer, group, :prompt_length])
            if norms == "none":
                sizes = [1.0] * prompt_length
            for head in heads_of(group, len(queries[layer]), len(keys[layer])):
                weight = 1.0 if heads is None else heads[layer][head]
                best = [max(b, weight * (a * v)) for b, a, v in zip(best, gathered, sizes)]
        best = best[: prompt_length - recent]
        best = averaged(best, kernel) if kernel > 1 else best
        unit = max(best) if scale == "largest" else sum(best) / len(best)
        result.append([b / unit for b in best] + [np.inf] * recent)
    return result


def oracle_compilerkv(
    queries,
    keys,
    values,
    prompt_length,
    budget,
    window=64,
    utility_window=32,
    kernel=1,
    heads=None,
    risk=None,
    perplexity=None,
    entropies=(2, 10),
    perplexities=(1, 100),
    pad="none",
    **how,
):
    """`heads` [layers][heads] weights, `risk` [layers][entropy bins][perplexity bins] thresholds; None is neutral."""
    if prompt_length <= budget:
        return everything(keys, prompt_length)
    scores = compilerkv_scores(queries, keys, values, prompt_length, window, utility_window, kernel, heads, **how)
    kept = []
    for layer, row in enumerate(scores):
        threshold = 0.0
        if risk is not None:
            risks = compilerkv_entropy(queries, keys, prompt_length, window), perplexity
            at = risk_bins(*risks, (len(risk[layer]), len(risk[layer][0])), entropies, perplexities)
            threshold = risk[layer][at[0]][at[1]]
        candidates = [i for i in range(prompt_length) if row[i] >= threshold]
        if len(candidates) > budget or pad == "budget":
            candidates = top_positions(row, budget)
        kept.append([candidates] * len(keys[layer]))
    return kept


def oracle_compilerkv_published(queries, keys, values, prompt_length, budget, window=64, heads=None):
    """As the authors' code runs: their budgets over layers, and one set for all heads of a layer by the weighted mean.

    `heads` [layers][heads]: weights of the query heads; None weighs all alike.
    """
    if prompt_length <= budget:
        return everything(keys, prompt_length)
    layers, n_heads, older = len(queries), len(queries[0]), prompt_length - window
    by_head, mean = [], []
    for layer in range(layers):
        attention, _ = window_attention(queries[layer], keys[layer], prompt_length, window)
        rows = []
        for head in range(n_heads):
            seen = [sum(attention[head][at][token] for at in range(window)) for token in range(older)]
            weight = 1.0 if heads is None else heads[layer][head]
            rows.append([weight * score for score in averaged(seen, 7)])
        by_head.append(rows)
        mean.append([sum(row[token] for row in rows) / n_heads for token in range(older)])
    shares = dynamickv_shares(by_head, prompt_length, budget, window, reach=10)
    return [
        best_and_window([row], share, window, prompt_length) * len(layer)
        for row, share, layer in zip(mean, shares, keys)
    ]


# SnapKV, a set for every query head


def oracle_snapkv_by_head(queries, keys, values, prompt_length, budget, window=32, kernel=7):
    """One layer, as in `core`: a layer whose every query head has keys of its own decides by head."""
    heads = len(queries)
    own_keys = np.array([keys[h * len(keys) // heads] for h in range(heads)])
    own_values = np.array([values[h * len(keys) // heads] for h in range(heads)])
    kept = [list(range(prompt_length))] * heads
    if budget < prompt_length and window < prompt_length:
        scores = pooled_scores(queries, own_keys, prompt_length, window, kernel)
        kept = best_and_window(scores, budget, window, prompt_length)
    return simulate(queries, own_keys, own_values, prompt_length, lambda h: taken(own_keys, own_values, h, kept[h]))
