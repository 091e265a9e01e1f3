"""Quest's pages: right as tokens arrive, however they arrive, and bounds above every logit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.stepwise import (
    SELECTING,
    begun,
    inputs,
    watched,
)
from support.tensors import layer, sets

import kvlab
from kvlab.core.store import LayerStore
from kvlab.methods._base import pages


def finished(policy, tensors, prompt):
    """The store of a policy once the last step is done."""
    return watched(policy, tensors, prompt)[1].store


def pages_of(store):
    """Maximum and minimum of the pages' keys as the policy remembers them, `[rows, kv_heads, pages, head_dim]` each."""
    return store.memory["pages"].transpose(3, 4).unbind(2)


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("quest", dict(budget=24, page=16)),
        ("quest", dict(budget=40, page=4)),
        ("hybrid", dict(budget=24)),
        ("hybrid", dict(budget=31, page=5)),
        ("rocketkv", dict(budget=24, window=8, short=5)),
    ],
)
@pytest.mark.parametrize("steps", [1, 7, 50])
def test_pages_stay_right_as_tokens_arrive(name, parameters, steps):
    store = finished(kvlab.policy(name, **parameters), inputs(8, 4, 2, 97, steps), 97)
    high, low = pages_of(store)
    size = store.numbers["page"]
    keys = store.keys
    assert low.shape[2] == math.ceil(keys.shape[2] / size)
    for p, tokens in enumerate(oracles.cut_into_pages(keys.shape[2], size)):
        assert low[:, :, p].equal(keys[:, :, tokens].amin(2)) and high[:, :, p].equal(keys[:, :, tokens].amax(2))


@pytest.mark.parametrize("name", ["quest", "hybrid", "sparq"])
@pytest.mark.parametrize("pieces", [[30], [1, 11, 18], [16, 7, 7]])
def test_tokens_that_arrive_together_are_found_like_any_others(name, pieces):
    policy, tensors = kvlab.policy(name, budget=32), inputs(15, 4, 2, 127)
    store, one_by_one = (begun(policy, tensors, 97, 30) for _ in range(2))
    seen = 97
    for piece in pieces:
        store.append(*(t[:, :, seen : seen + piece] for t in tensors[1:]))
        for position in range(seen, seen + piece):
            one_by_one.append(*(t[:, :, position : position + 1] for t in tensors[1:]))
            expected = policy.select(one_by_one, tensors[0][:, :, position : position + 1], None)
        seen += piece
        assert policy.select(store, tensors[0][:, :, seen - 1 : seen], None).equal(expected)
    for kind, memory in one_by_one.memory.items():
        torch.testing.assert_close(store.memory[kind], memory)


@pytest.mark.parametrize("name", SELECTING)
def test_a_response_longer_than_announced_stays_within_the_budget(name):
    policy, tensors = kvlab.policy(name, budget=40), inputs(16, 4, 2, 300)
    store = begun(policy, tensors, 100)
    for position in range(100, 300):
        store.append(*(t[:, :, position : position + 1] for t in tensors[1:]))
        slots = policy.select(store, tensors[0][:, :, position : position + 1], None)
        read = store.positions.numel() if slots is None else int((slots >= 0).sum())
        assert read >= 4 * 10 and read + policy.overhead_bytes(store) / store.entry_bytes <= 40 * 4, f"token {position}"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), prompt=st.integers(20, 120), steps=st.integers(1, 20), page=st.integers(1, 20))
def test_quests_bound_is_above_every_logit_of_the_page(seed, prompt, steps, page):
    tensors = layer(seed, 4, 2, 8, prompt, steps, layers=1)
    store = finished(kvlab.policy("quest", budget=20, page=page), tensors, prompt)
    high, low = pages_of(store)
    size = store.numbers["page"]
    for head in range(4):
        query = tensors[0][0, head, -1]
        bounds = torch.maximum(query * low[0, head // 2], query * high[0, head // 2]).sum(-1)
        dots = store.keys[0, head // 2] @ query
        assert (dots <= bounds.repeat_interleave(size)[: len(dots)] + 1e-5).all()


def test_the_oracles_bound_is_reached_by_a_key_at_the_corner():
    query, keys = np.array([1.0, -2.0]), np.array([[3.0, -1.0], [0.0, 4.0], [3.0, -1.0]])
    assert oracles.page_bound(query, keys) == query @ keys[0] == 5.0
    assert oracles.page_bound(query, keys[1:2]) == query @ keys[1]


def test_quest_reads_whole_pages():
    result, _ = watched(kvlab.policy("quest", budget=40, page=4), inputs(9, 4, 2, 120, 30), 120)
    size = oracles.quest_page_size(150, 40, 4)
    for t in range(1, 31):
        cut = oracles.cut_into_pages(120 + t, size)
        for read in sets(result.kept(0, t)):
            assert set(read) == {p for page in cut for p in page if page[0] in read}


def read_by_loops(scores, length, size, k, cut):
    """The slots of one head's best pages."""
    read = []
    for page in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        slots = oracles.cut_into_pages(length, size)[page]
        if len(read) + len(slots) > k:
            return sorted(read + (slots[: k - len(read)] if cut or not read else []))
        read += slots
    return sorted(read)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 999),
    full=st.integers(2, 12),
    newest=st.integers(1, 6),
    size=st.integers(1, 6),
    share=st.floats(0, 1),
    values=st.sampled_from([3, 1000]),
    drawn=st.booleans(),
    cut=st.booleans(),
)
def test_pages_are_read_as_loops_say(seed, full, newest, size, share, values, drawn, cut):
    """With many equal scores and few, the newest page full and in part, and in every head's best or in some."""
    length = full * size + min(newest, size)
    k = max(1, int(share * length))
    store = LayerStore(*torch.zeros(2, 2, 3, length, 2))
    pages.begin(store, size)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, values, (2, 3, full + 1), generator=generator).float()
    scores[..., -1] += values * drawn
    slots = pages.read(store, scores, k, cut)
    expected = [[read_by_loops(head, length, size, k, cut) for head in row] for row in scores.tolist()]
    assert [sets(row) for row in slots] == expected
    assert slots.shape[-1] == max(len(read) for row in expected for read in row)
