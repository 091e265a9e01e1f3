"""Merging around a score: against a plain loop, live and in batches, and where nothing is to be merged."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import generate, left_padded, prompt
from support.stepwise import LAYERS, agrees, decided, inputs, watched
from support.tensors import sets

import kvlab
from kvlab.core.store import LayerStore


def kept_by_snapkv(queries, keys, budget):
    importance = oracles.snapkv_importance(queries[:, : keys.shape[1]], keys, 8, 5)
    return [oracles.top_positions(scores, budget) for scores in importance]


@pytest.mark.parametrize("parameters", [{}, dict(least=0.2), dict(alpha=0.5), dict(averaged="values")], ids=str)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("budget", [12, 30])
def test_around_snapkv_as_the_plain_loop(parameters, heads, kv_heads, budget):
    tensors = inputs(heads + 3 * kv_heads, heads, kv_heads, 60, 4)
    scorer = kvlab.policy("snapkv", budget=99, window=8, kernel=5)
    result, watch = watched(kvlab.policy("merging", budget=budget, scorer=scorer, **parameters), tensors, 60)

    def run(queries, keys, values):
        kept = kept_by_snapkv(queries[:, :60], keys[:, :60], budget)
        return oracles.oracle_merged_around(queries, keys, values, 60, kept, **parameters)

    for index in range(LAYERS):
        agrees(result, watch, index, decided(run, [t[index] for t in tensors]))


def test_ragged_sets_are_merged_head_by_head():
    tensors = inputs(5, 8, 2, 60, 4)
    scorer = kvlab.policy("adakv", budget=20, scorer=kvlab.policy("snapkv", budget=20, window=8, kernel=5))
    result, watch = watched(kvlab.policy("merging", budget=20, scorer=scorer), tensors, 60)
    for index in range(LAYERS):

        def run(queries, keys, values):
            importance = oracles.snapkv_importance(queries[:, :60], keys[:, :60], 8, 5)
            kept = oracles.oracle_adakv(importance, 20)
            return oracles.oracle_merged_around(queries, keys, values, 60, kept)

        agrees(result, watch, index, decided(run, [t[index] for t in tensors]))
    counts = watch.store.fusion_counts[watch.store.occupied]
    assert float(counts.sum()) == LAYERS * 2 * 64, "every token is counted once"


def test_what_nothing_is_merged_into_is_the_scorer_alone():
    trace = kvlab.Trace.from_tensors(*inputs(6, 8, 2, 60, 6), 60)
    alone = kvlab.replay(trace, kvlab.policy("knorm", budget=20))
    around = kvlab.replay(trace, kvlab.policy("merging", budget=20, scorer="knorm", least=1.0))
    assert around.kept(0).equal(alone.kept(0))
    torch.testing.assert_close(around.output_error, alone.output_error, atol=1e-5, rtol=1e-5)
    whole = kvlab.replay(trace, kvlab.policy("merging", budget=60, scorer="knorm"))
    assert float(whole.output_error.max()) < 1e-5


def test_a_row_of_a_padded_batch_is_merged_as_alone(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("merging", budget=36)
    rows = [prompt(60, seed=1)[0], prompt(45, seed=2)[0]]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, policy):
        together = generate(lm.model, ids, 12, attention_mask=mask)
    for row, own in enumerate(rows):
        with kvlab.compress(lm.model, policy) as alone:
            found = generate(lm.model, own[None], 12)
        assert found.sequences[0, len(own) :].tolist() == together.sequences[row, 60:].tolist()
        torch.testing.assert_close(found.logits[-1][0], together.logits[-1][row], atol=1e-4, rtol=0)
        result = kvlab.replay(kvlab.capture(lm, own[None], new_tokens=1, policies=[policy]), policy)
        assert all(sets(alone.kept_after_prefill(layer)) == sets(result.kept(layer)) for layer in range(2))


def test_folding_counts_entries_that_were_folded_before():
    store = LayerStore(torch.tensor([[[[1.0], [4.0], [9.0]]]]), torch.tensor([[[[2.0], [8.0], [5.0]]]]))
    store.merge(torch.tensor([[[0]]]), torch.tensor([[1]]))
    store.fold(torch.tensor([[[0, 2, 2]]]))
    store.evict(torch.tensor([[[2]]]))
    assert store.fusion_counts.tolist() == [[[3.0]]]
    assert store.keys.flatten().tolist() == pytest.approx([(2 * 2.5 + 9) / 3])
    assert store.values.flatten().tolist() == pytest.approx([(2 * 5 + 5) / 3])
    assert store.positions.tolist() == [[[2]]]
