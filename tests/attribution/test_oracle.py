"""Oracles: sets that see the response, and the limit that they set to a budget."""

from __future__ import annotations

import pytest
import torch
from support.live_runs import prompt
from support.oracles import gates
from support.refusals import refusal

import kvlab
from kvlab.attribution.attribute import attribute
from kvlab.attribution.oracle import oracle_attention, oracle_effect
from kvlab.methods._base.given_sets import GivenSets


def test_oracle_attention_has_the_recall_that_nothing_exceeds(random_traces):
    trace = random_traces[0]
    best = kvlab.replay(trace, oracle_attention(trace, 16))
    assert best.summary["recall"] == 1
    assert best.summary["recall"] > kvlab.replay(trace, kvlab.policy("snapkv", budget=16, window=8)).summary["recall"]


def test_given_sets_are_kept_as_they_are_in_a_replay_and_live(tiny):
    lm, ids = tiny(), prompt(40)
    sets = torch.stack([torch.randperm(40)[:9].sort().values for _ in range(4)]).view(2, 2, 9)
    policy = GivenSets(budget=9, sets=sets)
    replayed = kvlab.replay(kvlab.capture(lm, ids, 3, pseudo=()), policy)
    with torch.inference_mode(), kvlab.compress(lm, policy) as session:
        lm.model(ids.view(1, -1), use_cache=True)
        session.end_prompt()
        for layer in range(2):
            assert torch.equal(session.kept_after_prefill(layer), sets[layer])
            assert torch.equal(replayed.kept(layer, 0), sets[layer])
    assert str(policy) != str(GivenSets(budget=9, sets=sets.flip(0)))


def test_given_sets_of_another_prompt_are_refused(tiny):
    sets = torch.arange(20).expand(2, 2, -1)
    trace = kvlab.capture(tiny(), prompt(12), 2, pseudo=())
    assert kvlab.replay(trace, GivenSets(budget=20, sets=sets)).summary["recall"] == 1
    assert "reach position 19" in refusal(kvlab.replay, trace, GivenSets(budget=8, sets=sets))


def test_oracle_effect_loses_no_more_than_what_it_was_made_from(tiny):
    lm, ids = gates.sharpened(tiny()), prompt(48)
    limit = oracle_effect(lm, ids, 12, 8)
    assert limit.loss == pytest.approx(limit.rounds.loss.min())
    assert limit.policy.sets.shape == (2, 2, 12)
    # Its own loss is what an attribution of its sets, and so a live run, measures.
    response = kvlab.attribute(lm, kvlab.policy("full"), ids, 8).response
    measured = attribute(lm, limit.policy, ids, response=response).summary
    assert measured["loss_policy"] == pytest.approx(limit.loss, abs=1e-3)
    assert measured["loss_full"] == pytest.approx(limit.full_loss, abs=1e-3)
    snapkv = attribute(lm, kvlab.policy("snapkv", budget=12, window=4), ids, response=response).summary
    assert limit.loss < snapkv["loss_policy"]


def test_no_other_sets_lose_less_than_oracle_effect(tiny):
    """Of those of thirty random draws, of the gold sets and of the policies that score: it is a limit to them."""
    lm, ids = gates.sharpened(tiny()), prompt(48)
    limit = oracle_effect(lm, ids, 12, 8)
    response = kvlab.attribute(lm, kvlab.policy("full"), ids, 8).response
    rivals = [kvlab.policy("random", budget=12, seed=seed) for seed in range(30)]
    rivals += [oracle_attention(kvlab.capture(lm, ids, response=response[:-1], pseudo=()), 12)]
    rivals += [kvlab.policy(name, budget=12) for name in ("knorm", "keydiff", "tova", "kvzip", "expected_attention")][
        :4
    ]
    losses = [attribute(lm, rival, ids, response=response, points=1).summary["loss_policy"] for rival in rivals]
    assert limit.loss < min(losses)


def test_an_oracle_without_a_response_is_refused(tiny):
    trace = kvlab.capture(tiny(), prompt(12), 0, pseudo=())
    assert "sees the response" in refusal(oracle_attention, trace, 4)
    assert "two tokens" in refusal(oracle_effect, tiny(), prompt(12), 4, 1)
