"""Slow second implementations of the measures and the policies, one plain loop for each definition, in float64.

They are written from the papers and the design alone and share no code with the package, so that the fast versions have
something independent to agree with. One layer at a time: queries are [heads, n, d] (the last n tokens, decoding queries
at the end), keys and values [kv_heads, prompt_length + T, d]. A policy gives a list over the steps 0 .. T; each entry
has lists over the KV heads: `read` (step 0: the set retained after prefill), `stored`, `keys`, `values`, `weights` (the
entries stored after the step), and from step 1 on `output` [heads, d].
"""

from __future__ import annotations

from collections import namedtuple
from contextvars import ContextVar

import numpy as np

Slot = namedtuple("Slot", "position key value weight score", defaults=(1.0, 0.0))


# Attention


def softmax(logits):
    raised = np.exp(logits - np.max(logits))
    return raised / raised.sum()


def attention_weights(query, keys, fusion_counts=None, alpha=0.0):
    """Weights [n] of one query [d] over keys [n, d]; ZSMerge eq. 8 where fusion counts and alpha are given."""
    logits = np.array(keys) @ query / np.sqrt(len(query))
    if fusion_counts is not None:
        logits = logits + alpha * np.log(fusion_counts)
    return softmax(logits)


def attention_output(weights, values):
    return weights @ np.array(values)


def heads_of(group, heads, kv_heads):
    """The query heads that share KV head `group`: neighbours, as grouped-query attention repeats its KV heads."""
    size = heads // kv_heads
    return range(group * size, (group + 1) * size)


def attention_over_prompt(queries, keys, positions=None):
    """[heads, n, P]: softmax over prompt keys only; a query at position p sees the keys up to p, without one all."""
    heads, n, _ = queries.shape
    kv_heads, length, _ = keys.shape
    result = np.zeros((heads, n, length))
    for group in range(kv_heads):
        for head in heads_of(group, heads, kv_heads):
            for i in range(n):
                seen = length if positions is None else min(length, positions[i] + 1)
                result[head, i, :seen] = attention_weights(queries[head, i], keys[group, :seen])
    return result


def window_attention(queries, keys, prompt_length, window):
    """[heads, w, P] of the last `window` prompt queries (fewer in a shorter prompt), causal, and their positions."""
    decoded = keys.shape[1] - prompt_length
    prompt_queries = queries[:, : queries.shape[1] - decoded]
    window = min(window, prompt_length)
    assert prompt_queries.shape[1] >= window, "the oracle was given too few prompt queries"
    positions = list(range(prompt_length - window, prompt_length))
    chosen = prompt_queries[:, prompt_queries.shape[1] - window :]
    return attention_over_prompt(chosen, keys[:, :prompt_length], positions), positions


def summed_over_group(attention, group, kv_heads):
    return sum(attention[head] for head in heads_of(group, len(attention), kv_heads))


# Measures


def top_positions(scores, k):
    """The k largest, in ascending order of position; of equal scores the earlier position wins."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return sorted(order[:k])


def gold_topk(queries, keys, k):
    """Per KV head: the top k prompt positions by attention summed over response queries and the group's heads."""
    attention = attention_over_prompt(queries, keys)
    kv_heads = len(keys)
    return [top_positions(summed_over_group(attention, g, kv_heads).sum(axis=0), k) for g in range(kv_heads)]


def recall(kept, gold):
    return [len(set(k) & set(g)) / len(g) for k, g in zip(kept, gold)]


def mass_lost(weights, read):
    """Per head: 1 - the weights [heads, n] at the positions that the head's KV head reads."""
    heads, kv_heads = len(weights), len(read)
    lost = np.zeros(heads)
    for group in range(kv_heads):
        for head in heads_of(group, heads, kv_heads):
            lost[head] = 1 - sum(weights[head][p] for p in read[group])
    return lost


def output_error(full, other):
    return np.array([np.sqrt(((a - b) ** 2).sum()) / np.sqrt((a**2).sum()) for a, b in zip(full, other)])


def entropy(weights):
    return -sum(w * np.log(w) for w in weights if w > 0)


def query_similarity(a, b):
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return np.mean([x @ y / (np.sqrt(x @ x) * np.sqrt(y @ y)) for x, y in zip(a, b)])


