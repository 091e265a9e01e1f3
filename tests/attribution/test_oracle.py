"""Oracles: sets that see the response, and the limit that they set to a budget."""

from __future__ import annotations

import math

import pytest
import torch
from support.live_runs import prompt
from support.oracles import gates
from support.refusals import refusal
from support.replaying import trace as replayed_trace

import kvlab
from kvlab import evaluation, tasks
from kvlab.attribution.attribute import attribute
from kvlab.attribution.oracle import oracle_attention, oracle_effect
from kvlab.core.ranking import top_positions
from kvlab.methods import Budget
from kvlab.methods._base.given_sets import GivenSets
from kvlab.workbench import listing


def test_oracle_attention_has_the_recall_that_nothing_exceeds(random_traces):
    trace = random_traces[0]
    best = kvlab.replay(trace, oracle_attention(trace, 16))
    assert best.summary["recall"] == 1
    assert best.summary["recall"] > kvlab.replay(trace, kvlab.policy("snapkv", budget=16, window=8)).summary["recall"]


@pytest.mark.parametrize("sinks, softcap", [(False, None), (True, 3.0)])
def test_oracle_attention_by_name_keeps_the_gold_set(sinks, softcap):
    """By hand: softmax over prompt and sink, summed over steps and the group; the earlier of two equal ones first."""
    draw = torch.Generator().manual_seed(3)
    queries, keys = (torch.randn(2, heads, 30, 8, generator=draw) for heads in (4, 2))
    keys[:, :, 11] = keys[:, :, 5]  # equal scores
    logits = torch.randn(2, 4, generator=draw) if sinks else None
    trace = kvlab.Trace.from_tensors(queries, keys, keys, 24, sinks=logits, softcap=softcap)
    for budget, entries in ((1, 1), (7, 7), (0.25, 6), (23, 23), (24, 24), (99, 24)):
        result = kvlab.replay(trace, kvlab.policy("oracle_attention", budget=budget))
        for layer in range(2):
            for kv_head in range(2):
                scores = [0.0] * 24
                for head in (2 * kv_head, 2 * kv_head + 1):
                    for query in queries[layer, head, 24:].double():
                        row = [float(query @ key) / 8**0.5 for key in keys[layer, kv_head, :24].double()]
                        row = row if softcap is None else [softcap * math.tanh(x / softcap) for x in row]
                        total = sum(map(math.exp, row)) + (math.exp(float(logits[layer, head])) if sinks else 0)
                        scores = [score + math.exp(x) / total for score, x in zip(scores, row, strict=True)]
                scores[11] = scores[5]
                best = sorted(range(24), key=lambda position: (-scores[position], position))[:entries]
                assert result.kept(layer)[kv_head].tolist() == sorted(best)
        assert result.summary["recall"] == 1


def test_oracles_by_name_stand_in_lists_beside_methods_and_are_none():
    trace = replayed_trace()
    found = kvlab.replay(trace, ["random", "snapkv", "oracle_attention"], budgets=[34, 40])
    assert found.summary.groupby("budget")["recall"].idxmax().tolist() == [4, 5]
    assert torch.equal(found["oracle_attention", 40].kept_sets, oracle_attention(trace, 40).sets)
    assert "oracle_attention" not in kvlab.policies()
    listed = {entry["name"]: entry for entry in listing.entries("policies")}
    assert "sees the response" in listed["oracle_attention"]["summary"]
    assert set(listed) - set(kvlab.policies()) == {"oracle_attention", "recorded"}


def test_a_scorer_wrapper_spends_an_oracle_s_budget_across_heads(tiny):
    trace = replayed_trace()
    shared = kvlab.policy("adakv", budget=20, scorer="oracle_attention", floor=0.0)
    found = kvlab.replay(trace, [shared, kvlab.policy("oracle_attention", budget=20)])
    counts = (found[0].kept_sets >= 0).sum(-1)
    assert counts.sum() == 80 and counts.min() < 20 < counts.max()
    assert "sees the response" in refusal(kvlab.compress, tiny(), shared)


def test_a_live_run_refuses_an_oracle_by_name(tiny):
    lm, oracle = tiny(), kvlab.policy("oracle_attention", budget=4)
    for run in (
        lambda: kvlab.compress(lm, oracle),
        lambda: kvlab.attribute(lm, oracle, prompt(12), 4),
        lambda: evaluation.plan(tasks.task("needle"), ["oracle_attention"], [4]),
    ):
        said = refusal(run)
        assert "sees the response" in said and "kvlab.replay" in said and "oracle_attention(trace, budget)" in said
    assert "kvlab.attribution.oracle.oracle_effect(lm" in refusal(kvlab.policy, "oracle_effect", budget=4)


def test_a_policy_that_reads_the_response_says_so():
    class Peeks(kvlab.Policy):
        name = "peeks"
        budget: Budget = 6

        def choose(self, prompt, budget):
            return top_positions(prompt.response(self).sum((1, 3))[:, None].expand(-1, prompt.kv_heads, -1), budget)

    class Says(Peeks):
        name = "says"
        sees_response = True

        def choose(self, prompt, budget):
            assert prompt.response(self).shape == (2, 6, 40, 16)
            return top_positions(prompt.keys.sum(-1), budget)

    assert "sees_response = True" in refusal(kvlab.replay, replayed_trace(), Peeks())
    assert kvlab.replay(replayed_trace(), Says()).kept(0).shape == (2, 6)


def test_random_keeps_its_sinks_and_draws_the_rest(tiny):
    trace = kvlab.capture(tiny(), prompt(40), 6, pseudo=())
    plain, first = kvlab.policy("random", budget=9), kvlab.policy("random", budget=9, sinks=3)
    for layer in range(2):
        for drawn, kept in zip(kvlab.replay(trace, plain).kept(layer), kvlab.replay(trace, first).kept(layer)):
            assert kept.tolist()[:3] == [0, 1, 2]
            rest = set(kept.tolist()[3:])
            assert len(rest) == 6 and rest <= set(drawn.tolist())  # the same draw, less its last
    while_decoding = kvlab.replay(trace, kvlab.policy("random", budget=4, sinks=3, decode=True))
    for step in range(7):
        stored = while_decoding.stored(0, step)
        assert stored.shape == (2, 4) and stored[:, :3].tolist() == [[0, 1, 2]] * 2
    assert "at least 1" in refusal(kvlab.policy, "random", budget=0)
    assert "sinks" in refusal(kvlab.policy, "random", budget=4, sinks=-1)
    assert "below the 5" in refusal(kvlab.policy, "random", budget=4, sinks=5)


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
    assert "last position 19" in refusal(kvlab.replay, trace, GivenSets(budget=8, sets=sets))


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
