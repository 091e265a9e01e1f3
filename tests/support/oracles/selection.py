"""Policies that read a part of what they store: Quest, SparQ, hybrid attention, RocketKV; and SnapKV++ before them.

As in `core`: one layer, float64, a policy gives its steps 0 .. T; S is prompt + T. A step's entry has `read`, `stored`
and `output`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from support.oracles.core import heads_of, top_positions
from support.oracles.eviction import attention_row


def simulate_selection(queries, keys, values, prompt_length, stored, select, amend=None):
    """Every generated token stays; a step attends over what `select` names of it.

    `stored` lists the positions kept after the prefill for each KV head. `select(queries [g, d], keys [n, d])` of one
    group gives indices into its n stored entries, ascending; `amend(queries, keys, values, chosen, outputs [g, d])`
    the outputs as the method changes them.
    """
    heads, kv_heads, decoded = len(queries), len(keys), keys.shape[1] - prompt_length
    first = queries.shape[1] - decoded
    stored = [list(kept) for kept in stored]
    steps = [dict(read=[list(kept) for kept in stored], stored=[list(kept) for kept in stored])]
    for t in range(1, decoded + 1):
        read, output = [], np.zeros((heads, values.shape[-1]))
        for group in range(kv_heads):
            stored[group].append(prompt_length + t - 1)
            members = list(heads_of(group, heads, kv_heads))
            own_queries = queries[members, first + t - 1]
            own_keys, own_values = keys[group, stored[group]], values[group, stored[group]]
            chosen = select(own_queries, own_keys)
            read.append([stored[group][i] for i in chosen])
            attended = np.array([attention_row(q, own_keys[chosen]) @ own_values[chosen] for q in own_queries])
            output[members] = attended if amend is None else amend(own_queries, own_keys, own_values, chosen, attended)
        steps.append(dict(read=read, stored=[list(kept) for kept in stored], output=output))
    return steps


def everything(own_queries, own_keys):
    return list(range(len(own_keys)))


def cut_into_pages(length, size):
    return [list(range(start, min(start + size, length))) for start in range(0, length, size)]


def largest(numbers, n):
    """Indices of the n largest, the earlier first of equals."""
    return sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:n]


def room(budget, vectors, rank, dimensions):
    """Half of the budget is for reading; less where finding, by `rank` dimensions of some keys, takes over half."""
    return max(1, min(budget // 2, budget - math.ceil(vectors * rank / (2 * dimensions))))


def softmax_of(logits):
    raised = np.exp(np.array(logits) - max(logits))
    return raised / raised.sum()


# SnapKV++


def snapkv_pp_kept(queries, keys, prompt_length, budget, window, kernel, short, long, threshold):
    """Per KV head; algorithm 1: sum over the window and the group, then the maximum over the kernel."""
    if budget >= prompt_length or window >= prompt_length:
        return [list(range(prompt_length)) for _ in keys]
    kernel = kernel or (short if prompt_length < threshold else long)
    older, kept, first = prompt_length - window, [], queries.shape[1] - keys.shape[1]
    for group in range(len(keys)):
        raw = np.zeros(older)
        for head in heads_of(group, len(queries), len(keys)):
            for p in range(older, prompt_length):
                raw += attention_row(queries[head, first + p], keys[group, : p + 1])[:older]
        pooled = [max(raw[max(i - kernel // 2, 0) : i + kernel // 2 + 1]) for i in range(older)]
        kept.append(top_positions(pooled, budget - window) + list(range(older, prompt_length)))
    return kept


def oracle_snapkv_pp(
    queries, keys, values, prompt_length, budget, window=32, kernel=None, short=63, long=511, threshold=48000
):
    kept = snapkv_pp_kept(queries, keys, prompt_length, budget, window, kernel, short, long, threshold)
    return simulate_selection(queries, keys, values, prompt_length, kept, everything)


# Quest


def page_bound(query, page_keys):
    """The largest dot product that any key within the page's bounds could have with the query."""
    highest, lowest = page_keys.max(axis=0), page_keys.min(axis=0)
    return np.maximum(query * highest, query * lowest).sum()


