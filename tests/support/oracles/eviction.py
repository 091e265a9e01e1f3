"""Policies that evict while they decode, by what attention the tokens gathered: Scissorhands, H2O, Keyformer.

As in `core`: one layer, float64, a policy gives its steps 0 .. T. Queries must cover the prompt queries that a policy
looks at: the last of its history for Scissorhands, all of them for the other two.
"""

from __future__ import annotations

import numpy as np

from support.oracles.core import heads_of, simulate, summed_over_group, taken, top_positions


def attention_row(query, keys, noise=0.0, tau=1.0):
    """softmax((q . K / sqrt(d) + noise) / tau) of one query [d] over keys [n, d]."""
    logits = (keys @ query / np.sqrt(len(query)) + noise) / tau
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()


def accumulated_attention(queries, keys, prompt_length, noise=None, tau=1.0):
    """[heads, P]: the attention that each prompt token gathers from all prompt queries, each of which looks back."""
    decoded, kv_heads = keys.shape[1] - prompt_length, len(keys)
    assert queries.shape[1] == keys.shape[1], "every prompt query is needed"
    gathered = np.zeros((len(queries), prompt_length))
    for group in range(kv_heads):
        for head in heads_of(group, len(queries), kv_heads):
            for i in range(queries.shape[1] - decoded):
                own = 0.0 if noise is None else noise[head, : i + 1]
                gathered[head, : i + 1] += attention_row(queries[head, i], keys[group, : i + 1], own, tau)
    return gathered


def best_and_newest(slots, budget, newest):
    """The `newest` last slots and as many of the others, highest score first, as the budget leaves."""
    if len(slots) <= budget:
        return slots
    older = slots[:-newest]
    return [older[i] for i in top_positions([s.score for s in older], budget - newest)] + slots[-newest:]


def oracle_scissorhands(queries, keys, values, prompt_length, budget, recent=0.5, history=0.2):
    """Out goes who got less than the average 1/t of t entries most often among the last H queries."""
    newest, remembered = max(1, int(recent * budget)), max(1, int(history * budget))
    first = queries.shape[1] - keys.shape[1]  # index of the query at position p: first + p
    unimportant = [{} for _ in keys]  # per KV head: query position -> {key position: below average}

    def remember(group, rows, positions, query_position):
        mean = sum(rows) / len(rows)
        unimportant[group][query_position] = {p: a < 1 / len(positions) for p, a in zip(positions, mean)}

    def trimmed(group, slots, now):
        rows = [unimportant[group][p] for p in range(max(now - remembered + 1, 0), now + 1)]
        counted = [s._replace(score=-sum(row.get(s.position, False) for row in rows)) for s in slots]
        return best_and_newest(counted, budget, newest)

    def prefill(group):
        for p in range(max(prompt_length - remembered, 0), prompt_length):
            rows = [
                attention_row(queries[head, first + p], keys[group, : p + 1])
                for head in heads_of(group, len(queries), len(keys))
            ]
            remember(group, rows, range(p + 1), p)
        return trimmed(group, taken(keys, values, group, range(prompt_length)), prompt_length - 1)

    def after(group, slots, weights, position):
        remember(group, weights, [s.position for s in slots], position)
        return trimmed(group, slots, position)

    return simulate(queries, keys, values, prompt_length, prefill, after)


def oracle_h2o(queries, keys, values, prompt_length, budget, heavy=0.5):
    """The highest accumulated attention and the newest; one in and one out at each step."""
    newest = max(1, budget - max(1, int(heavy * budget)))
    gathered = accumulated_attention(queries, keys, prompt_length)

    def prefill(group):
        scores = summed_over_group(gathered, group, len(keys))
        slots = taken(keys, values, group, range(prompt_length))
        return best_and_newest([s._replace(score=scores[s.position]) for s in slots], budget, newest)

    def after(group, slots, weights, position):
        slots = [s._replace(score=s.score + a) for s, a in zip(slots, weights.sum(axis=0))]
        return best_and_newest(slots, budget, newest)

    return simulate(queries, keys, values, prompt_length, prefill, after)


def oracle_keyformer(
    queries, keys, values, prompt_length, budget, gumbel=None, recent=0.5, tau_start=1.0, tau_end=2.0, announced=None
):
    """H2O with another score: softmax((logit + noise) / tau). `gumbel` [heads, prompt + T], one number for each key.

    tau reaches its end with the last of the `announced` steps, T unless given.
    """
    newest = max(1, int(recent * budget))
    announced = keys.shape[1] - prompt_length if announced is None else announced
    noise = np.zeros((len(queries), keys.shape[1])) if gumbel is None else gumbel
    gathered = accumulated_attention(queries, keys, prompt_length, noise, tau_start)

    def prefill(group):
        scores = summed_over_group(gathered, group, len(keys))
        slots = taken(keys, values, group, range(prompt_length))
        return best_and_newest([s._replace(score=scores[s.position]) for s in slots], budget, newest)

    def after(group, slots, weights, position):
        step = position - prompt_length + 1
        tau = tau_start + (tau_end - tau_start) * step / announced if step < announced else tau_end
        stored = [s.position for s in slots]
        added = sum(
            attention_row(queries[head, position], keys[group, stored], noise[head, stored], tau)
            for head in heads_of(group, len(queries), len(keys))
        )
        return best_and_newest([s._replace(score=s.score + a) for s, a in zip(slots, added)], budget, newest)

    return simulate(queries, keys, values, prompt_length, prefill, after)
