"""No fixed budget: entries below a threshold leave after a window. Against plain loops, in batches, and in tables."""

from __future__ import annotations

import math

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import generate, left_padded, prompt
from support.rescoring import by_norm, by_window
from support.stepwise import LAYERS, inputs, never_comes_back, watched
from support.tensors import exact, sets, shaken

import kvlab
from kvlab.errors import KvlabError

SCORERS = [
    (kvlab.policy("knorm", budget=1), by_norm, 0, -4.0),
    (kvlab.policy("snapkv", budget=9, window=4, kernel=3), by_window(4, 3), 4, 0.07),
]


@pytest.mark.parametrize("scorer, score, observed, at", SCORERS, ids=["knorm", "snapkv"])
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("window, interval", [(4, 1), (10, 7), (30, 5), (50, 3)])
def test_every_pass_keeps_what_the_plain_loop_keeps(scorer, score, observed, at, heads, kv_heads, window, interval):
    tensors = inputs(heads + 2 * kv_heads, heads, kv_heads, 40, 36)
    at = at * heads / kv_heads if observed else at  # the group's attention is summed
    policy = kvlab.policy("threshold", at=at, scorer=scorer, window=window, interval=interval)
    result, _ = watched(policy, tensors, 40)
    for index in range(LAYERS):
        arrays = exact(*(t[index] for t in tensors))
        expected = oracles.oracle_threshold(*arrays, 40, at, window, interval, score, observed)
        noisy = oracles.oracle_threshold(*shaken(*arrays), 40, at, window, interval, score, observed)
        assert noisy == expected, "the test's input has near-ties"
        assert window == 50 or any(len(kept) < 40 for kept in expected[0][1])
        for step, (read, stored) in enumerate(expected):
            assert sets(result.kept(index, step)) == read, step
            assert sets(result.stored(index, step)) == stored, step
        never_comes_back(result, index, 36)


def test_heads_come_to_different_numbers_and_the_bytes_say_it():
    trace = kvlab.Trace.from_tensors(*inputs(3, 8, 2, 60, 20), 60)
    policy = kvlab.policy("threshold", at=-4.0, scorer="knorm", window=8, interval=4)
    result = kvlab.replay(trace, policy)
    counts = [[len(kept) for kept in sets(result.stored(layer, 20))] for layer in range(LAYERS)]
    assert len({n for layer in counts for n in layer}) > 1
    assert result.stored_bytes[-1] == sum(map(sum, counts)) * 2 * 16 * 4
    after_prefill = [len(kept) for layer in range(LAYERS) for kept in sets(result.kept(layer))]
    assert result.entries == pytest.approx(sum(after_prefill) / 4) and max(after_prefill) < 60


def test_the_lowest_threshold_is_the_full_cache_and_the_highest_a_window():
    trace = kvlab.Trace.from_tensors(*inputs(4, 8, 2, 60, 20), 60)
    whole, window = (
        kvlab.replay(trace, kvlab.policy("threshold", at=at, scorer="knorm", window=8, interval=4))
        for at in (-math.inf, 1e9)
    )
    full = kvlab.replay(trace, "full")
    torch.testing.assert_close(whole.mass_lost, full.mass_lost, atol=1e-6, rtol=0)
    assert whole.stored_bytes.equal(full.stored_bytes)
    assert sets(window.stored(0, 20)) == [list(range(72, 80))] * 2


def test_a_table_has_it_without_a_budget_beside_others_at_equal_bytes():
    trace = kvlab.Trace.from_tensors(*inputs(5, 8, 2, 60, 20), 60)
    policy = kvlab.policy("threshold", at=-4.0, scorer="knorm", window=8, interval=4)
    table = kvlab.replay(trace, [policy, "knorm", "full"], budgets=[20, 30]).summary
    assert [math.isnan(budget) for budget in table["budget"]] == [True, False, False, True]
    assert table["stored_bytes"].iloc[0] < table["stored_bytes"].iloc[3]


def test_a_row_of_a_padded_batch_keeps_what_it_keeps_alone(tiny):
    lm = tiny("tiny-llama-gqa")
    scorer = kvlab.policy("snapkv", budget=9, window=8, kernel=3)
    policy = kvlab.policy("threshold", at=0.3, scorer=scorer, window=16, interval=5)
    rows = [prompt(60, seed=1)[0], prompt(45, seed=2)[0]]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, policy) as session:
        together = generate(lm.model, ids, 23, attention_mask=mask)
    for row, own in enumerate(rows):
        with kvlab.compress(lm.model, policy) as alone:
            found = generate(lm.model, own[None], 23)
        assert found.sequences[0, len(own) :].tolist() == together.sequences[row, 60:].tolist()
        trace = kvlab.capture(lm, own[None], new_tokens=1, policies=[policy])
        prefill = kvlab.replay(trace, policy)
        for layer in range(2):
            assert sets(session.kept(layer, row)) == sets(alone.kept(layer))
            assert sets(alone.kept_after_prefill(layer)) == sets(prefill.kept(layer))
            assert all(16 <= len(kept) < len(own) for kept in sets(alone.kept(layer)))


@pytest.mark.parametrize(
    "parameters, why",
    [
        (dict(scorer="tova"), "threshold: tova acts while decoding"),
        (dict(window=31), "window 31 is below the 32 tokens whose queries snapkv looks at"),
        (dict(budget=40), "budget"),
        (dict(at="high"), "'at'"),
    ],
)
def test_what_it_cannot_work_with_is_refused_in_one_sentence(parameters, why):
    with pytest.raises(KvlabError, match=why) as told:
        kvlab.policy("threshold", **parameters)
    assert "\n" not in str(told.value)
