"""Two methods in turn: against plain loops, what a chain can add and cannot, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import oracles
from support.cases import SHAPES
from support.live_runs import generate, prompt
from support.refusals import refusal
from support.stepwise import LAYERS, inputs, watched
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.methods.chain import Chain

LENGTH = 60
WINDOW, KERNEL = 6, 3


def snapkv(budget=30):
    return kvlab.policy("snapkv", budget=budget, window=WINDOW, kernel=KERNEL)


def snapkv_of(queries, keys, stayed, budget):
    """SnapKV's set of one layer among the positions `stayed`, a list for each KV head: a query sees what came before.

    Args:
        queries: [heads, n, d], of all tokens.
        keys: [kv_heads, n, d].
    """
    found, group = [], len(queries) // len(keys)
    for head, positions in enumerate(stayed):
        total = [0.0] * len(positions)
        for query_head in range(head * group, (head + 1) * group):
            for own in range(LENGTH - WINDOW, LENGTH):
                seen = [i for i, position in enumerate(positions) if position <= own]
                if not seen:
                    continue
                logits = [queries[query_head, own] @ keys[head, positions[i]] / np.sqrt(keys.shape[2]) for i in seen]
                weights = np.exp(logits - np.max(logits))
                for i, weight in zip(seen, weights / weights.sum(), strict=True):
                    total[i] += weight
        older = total[: len(positions) - WINDOW]
        padded = [0.0] * (KERNEL // 2) + older + [0.0] * (KERNEL // 2)
        pooled = [sum(padded[i : i + KERNEL]) for i in range(len(older))]
        best = oracles.top_positions(pooled + [np.inf] * WINDOW, budget)
        found.append([positions[i] for i in best])
    return found


def keydiff_of(queries, keys, stayed, budget):
    """KeyDiff's set of one layer, as `snapkv_of`."""
    found = []
    for own, positions in zip(keys, stayed, strict=True):
        among = oracles.oracle_keydiff(None, [own[positions]], None, budget)[0]
        found.append([positions[i] for i in among])
    return found


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    ("first", "second", "own", "loops"),
    [
        (snapkv(30), "keydiff", 30, (snapkv_of, keydiff_of)),
        (kvlab.policy("keydiff", budget=0.5), snapkv(), 30, (keydiff_of, snapkv_of)),
        ("keydiff", snapkv(), LENGTH - 24, (keydiff_of, snapkv_of)),  # half of the 48 that leave
    ],
    ids=["own entries", "own share", "half the way"],
)
def test_the_second_judges_what_the_first_has_left_by_plain_loops(heads, kv_heads, first, second, own, loops):
    tensors = inputs(heads + kv_heads, heads, kv_heads, LENGTH, 3)
    policy = kvlab.policy("chain", budget=12, first=first, second=second)
    result = kvlab.replay(kvlab.Trace.from_tensors(*tensors, LENGTH), policy)
    for index in range(LAYERS):
        arrays = [x[:, :LENGTH] for x in exact(*(t[index] for t in tensors[:2]))]

        def both(queries, keys):
            everything = [list(range(LENGTH))] * kv_heads
            return loops[1](queries, keys, loops[0](queries, keys, everything, own), 12)

        expected = both(*arrays)
        assert both(*shaken(*arrays)) == expected, "near-ties"
        assert sets(result.kept(index)) == expected


def test_queries_look_at_nothing_that_came_after_them_though_slots_have_moved_up():
    """The first evicts most of the window: the loop goes by positions, and some queries see nothing at all."""
    queries, keys, values = layer(3, 4, 2, 16, LENGTH)
    keys[:, -WINDOW:-1] *= 9  # which knorm lets go
    keys[0, -1] *= 9
    policy = kvlab.policy("chain", budget=9, first=kvlab.policy("knorm", budget=20), second=snapkv())
    norms = exact(keys.norm(dim=-1))
    stayed = [oracles.top_positions(-own, 20) for own in norms]
    assert all(set(range(LENGTH - WINDOW, LENGTH - 1)).isdisjoint(own) for own in stayed)
    asking, own = exact(queries, keys)
    expected = snapkv_of(asking, own, stayed, 9)
    assert sets(policy.keep(queries[None], keys[None], values[None])[0]) == expected


