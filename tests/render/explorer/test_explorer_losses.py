"""What the explorer says was lost, and where it looks first, against sums over the tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.exploring import (
    PLACE,
    attention_by_hand,
    concentrated_by_hand,
    words,
)
from support.replaying import HEADS, KV_HEADS, LAYERS, PROMPT, STEPS, tensors

import kvlab
from kvlab import Trace
from kvlab.analyses import exploring
from kvlab.render.explorer.query_view import Look, Spot


def test_a_query_loses_what_its_set_does_not_hold(trace):
    result = kvlab.replay(trace, kvlab.policy("snapkv", budget=36))
    look = Look(result, PLACE)
    weights = attention_by_hand(PLACE.layer, PLACE.head, PLACE.step)
    kept = result.kept(PLACE.layer, PLACE.step)[PLACE.head * KV_HEADS // HEADS].tolist()
    expected = [0.0 if position in kept else weight for position, weight in enumerate(weights)]
    assert torch.allclose(look.lost.double(), torch.tensor(expected), atol=1e-6)
    assert look.mass_lost == pytest.approx(sum(expected), abs=1e-5)


def test_a_head_with_a_set_of_its_own_is_shown_with_that_set(trace):
    result = kvlab.replay(trace, kvlab.policy("snapkv", budget=36, sets="head"))
    assert len(result.kept(1, 7)) == HEADS
    shown = []
    for head in range(HEADS):
        look = Look(result, Spot(1, head, 7))
        own = {p for p in result.kept(1, 7)[head].tolist() if p >= 0}
        assert set(look.read.nonzero()[:, 0].tolist()) == own
        weights = attention_by_hand(1, head, 7)
        assert look.mass_lost == pytest.approx(sum(w for p, w in enumerate(weights) if p not in own), abs=1e-5)
        shown.append(frozenset(own))
    assert shown[0] != shown[1], "two heads of one group differ here"


def test_one_kv_head_and_a_budget_beyond_the_prompt():
    queries, keys, values, _ = tensors()
    narrow = Trace.from_tensors(queries, keys[:, :1], values[:, :1], PROMPT)
    explorer = kvlab.explore(narrow, "streamingllm", "full", budgets=[16, 2 * PROMPT])
    try:
        explorer.show(budget=2 * PROMPT)
        for look in explorer.looks():
            assert look.read.all() and look.mass_lost == pytest.approx(0, abs=1e-6)
        assert "No token lost" in explorer.html() and "1 KV heads" in explorer.html()
        explorer.show(budget=16)
        assert explorer.looks()[0].mass_lost > 0.1
    finally:
        explorer.close()


@pytest.mark.parametrize(
    "policy",
    [
        dict(name="snapkv", budget=40),
        dict(name="snapkv", budget=36, sets="head"),
        dict(name="zsmerge", budget=16),
        dict(name="duoattention", budget=24),
        dict(name="exact_topk", budget=8),
        dict(name="full"),
    ],
    ids=str,
)
def test_what_is_lost_on_few_tokens_agrees_with_plain_loops(trace, policy):
    """Sets of a group and of a head, padded ones, and those that a step selects."""
    result = kvlab.replay(trace, kvlab.policy(**policy))
    by_hand = concentrated_by_hand(result)
    assert np.abs(result.concentrated_loss.numpy() - by_hand).max() < 1e-6
    assert by_hand.max() > 0.1 or policy["name"] == "full"


def test_two_tokens_say_more_than_nine_hundred():
    """Head 0 loses much, evenly over the whole text; head 1 less, on two tokens. The second is the finding."""
    prompt = 1000
    keys = torch.zeros(1, 1, prompt + 1, 4)
    keys[0, 0, [400, 700], 1] = 1.0
    keys[0, 0, -1, 2] = 1.0  # the query's own entry, which is always read
    queries = torch.zeros(1, 2, prompt + 1, 4)
    queries[0, 0, -1, 2] = 2 * np.log(600)
    queries[0, 1, -1, 1:3] = 2 * np.log(50_000) * torch.tensor([1.0, 1.0])
    explorer = kvlab.explore(Trace.from_tensors(queries, keys, keys, prompt), "streamingllm", "full", budgets=[100])
    try:
        diffuse, pointed = explorer.replay("streamingllm", 100).mass_lost[0, :, 0].tolist()
        assert diffuse == pytest.approx(900 / 1600, abs=0.01) and pointed == pytest.approx(2 / 3, abs=0.02)
        assert explorer.spot == Spot(0, 1, 1)
        # Half of the second head's attention, which is then less than the first one's, still says more.
        queries[0, 1, -1, 2] = 2 * np.log(150_000)
        weaker = kvlab.explore(Trace.from_tensors(queries, keys, keys, prompt), "streamingllm", "full", budgets=[100])
        try:
            diffuse, pointed = weaker.replay("streamingllm", 100).mass_lost[0, :, 0].tolist()
            assert pointed == pytest.approx(0.4, abs=0.02) and diffuse > pointed
            assert weaker.spot == Spot(0, 1, 1) == weaker.most_different()
            assert "2 tokens" in words(weaker.html())
        finally:
            weaker.close()
    finally:
        explorer.close()


def test_the_first_look_is_the_worst_query(explorer):
    lost = concentrated_by_hand(explorer.replay("snapkv", explorer.budget))
    place = explorer.spot
    assert (place.layer, place.head, place.step - 1) == np.unravel_index(lost.argmax(), lost.shape)
    assert explorer.budget == 40


def test_tokens_that_lose_the_most_agree_with_a_plain_sum(trace):
    result = kvlab.replay(trace, kvlab.policy("streamingllm", budget=12))
    lost = np.zeros(PROMPT + STEPS)
    for layer in range(LAYERS):
        for head in range(HEADS):
            for step in range(1, STEPS + 1):
                kept = set(result.kept(layer, step)[head * KV_HEADS // HEADS].tolist())
                for position, weight in enumerate(attention_by_hand(layer, head, step)):
                    lost[position] += weight * (position not in kept)
    lost /= LAYERS * HEADS * STEPS
    table = exploring.tokens_lost(trace, [result], [str(p) for p in range(trace.length)], limit=5)
    assert table["position"].tolist() == np.argsort(-lost)[:5].tolist()
    assert table["share"].tolist() == pytest.approx(sorted(lost)[::-1][:5], abs=1e-5)