def decoding_weights(queries, keys, prompt_length, step):
    """[heads, P + step]: the full cache's attention at decoding step 1, 2, ..."""
    decoded, kv_heads = keys.shape[1] - prompt_length, len(keys)
    query = queries[:, queries.shape[1] - decoded + step - 1]
    seen = prompt_length + step
    return np.array([attention_weights(query[h], keys[h * kv_heads // len(query), :seen]) for h in range(len(query))])


def replay_measures(queries, keys, values, prompt_length, steps, budget):
    """The definitions applied to a policy's steps: arrays [T, heads] or [T, kv_heads], recall [kv_heads]."""
    heads, kv_heads, total = len(queries), len(keys), keys.shape[1]
    decoded = total - prompt_length
    result = {"mass_lost": [], "output_error": [], "step_recall": []}
    for t in range(1, decoded + 1):
        weights = decoding_weights(queries, keys, prompt_length, t)
        seen = prompt_length + t
        full = [attention_output(weights[h], values[h * kv_heads // heads, :seen]) for h in range(heads)]
        own = [top_positions(summed_over_group(weights, g, kv_heads), min(budget, seen)) for g in range(kv_heads)]
        result["mass_lost"].append(mass_lost(weights, steps[t]["read"]))
        result["output_error"].append(output_error(full, steps[t]["output"]))
        result["step_recall"].append(recall(steps[t]["read"], own))
    gold = gold_topk(queries[:, queries.shape[1] - decoded :], keys[:, :prompt_length], min(budget, prompt_length))
    result["recall"] = recall(steps[0]["read"], gold)
    return {name: np.array(value) for name, value in result.items()}


def window_recall(queries, keys, prompt_length, budget, window=None, pseudo=None):
    """DapQ eq. 2-3, per KV head: the top k of the raw window scores, nothing forced or pooled, against the gold set."""
    decoded, k = keys.shape[1] - prompt_length, min(budget, prompt_length)
    prompt_keys = keys[:, :prompt_length]
    attention = (
        attention_over_prompt(pseudo, prompt_keys)
        if pseudo is not None
        else window_attention(queries, keys, prompt_length, window)[0]
    )
    predicted = [top_positions(summed_over_group(attention, g, len(keys)).sum(axis=0), k) for g in range(len(keys))]
    return recall(predicted, gold_topk(queries[:, queries.shape[1] - decoded :], prompt_keys, k))


# The clock: append, attend over what is stored, update, evict or merge


class AsIs:
    """Entries as they are, in float32: how a storage of one KV head looks to `simulate` (others are in `storages`)."""

    def settled(self, slots, seen):
        """The slots as they are read once `seen` tokens were there."""
        return slots

    def merged(self, slot):
        """A slot whose key and value have changed, as it is read."""
        return slot

    def forget(self, position):
        """That an entry of this position was ever there."""

    def bytes_of(self, slots):
        return sum(4 * (len(slot.key) + len(slot.value)) for slot in slots)


STORAGE = ContextVar("storage", default=AsIs)
"""What makes the storage of one KV head; the oracles of policies do not know of it."""


def simulate(queries, keys, values, prompt_length, prefill, after=None, alpha=0.0):
    """Runs one policy: `prefill(group)` gives the first slots, `after(group, slots, weights, position)` the later ones.

    `weights` [heads of the group, slots] are those of the step just attended, own entry included.
    """
    heads, kv_heads, decoded = len(queries), len(keys), keys.shape[1] - prompt_length
    first = queries.shape[1] - decoded
    storages = [STORAGE.get()() for _ in range(kv_heads)]
    slots = [storages[group].settled(prefill(group), prompt_length) for group in range(kv_heads)]
    steps = [dict(read=positions_of(slots), **contents(slots))]
    for t in range(1, decoded + 1):
        position = prompt_length + t - 1
        read, output = [], np.zeros((heads, values.shape[-1]))
        for group in range(kv_heads):
            own = Slot(position, keys[group, position], values[group, position])
            slots[group] = storages[group].settled(slots[group] + [own], position + 1)
            read.append([slot.position for slot in slots[group]])
            attended = []
            for head in heads_of(group, heads, kv_heads):
                weights = attention_weights(
                    queries[head, first + t - 1],
                    [slot.key for slot in slots[group]],
                    [slot.weight for slot in slots[group]],
                    alpha,
                )
                output[head] = attention_output(weights, [slot.value for slot in slots[group]])
                attended.append(weights)
            if after is not None:
                slots[group] = after(group, slots[group], np.array(attended), position)
        sizes = [storage.bytes_of(each) for storage, each in zip(storages, slots)]
        steps.append(dict(read=read, output=output, bytes=sum(sizes), **contents(slots)))
    return steps


def positions_of(slots):
    return [[slot.position for slot in group] for group in slots]


def contents(slots):
    return {
        "stored": positions_of(slots),
        "keys": [[s.key for s in group] for group in slots],
        "values": [[s.value for s in group] for group in slots],
        "weights": [[s.weight for s in group] for group in slots],
    }


def taken(keys, values, group, positions):
    return [Slot(p, keys[group, p], values[group, p]) for p in positions]


# Policies


def oracle_full(queries, keys, values, prompt_length, budget=None):
    return simulate(queries, keys, values, prompt_length, lambda g: taken(keys, values, g, range(prompt_length)))


def oracle_streamingllm(queries, keys, values, prompt_length, budget, sinks=4):
    def first_and_last(slots):
        if len(slots) <= budget:
            return slots
        return slots[:sinks] + slots[len(slots) - (budget - sinks) :]

    return simulate(
        queries,
        keys,
        values,
        prompt_length,
        lambda g: first_and_last(taken(keys, values, g, range(prompt_length))),
        lambda g, slots, weights, position: first_and_last(slots),
    )


def oracle_snapkv(queries, keys, values, prompt_length, budget, window=32, kernel=7):
    def kept(group):
        if budget >= prompt_length or window >= prompt_length:
            return range(prompt_length)
        attention, _ = window_attention(queries, keys, prompt_length, window)
        older = prompt_length - window
        raw = summed_over_group(attention, group, len(keys)).sum(axis=0)[:older]
        pooled = []
        for i in range(older):
            neighbours = [raw[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < older]
            pooled.append(sum(neighbours) / kernel)
        return top_positions(pooled, budget - window) + list(range(older, prompt_length))

    return simulate(queries, keys, values, prompt_length, lambda g: taken(keys, values, g, kept(g)))


def oracle_laq(queries, keys, values, prompt_length, budget, draft, window=8, kernel=7):
    """LAQ++: the drafted answer's queries `[heads, m, d]` and the window's, summed and max-pooled; the window stays."""
    older = prompt_length - window

    def kept(group):
        if budget >= prompt_length:
            return range(prompt_length)
        attention = attention_over_prompt(draft, keys[:, :prompt_length])
        raw = summed_over_group(attention, group, len(keys)).sum(axis=0)[:older]
        if window:
            observed, _ = window_attention(queries, keys, prompt_length, window)
            raw = raw + summed_over_group(observed, group, len(keys)).sum(axis=0)[:older]
        pooled = [max(raw[max(i - kernel // 2, 0) : i + kernel // 2 + 1]) for i in range(older)]
        return top_positions(pooled, budget - window) + list(range(older, prompt_length))

    return simulate(queries, keys, values, prompt_length, lambda g: taken(keys, values, g, kept(g)))


def attention_with_each_other(pseudo, pseudo_keys, keys):
    """DapQ's pseudo-queries over the prompt's keys and those of pseudo-tokens up to their own: the prompt's part."""
    group, rows = len(pseudo) // len(keys), np.zeros((*pseudo.shape[:2], keys.shape[1]))
    for h, i in np.ndindex(*pseudo.shape[:2]):
        seen = np.concatenate([keys[h // group], pseudo_keys[h // group][: i + 1]])
        logits = seen @ pseudo[h, i] / np.sqrt(pseudo.shape[-1])
        weights = np.exp(logits - logits.max())
        rows[h, i] = (weights / weights.sum())[: keys.shape[1]]
    return rows


def oracle_dapq(queries, keys, values, prompt_length, budget, pseudo, pseudo_keys=None):
    """Without the pseudo-tokens' keys, the softmax goes over the prompt alone."""
    prompt = keys[:, :prompt_length]
    attention = (
        attention_over_prompt(pseudo, prompt)
        if pseudo_keys is None
        else attention_with_each_other(pseudo, pseudo_keys, prompt)
    )

    def kept(group):
        return top_positions(summed_over_group(attention, group, len(keys)).sum(axis=0), min(budget, prompt_length))

    return simulate(queries, keys, values, prompt_length, lambda g: taken(keys, values, g, kept(g)))
