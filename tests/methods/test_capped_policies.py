"""Policies on models that cap their logits or have learnt sinks, against slow loops of their definitions."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.stepwise import Watch
from support.tensors import exact, layer, sets

import kvlab
from kvlab.core.softmax import Softmax
from kvlab.methods import Prompt

HEADS, KV_HEADS, D, PROMPT, STEPS = 4, 2, 8, 40, 3
SCALING = 0.4
SINKS = torch.tensor([[3.0, -1.0, 2.0, 4.0]])
KINDS = {"capped": (2.0, None), "sinks": (None, SINKS), "both": (2.0, SINKS)}


@pytest.fixture(params=KINDS)
def made(request):
    """A trace of one layer with a soft cap, sinks or both, and its numbers for the loops."""
    softcap, sinks = KINDS[request.param]
    tensors = layer(21, HEADS, KV_HEADS, D, PROMPT, STEPS, layers=1)
    trace = kvlab.Trace.from_tensors(*tensors, PROMPT, scaling=SCALING, softcap=softcap, sinks=sinks)
    return trace, (*exact(*(x[0] for x in tensors)), softcap, None if sinks is None else exact(sinks[0]))


def capped(logit, softcap):
    return logit if softcap is None else softcap * math.tanh(logit / softcap)


def rows(logits, sink):
    """Weights of capped logits, and what the sink takes."""
    powers = np.exp(np.array(logits))
    total = powers.sum() + (0 if sink is None else math.exp(sink))
    return powers / total, 1 - powers.sum() / total


def attention_rows(numbers, head, position):
    queries, keys, _, softcap, sinks = numbers
    seen = keys[head * KV_HEADS // HEADS][: position + 1]
    logits = [capped(SCALING * float(queries[head, position] @ key), softcap) for key in seen]
    return rows(logits, None if sinks is None else sinks[head])[0]


def group_sum(numbers, group, position, length):
    total = np.zeros(length)
    for head in range(group * 2, group * 2 + 2):
        row = attention_rows(numbers, head, position)[:length]
        total[: len(row)] += row
    return total


@pytest.mark.parametrize("name", ["h2o", "snapkv", "scissorhands"])
def test_what_prompts_are_scored_by_is_the_models_own_attention(made, name):
    trace, numbers = made
    trace.accumulated = torch.zeros(1, HEADS, PROMPT)
    for head in range(HEADS):
        for i in range(PROMPT):
            trace.accumulated[0, head, : i + 1] += torch.from_numpy(attention_rows(numbers, head, i)).float()
    policy = kvlab.policy(name, budget=20, **({"window": 6} if name == "snapkv" else {}))
    found = policy.scores(trace.prompt)[0]
    for group in range(KV_HEADS):
        expected = np.zeros(PROMPT)
        for i in range(PROMPT):
            if name == "h2o" or (name == "snapkv" and i >= PROMPT - 6):
                expected += group_sum(numbers, group, i, PROMPT)
            elif name == "scissorhands" and i >= PROMPT - 4:  # a fifth of the budget
                expected[: i + 1] -= group_sum(numbers, group, i, i + 1) / 2 < 1 / (i + 1)
        np.testing.assert_allclose(found[group], expected, atol=1e-4)


def test_dapqs_pseudo_queries_meet_the_same_softmax(made):
    trace, numbers = made
    _, keys, _, softcap, sinks = numbers
    pseudo = torch.randn(1, HEADS, 5, D, generator=torch.Generator().manual_seed(4))
    trace.pseudo = {"given": pseudo}
    found = kvlab.policy("dapq", budget=8, window=5).scores(trace.prompt)[0]
    for group in range(KV_HEADS):
        expected = np.zeros(PROMPT)
        for head in range(group * 2, group * 2 + 2):
            for query in exact(pseudo[0, head]):
                logits = [capped(SCALING * float(query @ key), softcap) for key in keys[group][:PROMPT]]
                expected += rows(logits, None if sinks is None else sinks[head])[0]
        np.testing.assert_allclose(found[group], expected, atol=1e-4)


def test_keyformers_noise_comes_after_the_cap_and_its_scores_leave_sinks_out(made):
    trace, numbers = made
    queries, keys, _, softcap, _ = numbers
    policy = kvlab.policy("keyformer", budget=12, tau_start=1.3)
    gumbel = exact(policy.gumbel((0,), HEADS, 0, PROMPT)[0])
    found = policy.scores(trace.prompt)[0]
    for group in range(KV_HEADS):
        expected = np.zeros(PROMPT)
        for head in range(group * 2, group * 2 + 2):
            for i in range(PROMPT):
                logits = [capped(SCALING * float(queries[head, i] @ keys[group][j]), softcap) for j in range(i + 1)]
                expected[: i + 1] += rows([(x + g) / 1.3 for x, g in zip(logits, gumbel[head], strict=False)], None)[0]
        np.testing.assert_allclose(found[group], expected, atol=1e-3)


def test_exact_topk_reads_the_top_of_the_models_own_attention(made):
    trace, numbers = made
    result = kvlab.replay(trace, kvlab.policy("exact_topk", budget=7))
    for step in range(STEPS):
        for group, read in enumerate(sets(result.kept(0, step + 1))):
            scores = group_sum(numbers, group, PROMPT + step, PROMPT + step + 1)
            assert read == sorted(np.argsort(-scores)[:7].tolist())


def approximate(query_group, keys, rank):
    """SparQ's partial logits `[group][n]` before the cap: the group's largest dimensions, at their temperature."""
    size = np.abs(query_group).sum(0)
    dims = sorted(range(D), key=lambda i: (-size[i], i))[:rank]
    found = []
    for query in query_group:
        share = np.abs(query[dims]).sum() / np.abs(query).sum()
        found.append([SCALING / math.sqrt(share) * float(query[dims] @ key[dims]) for key in keys])
    return found


def test_sparq_stands_in_for_what_is_not_read_and_not_for_the_sink(made):
    trace, numbers = made
    queries, keys, values, softcap, sinks = numbers
    watch, rank = Watch(), 3
    result = kvlab.replay(trace, kvlab.policy("sparq", budget=16, rank=rank), probes=[watch])
    for step in range(STEPS):
        position = PROMPT + step
        for group in range(KV_HEADS):
            heads = range(group * 2, group * 2 + 2)
            seen_keys, seen_values = keys[group][: position + 1], values[group][: position + 1]
            partial = approximate(np.array([queries[h, position] for h in heads]), seen_keys, rank)
            shares = [
                rows([capped(x, softcap) for x in logits], None if sinks is None else sinks[h])
                for h, logits in zip(heads, partial, strict=True)
            ]
            read = sets(result.kept(0, step + 1))[group]
            together = sum(weights for weights, _ in shares)
            assert read == sorted(np.argsort(-together)[: len(read)].tolist())
            for h, (weights, sink) in zip(heads, shares, strict=True):
                alpha = weights[read].sum() + sink
                logits = [capped(SCALING * float(queries[h, position] @ seen_keys[i]), softcap) for i in read]
                attended, _ = rows(logits, None if sinks is None else sinks[h])
                expected = alpha * (attended @ seen_values[read]) + (1 - alpha) * seen_values.mean(0)
                np.testing.assert_allclose(watch.outputs[step][0, h], expected, atol=1e-4)


def test_hybrid_attention_finds_by_capped_logits_and_the_models_softmax(made):
    """Pages of one entry are the keys themselves, so that the scores are SparQ's, averaged over the group."""
    trace, numbers = made
    queries, keys, _, softcap, sinks = numbers
    result = kvlab.replay(trace, kvlab.policy("hybrid", budget=16, page=1, rank=3))
    for step in range(STEPS):
        position = PROMPT + step
        for group in range(KV_HEADS):
            heads = range(group * 2, group * 2 + 2)
            partial = approximate(np.array([queries[h, position] for h in heads]), keys[group][: position + 1], 3)
            scores = sum(
                rows([capped(x, softcap) for x in logits], None if sinks is None else sinks[h])[0]
                for h, logits in zip(heads, partial, strict=True)
            )
            read = sets(result.kept(0, step + 1))[group]
            assert read == sorted(np.argsort(-scores)[: len(read)].tolist()) and len(read) > 3


class Asks(kvlab.Policy):
    """Keeps everything and writes down what a step is told of the logits."""

    name: ClassVar[str] = "asks"
    told: ClassVar[list] = []

    def select(self, store, queries, scaling):
        self.told.append(scaling)


def test_a_policy_of_a_users_own_is_told_a_number_wherever_that_is_all(made):
    trace, _ = made
    plain = kvlab.Trace.from_tensors(trace.queries, trace.keys, trace.values, PROMPT, scaling=0.25)
    for each in (plain, trace):
        Asks.told.clear()
        kvlab.replay(each, Asks())
        assert len(Asks.told) == STEPS
        if each is plain:
            assert set(Asks.told) == {0.25} and plain.prompt.scaling == 0.25
        else:
            assert all(isinstance(told, Softmax) and told.softcap == trace.softcap for told in Asks.told)
    queries, keys, values = trace.queries[:, :, :PROMPT], trace.prompt_keys, trace.prompt_values
    assert Prompt(queries, keys, values, (0,), 1, scaling=None).scaling is None
