"""Attention matching: against plain loops, by what its fit promises, live and in batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import continued, generate, left_padded, prompt
from support.stepwise import LAYERS, agrees, decided, inputs, watched
from support.tensors import exact, layer, sets

import kvlab
from kvlab.core.storage import stored_as
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.given_sets import GivenSets


def again(heads, kv_heads, m):
    """Reference queries of two layers."""
    return layer(71, heads, kv_heads, 16, m, layers=LAYERS)[0]


@pytest.mark.parametrize("parameters", [{}, dict(bound=0.5), dict(iterations=0), dict(bound=0)], ids=str)
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_bias_and_values_are_those_of_the_plain_loop(parameters, heads, kv_heads):
    tensors, asking = inputs(heads + kv_heads, heads, kv_heads, 50, 4), again(heads, kv_heads, 50)
    policy = kvlab.policy("attention_matching", budget=12, **parameters)
    result, watch = watched(policy, tensors, 50, pseudo=asking)
    for index in range(LAYERS):

        def run(queries, keys, values, index=index):
            return oracles.oracle_attention_matching(queries, keys, values, exact(asking)[index], 50, 12, **parameters)

        agrees(result, watch, index, decided(run, [t[index] for t in tensors]))


def test_reference_queries_get_the_output_of_all_keys():
    """With as many entries as equations for each value, the fit is exact."""
    tensors, asking = inputs(5, 4, 4, 40, 1), again(4, 4, 10)
    queries = torch.cat([tensors[0][:, :, :40], asking[:, :, :1]], 2)
    trace = kvlab.Trace.from_tensors(queries, tensors[1], tensors[2], 40, pseudo=asking)
    policy = kvlab.policy("attention_matching", budget=10)
    store = LayerStore(tensors[1][:, :, :40], tensors[2][:, :, :40])
    policy.compress(store, trace.prompt.seen_by(policy))
    for index in range(LAYERS):
        for head in range(4):
            for query in asking[index, head]:
                full = (tensors[1][index, head, :40] @ query / 4).softmax(0) @ tensors[2][index, head, :40]
                logits = store.keys[index, head] @ query / 4 + policy.bias(store)[index, head]
                torch.testing.assert_close(logits.softmax(0) @ store.values[index, head], full, atol=1e-4, rtol=0)


def test_it_loses_less_than_the_same_keys_with_their_own_values(tiny):
    lm, ids = tiny("tiny-llama-gqa"), prompt(80, seed=6)
    policy = kvlab.policy("attention_matching", budget=16)
    trace = kvlab.capture(lm, ids, new_tokens=16, policies=[policy])
    fitted = kvlab.replay(trace, policy)
    plain = kvlab.replay(trace, GivenSets(budget=16, sets=fitted.kept_sets))
    torch.testing.assert_close(fitted.mass_lost, plain.mass_lost, atol=1e-5, rtol=0)
    assert fitted.output_error.mean() < 0.8 * plain.output_error.mean()


def test_a_row_of_a_padded_batch_is_fitted_as_alone(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("attention_matching", budget=16)
    rows = [prompt(60, seed=1)[0], prompt(45, seed=2)[0]]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, policy) as session:
        together = generate(lm.model, ids, 12, attention_mask=mask)
    for row, own in enumerate(rows):
        with kvlab.compress(lm.model, policy) as alone:
            found = generate(lm.model, own[None], 12)
        assert found.sequences[0, len(own) :].tolist() == together.sequences[row, 60:].tolist()
        torch.testing.assert_close(found.logits[-1][0], together.logits[-1][row], atol=1e-3, rtol=0)
        result = kvlab.replay(kvlab.capture(lm, own[None], new_tokens=1, policies=[policy]), policy)
        for index in range(2):
            assert sets(alone.kept_after_prefill(index)) == sets(result.kept(index))
            assert sets(alone.kept(index)) == sets(session.kept(index, row))


def test_a_prompt_within_the_budget_is_left_as_it_is(tiny):
    lm, ids = tiny(), prompt(30, seed=7)
    policy = kvlab.policy("attention_matching", budget=30)
    trace = kvlab.capture(lm, ids, new_tokens=4, policies=[policy])
    assert float(kvlab.replay(trace, policy).output_error.max()) < 1e-5
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids, 4)
    assert session.aux_bytes == 0


def test_a_later_turn_is_fitted_no_second_time(tiny):
    model = tiny().model
    with kvlab.compress(model, kvlab.policy("attention_matching", budget=16)) as session:
        first = generate(model, prompt(60), 4)
        longer = torch.cat([first.sequences, prompt(20, seed=8)], 1)
        with pytest.raises(KvlabError, match="turns='leave'") as told:
            continued(model, first.past_key_values, longer, 4)
    assert "\n" not in str(told.value) and session is not None


def test_rewritten_values_are_held_in_the_stores_form():
    keys, values = torch.randn(2, 1, 2, 8, 16, generator=torch.Generator().manual_seed(1))
    store = LayerStore(keys, values)
    store.set_storage(stored_as("int8"))
    store.rewrite_values(2 * values)
    np.testing.assert_allclose(store.values, 2 * values, atol=0.05)
    assert store.storage.name == "int8" and store.kv_bytes < keys.nbytes