def quest_page_size(length, budget, page=16):
    return max(page, math.ceil(length / (budget // 2)))


def oracle_quest(queries, keys, values, prompt_length, budget, page=16, last="whole"):
    size = quest_page_size(keys.shape[1], budget, page)

    def select(own_queries, own_keys):
        if len(own_keys) <= budget:
            return everything(own_queries, own_keys)
        pages = cut_into_pages(len(own_keys), size)
        room = max(1, min(budget // 2, budget - len(pages)))
        scores = [sum(page_bound(query, own_keys[tokens]) for query in own_queries) for tokens in pages]
        order, read = largest(scores, len(pages)), []
        for p in order:
            if len(read) + len(pages[p]) > room:
                read += pages[p][: room - len(read)] if last == "cut" else []
                break
            read += pages[p]
        return sorted(read) if read else pages[order[0]][:room]

    return simulate_selection(queries, keys, values, prompt_length, [range(prompt_length)] * len(keys), select)


# SparQ


def temperature(query, dims):
    """sqrt(d |q_r|_1 / |q|_1): what the logits of the chosen dimensions are divided by."""
    return np.sqrt(len(query) * sum(abs(query[i]) for i in dims) / sum(abs(q) for q in query))


def largest_dimensions(own_queries, rank):
    return sorted(largest([sum(abs(query[i]) for query in own_queries) for i in range(own_queries.shape[1])], rank))


def sparq_scores(own_queries, own_keys, rank):
    """Per head: approximate attention from the largest dimensions of the group's queries."""
    dims = largest_dimensions(own_queries, rank)
    return [softmax_of(own_keys[:, dims] @ query[dims] / temperature(query, dims)) for query in own_queries]


def oracle_sparq(queries, keys, values, prompt_length, budget, rank=None):
    dimensions = keys.shape[2]
    rank = min(max(1, int(budget * dimensions / keys.shape[1])), dimensions) if rank is None else rank

    def select(own_queries, own_keys):
        if len(own_keys) <= budget:
            return everything(own_queries, own_keys)
        k = room(budget, len(own_keys), rank, dimensions)
        return top_positions(sum(sparq_scores(own_queries, own_keys, rank)), k)

    def amend(own_queries, own_keys, own_values, chosen, outputs):
        if len(own_keys) <= budget:
            return outputs
        mean = sum(own_values) / len(own_values)
        covered = [row[chosen].sum() for row in sparq_scores(own_queries, own_keys, rank)]
        return np.array([alpha * output + (1 - alpha) * mean for alpha, output in zip(covered, outputs)])

    return simulate_selection(queries, keys, values, prompt_length, [range(prompt_length)] * len(keys), select, amend)


# Hybrid attention and RocketKV


def hybrid_settings(length, budget, dimensions, page=None, rank=None):
    """(page size, dimensions) for a compression c2 = length / budget: its root each, as integers can do it."""
    compression = Fraction(length, budget)
    if page is None:
        page = math.ceil(math.sqrt(compression))
        page = 1 if page > compression else page
    rank = min(max(1, int(dimensions * page / compression)), dimensions) if rank is None else rank
    return page, rank


def hybrid_token_scores(own_queries, own_keys, page, rank):
    """Algorithm 2, averaged over the group: what each token's page promises."""
    dims = largest_dimensions(own_queries, rank)
    signs = [sum(query[i] for query in own_queries) >= 0 for i in dims]
    promised = []  # for each token: what its page shows
    for tokens in cut_into_pages(len(own_keys), page):
        highest, lowest = own_keys[tokens].max(axis=0)[dims], own_keys[tokens].min(axis=0)[dims]
        promised += [np.where(signs, highest, lowest)] * len(tokens)
    total = np.zeros(len(own_keys))
    for query in own_queries:
        total += softmax_of(np.array(promised) @ query[dims] / temperature(query, dims))
    return total / len(own_queries)


def hybrid_selection(budget, page, rank):
    def select(own_queries, own_keys):
        if len(own_keys) <= budget:
            return everything(own_queries, own_keys)
        k = room(budget, math.ceil(len(own_keys) / page), rank, own_keys.shape[1])
        return top_positions(hybrid_token_scores(own_queries, own_keys, page, rank), k)

    return select


def oracle_hybrid(queries, keys, values, prompt_length, budget, page=None, rank=None):
    page, rank = hybrid_settings(keys.shape[1], budget, keys.shape[2], page, rank)
    return simulate_selection(
        queries, keys, values, prompt_length, [range(prompt_length)] * len(keys), hybrid_selection(budget, page, rank)
    )


def rocketkv_capacity(length, decoded, budget, split):
    """How many entries are to be stored at the end, prompt and response together."""
    if split == "even":
        return math.isqrt(length * budget)
    compression = length / budget
    exponent = min(0.2 + 0.06 * math.log2(compression), 0.8)
    return max(int(length / compression**exponent), min(2 * decoded, length))


def rocketkv_kept(
    queries, keys, prompt_length, budget, split="even", window=32, kernel=None, short=63, long=511, threshold=48000
):
    """The first stage: a prompt within the budget is kept whole, as by all policies."""
    left, decoded = prompt_length, keys.shape[1] - prompt_length
    if prompt_length > budget:
        left = max(rocketkv_capacity(keys.shape[1], decoded, budget, split) - decoded, window + 1)
    return snapkv_pp_kept(queries, keys, prompt_length, left, window, kernel, short, long, threshold)


def oracle_rocketkv(queries, keys, values, prompt_length, budget, turns="single", **first_stage):
    kept = rocketkv_kept(queries, keys, prompt_length, budget, **first_stage)
    select = everything
    if keys.shape[1] > budget:
        page, rank = hybrid_settings(len(kept[0]) + keys.shape[1] - prompt_length, budget, keys.shape[2])
        select = hybrid_selection(budget, page, rank)
    steps = simulate_selection(queries, keys, values, prompt_length, kept, select)
    if turns == "multi":
        # The same is read, and all stays: masked, and not evicted.
        whole = [[list(range(prompt_length + t))] * len(keys) for t in range(len(steps))]
        steps = [step | dict(stored=stored) for step, stored in zip(steps, whole)]
        steps[0]["read"] = whole[0]
    return steps