@pytest.mark.parametrize("order", [("think", "keydiff"), ("keydiff", "think")])
def test_a_method_of_channels_and_one_of_tokens_both_act(tiny, order):
    think, tokens = kvlab.policy("think", window=8, ratio=0.5), kvlab.policy("keydiff", budget=50)
    named = {"think": think, "keydiff": tokens}
    policy = kvlab.policy("chain", budget=20, first=named[order[0]], second=named[order[1]])
    tensors = inputs(5, 4, 2, LENGTH, 4)
    result, watch = watched(policy, tensors, LENGTH)
    for index in range(LAYERS):
        queries, keys, values = exact(*(t[index] for t in tensors))
        everything = [list(range(LENGTH))] * 2
        thin = keys.copy()

        def thinned(kept, keys=keys, queries=queries, thin=thin):
            for head, positions in enumerate(kept):
                asking = (queries[2 * head : 2 * head + 2, LENGTH - 8 : LENGTH] ** 2).mean((0, 1))
                weight = asking * (keys[head, positions] ** 2).mean(0)
                gone = sorted(range(16), key=lambda channel: weight[channel])[:8]
                older = [position for position in positions if position < LENGTH - 8]
                thin[head][np.ix_(older, gone)] = 0

        if order[0] == "think":
            thinned(everything)
            kept = keydiff_of(None, thin[:, :LENGTH], everything, 20)
        else:
            kept = keydiff_of(None, keys[:, :LENGTH], everything, 20)
            thinned(kept)
        assert sets(result.kept(index)) == kept
        for step in range(4):
            for head in range(4):
                positions = [*kept[head // 2], *range(LENGTH, LENGTH + step + 1)]
                weights = oracles.attention_weights(queries[head, LENGTH + step], thin[head // 2, positions])
                expected = weights @ values[head // 2, positions]
                np.testing.assert_allclose(watch.outputs[step][index, head], expected, atol=2e-5)
    stored = sum(len(head) for index in range(LAYERS) for head in sets(result.stored(index, 4)))
    older = sum(p < LENGTH - 8 for index in range(LAYERS) for head in sets(result.kept(index)) for p in head)
    assert result.stored_bytes[-1] == stored * 2 * 16 * 4 - older * 8 * 4 + LAYERS * 2 * 16  # and a mask for each head


SECONDS = ["knorm", "keydiff", "snapkv", "curdkv", "random", "adakv", "pyramidkv"]


def made(name, budget):
    """The policy with parameters that suit a short prompt."""
    around = dict(scorer="knorm") if name == "adakv" else {}
    short = dict(window=4, kernel=3) if name in ("snapkv", "pyramidkv") else {}
    return kvlab.policy(name, budget=budget, **around, **short)


def kept_sets(tensors, policy):
    queries, keys, values = tensors
    result = kvlab.replay(kvlab.Trace.from_tensors(queries, keys, values, keys.shape[2] - 1), policy)
    return [sets(result.kept(index)) for index in range(LAYERS)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    length=st.integers(12, 70),
    first=st.sampled_from(["knorm", "keydiff", "snapkv", "curdkv", "random"]),
    second=st.sampled_from(SECONDS),
    own=st.integers(6, 60),
    budget=st.integers(6, 60),
)
def test_what_stays_is_among_what_the_first_keeps_and_is_as_much_as_the_budget(
    seed, length, first, second, own, budget
):
    tensors = inputs(seed, 4, 2, length, 1)
    one = made(first, max(own, budget))
    found = kept_sets(tensors, kvlab.policy("chain", budget=budget, first=made(first, own), second=made(second, 7)))
    for layer_sets, firsts in zip(found, kept_sets(tensors, one), strict=True):
        assert all(set(head) <= set(kept) for head, kept in zip(layer_sets, firsts, strict=True))
        if second != "pyramidkv":
            assert sum(map(len, layer_sets)) == 2 * min(length, budget)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    length=st.integers(12, 70),
    name=st.sampled_from(SECONDS),
    budget=st.integers(6, 60) | st.floats(0.1, 1),
)
def test_a_chain_with_the_full_cache_is_the_other_one_alone(seed, length, name, budget):
    tensors, alone = inputs(seed, 4, 2, length, 1), made(name, budget)
    expected = kept_sets(tensors, alone)
    assert kept_sets(tensors, kvlab.policy("chain", budget=budget, first="full", second=alone)) == expected
    assume(name not in ("adakv", "pyramidkv"))
    assert kept_sets(tensors, kvlab.policy("chain", budget=budget, first=alone, second="full")) == expected


@pytest.mark.parametrize(
    ("parameters", "entries"),
    [
        (dict(first="knorm"), 70),
        (dict(first="knorm", through=0.25), 85),
        (dict(first="knorm", through=1.0), 40),
        (dict(first=kvlab.policy("knorm", budget=0.6)), 60),
        (dict(first=kvlab.policy("knorm", budget=0.3)), 40),  # never less than the chain's own
        (dict(first=kvlab.policy("knorm", budget=0.6), through=0.0), 100),
        (dict(first="snapkv", through=1.0), 40),
        (dict(first="snapkv", through=1.0, budget=20), 33),  # its window and one more
        (dict(first="knorm", second="think"), 40),
    ],
)
def test_the_budget_of_the_first_is_what_the_parameters_say(parameters, entries):
    policy = kvlab.policy("chain", **dict(budget=40, second="keydiff") | parameters)
    assert isinstance(policy, Chain)
    assert policy.methods(100)[0].entries(100) == entries


def test_live_and_replayed_chains_with_channels_attend_to_the_same_keys(tiny):
    lm = tiny("tiny-qwen3")
    policy = kvlab.policy("chain", budget=20, first=snapkv(40), second=kvlab.policy("think", window=8))
    trace = kvlab.capture(lm, prompt(LENGTH), 5, policies=[policy])
    replay = kvlab.replay(trace, policy)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, prompt(LENGTH), 6)
    live = session._cache
    assert live is not None
    assert session.kv_bytes + session.aux_bytes == replay.stored_bytes[-1]
    for index in range(2):
        assert sets(session.kept(index)) == sets(replay.stored(index, 5))
        store = live.compressed[index].groups[0].store
        gone = (store.keys[0] == 0).sum(-1)
        older = store.positions[0] < LENGTH - 8
        assert gone[older].eq(6).all() and not gone[~older].any() and older.any()


def test_what_cannot_be_chained_is_refused_in_one_sentence():
    for first, second, why in [
        ("h2o", "knorm", "chain: h2o acts while decoding"),
        ("knorm", "quest", "chain: quest acts while decoding"),
        ("kvzip", "knorm", "chain: kvzip looks at all layers"),
        ("adakv", "knorm", "chain: adakv shares its budget among layers or heads, and must be the second"),
        ("knorm", "expected_attention", "chain: expected_attention needs every query of the prompt"),
        ("rerotated", "knorm", "chain: rerotated changes the entries"),
        ("knorm", "laq", "chain: laq has the model draft"),
        (snapkv().replace(sets="head"), "knorm", "chain: snapkv keeps a set for each query head"),
        ("think", "think", "neither think nor think takes a budget"),
        (kvlab.policy("think", scorer=snapkv()), "think", "chain: neither"),
        ("knorms", "knorm", "unknown policy 'knorms'"),
    ]:
        assert why in refusal(kvlab.policy, "chain", budget=40, first=first, second=second)
    for through in (-0.1, 1.5, "half"):
        refusal(kvlab.policy, "chain", budget=40, through=through)
    assert "does not score tokens" in refusal(kvlab.policy, "adakv", budget=40, scorer="chain")


class Uneven(kvlab.Policy):
    """Keeps more for the second head."""

    name, summary = "uneven", "for tests"
    budget: int

    def choose(self, prompt, budget):
        kept = np.full((prompt.rows, 2, budget), -1)
        kept[:, 0, : budget - 1], kept[:, 1] = np.arange(budget - 1), np.arange(budget)
        return torch.from_numpy(kept)


def test_a_first_that_leaves_heads_with_different_numbers_is_refused_when_it_does():
    queries, keys, values = layer(1, 4, 2, 16, LENGTH)
    policy = kvlab.policy("chain", budget=9, first=Uneven(budget=20), second="knorm")
    assert "has left heads with different numbers" in refusal(policy.keep, queries[None], keys[None], values[None])
