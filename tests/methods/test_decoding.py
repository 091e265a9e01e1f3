"""Scores applied again while decoding: against plain loops, in batches, after later turns, and for what cannot be."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import continued, generate, left_padded, prompt
from support.rescoring import by_norm, by_window
from support.stepwise import LAYERS, inputs, never_comes_back, watched
from support.tensors import exact, sets, shaken

import kvlab
from kvlab.errors import KvlabError

SCORERS = [
    (kvlab.policy("knorm", budget=1), by_norm, 0),
    (kvlab.policy("snapkv", budget=9, window=4, kernel=3), by_window(4, 3), 4),
]


@pytest.mark.parametrize("scorer, score, observed", SCORERS, ids=["knorm", "snapkv"])
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("budget, interval", [(24, 7), (24, 2), (50, 9), (12, 1)])
def test_every_pass_keeps_what_the_plain_loop_keeps(scorer, score, observed, heads, kv_heads, budget, interval):
    tensors = inputs(heads + kv_heads, heads, kv_heads, 40, 40)
    policy = kvlab.policy("decoding", budget=budget, scorer=scorer, interval=interval)
    result, _ = watched(policy, tensors, 40)
    for index in range(LAYERS):
        arrays = exact(*(t[index] for t in tensors))
        expected = oracles.oracle_decoding(*arrays, 40, budget, interval, score, observed)
        noisy = oracles.oracle_decoding(*shaken(*arrays), 40, budget, interval, score, observed)
        assert noisy == expected, "the test's input has near-ties"
        for step, (read, stored) in enumerate(expected):
            assert sets(result.kept(index, step)) == read, step
            assert sets(result.stored(index, step)) == stored, step
        never_comes_back(result, index, 40)


def test_the_prefill_is_the_scorers_and_the_cache_stays_within_the_interval():
    tensors = inputs(2, 8, 2, 90, 60)
    trace = kvlab.Trace.from_tensors(*tensors, 90)
    alone = kvlab.replay(trace, kvlab.policy("snapkv", budget=40))
    again = kvlab.replay(trace, kvlab.policy("decoding", budget=40, interval=25))
    assert again.kept(0).equal(alone.kept(0))
    assert [again.stored(0, step).shape[1] for step in (0, 24, 25, 49, 50, 60)] == [40, 64, 40, 64, 40, 50]
    assert alone.stored(0, 60).shape[1] == 100


def test_a_row_of_a_padded_batch_keeps_what_it_keeps_alone(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("decoding", budget=36, interval=5)
    rows = [prompt(60, seed=1)[0], prompt(45, seed=2)[0]]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, policy) as session:
        together = generate(lm.model, ids, 23, attention_mask=mask)
    for row, own in enumerate(rows):
        with kvlab.compress(lm.model, policy) as alone:
            found = generate(lm.model, own[None], 23)
        assert found.sequences[0, len(own) :].tolist() == together.sequences[row, 60:].tolist()
        for layer in range(2):
            assert sets(session.kept(layer, row)) == sets(alone.kept(layer))
            assert len(sets(alone.kept(layer))[0]) == 36 + 22 % 5


def test_the_first_pass_of_a_live_run_is_a_replays(tiny):
    """Until something leaves while decoding, a replay sees the very keys of the live run."""
    lm, policy = tiny("tiny-qwen3"), kvlab.policy("decoding", budget=70, interval=12)
    ids = prompt(60, seed=4)
    trace = kvlab.capture(lm, ids, new_tokens=12, policies=[policy])
    result = kvlab.replay(trace, policy)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids, 13)
    for layer in range(2):
        assert sets(session.kept(layer)) == sets(result.stored(layer, 12))
        assert len(sets(session.kept(layer))[0]) == 70


@pytest.mark.parametrize("new, stored", [(31, 33 + 2 + 41 + 30), (35, 33 + 2)])
def test_after_a_turn_stored_whole_a_pass_waits_for_its_window_of_queries(tiny, new, stored):
    model, policy = tiny().model, kvlab.policy("decoding", budget=33, interval=8)
    with kvlab.compress(model, policy, turns="leave") as session:
        first = generate(model, prompt(60), 3)
        longer = torch.cat([first.sequences, prompt(40, seed=8)], 1)
        continued(model, first.past_key_values, longer, new)
    assert [len(kept) for kept in sets(session.kept(0))] == [stored] * 2


@pytest.mark.parametrize(
    "scorer, why",
    [
        ("tova", "tova acts while decoding in a way of its own"),
        ("rocketkv", "rocketkv acts while decoding in a way of its own"),
        ("dapq", "dapq looks at pseudo-tokens behind the prompt"),
        ("kvzip", "kvzip shares its budget among layers"),
        ("adakv", "adakv shares its budget among layers or heads"),
        ("chunkkv", "chunkkv spends the budget in a way of its own"),
        ("criticalkv", "criticalkv needs the output projections"),
        ("expected_attention", "expected_attention looks at queries before RoPE"),
        ("leverage", "leverage needs the model's rotations"),
        ("random", "random is a reference and no score"),
        ("oracle_attention", "oracle_attention sees the response"),
        ("streamingllm", "streamingllm does not score tokens"),
    ],
)
def test_a_scorer_that_cannot_judge_a_response_is_refused_in_one_sentence(scorer, why):
    with pytest.raises(KvlabError, match=why) as told:
        kvlab.policy("decoding", budget=300, scorer=scorer)
    assert "\n" not in str(told.value)
