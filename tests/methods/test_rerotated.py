"""Positions without gaps: against a plain loop, against the model's own keys, and in batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import continued, generate, left_padded, prompt
from support.stepwise import HEAD_DIM, LAYERS, inputs, watched
from support.tensors import exact, sets

import kvlab
from kvlab.core.rotation import Rotation
from kvlab.errors import KvlabError

FREQUENCIES = tuple(100.0 ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2))


@pytest.mark.parametrize("scorer", ["knorm", "adakv"])
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_keys_and_outputs_are_those_of_the_plain_loop(scorer, heads, kv_heads):
    """adakv leaves heads with different numbers of entries, which begin at different positions."""
    tensors = inputs(heads + kv_heads, heads, kv_heads, 60, 3)
    around = dict(scorer="knorm") if scorer == "adakv" else {}
    policy = kvlab.policy("rerotated", budget=17, scorer=kvlab.policy(scorer, budget=17, **around))
    result, watch = watched(policy, tensors, 60, rotations=[Rotation(FREQUENCIES)] * LAYERS)
    alone = kvlab.replay(kvlab.Trace.from_tensors(*tensors, 60), policy.scorer)
    for index in range(LAYERS):
        queries, keys, values = exact(*(t[index] for t in tensors))
        kept = sets(result.kept(index))
        assert kept == sets(alone.kept(index))
        turned = oracles.oracle_rerotated(keys[:, :60], kept, FREQUENCIES)
        for head in range(heads):
            group = head * kv_heads // heads
            for step in range(1, 4):
                past = np.concatenate([turned[group], keys[group, 60 : 60 + step]])
                read = np.concatenate([values[group, kept[group]], values[group, 60 : 60 + step]])
                weights = oracles.attention_weights(queries[head, 59 + step], past)
                found = watch.outputs[step - 1][index, head]
                np.testing.assert_allclose(found, oracles.attention_output(weights, read), atol=2e-5)


def test_the_first_layer_is_as_if_the_model_had_read_the_kept_tokens_alone(tiny):
    """TOVA keeps one set for a layer. Keys of the first layer depend on tokens and positions alone."""
    lm, ids = tiny("tiny-llama-gqa"), prompt(60, seed=3)
    policy = kvlab.policy("rerotated", budget=20, scorer="tova")
    trace = kvlab.capture(lm, ids, new_tokens=1, policies=[policy])
    with kvlab.compress(lm.model, policy) as session:
        lm.model(ids)
        session.end_prompt()
    kept = session.kept(0)[0]
    store, rotation = session._cache.compressed[0].groups[0].store, trace.rotations[0]
    assert store.positions[0, 0].tolist() == kept.tolist() and len(kept) == 20, "entries keep their own names"
    shorter = kvlab.capture(lm, ids[:, kept], new_tokens=1, pseudo=()).keys[0, :, :20]
    moved = rotation.turned(rotation.turned_back(shorter, torch.arange(20)), torch.arange(40, 60))
    torch.testing.assert_close(store.keys[0], moved, atol=1e-5, rtol=1e-5)
    assert (store.keys[0] - trace.keys[0][:, kept]).abs().max() > 0.1


def test_a_row_of_a_padded_batch_is_turned_as_alone(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("rerotated", budget=36)
    rows = [prompt(60, seed=1)[0], prompt(45, seed=2)[0]]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, policy):
        together = generate(lm.model, ids, 12, attention_mask=mask)
    for row, own in enumerate(rows):
        with kvlab.compress(lm.model, policy):
            alone = generate(lm.model, own[None], 12)
        assert alone.sequences[0, len(own) :].tolist() == together.sequences[row, 60:].tolist()
        torch.testing.assert_close(alone.logits[-1][0], together.logits[-1][row], atol=1e-4, rtol=0)


def test_a_prompt_within_the_budget_and_one_without_gaps_are_left_as_they_are():
    tensors = inputs(7, 8, 2, 40, 3)
    trace = kvlab.Trace.from_tensors(*tensors, 40, rotations=[Rotation(FREQUENCIES)] * LAYERS)
    whole = kvlab.replay(trace, kvlab.policy("rerotated", budget=40, scorer="knorm"))
    assert float(whole.output_error.max()) < 1e-5


def test_a_later_turn_that_would_be_moved_again_is_refused_in_one_sentence(tiny):
    model = tiny().model
    with kvlab.compress(model, kvlab.policy("rerotated", budget=36), turns="recompress") as session:
        first = generate(model, prompt(60), 4)
        longer = torch.cat([first.sequences, prompt(20, seed=8)], 1)
        with pytest.raises(KvlabError, match="turns='leave'") as told:
            continued(model, first.past_key_values, longer, 4)
    assert "\n" not in str(told.value) and session is not None
