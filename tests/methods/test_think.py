"""ThinK: which channels of the keys go, what a step then puts out, and the bytes that this saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import generate, left_padded, prompt
from support.stepwise import LAYERS, inputs, watched
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.errors import KvlabError

LENGTH, STEPS, WINDOW = 60, 6, 8


def snapkv(budget=24):
    return kvlab.policy("snapkv", budget=budget, window=6, kernel=3)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("ratio", [0.4, 0.0, 0.9])
@pytest.mark.parametrize("scorer", [None, snapkv()], ids=["alone", "snapkv"])
def test_steps_attend_to_keys_without_the_channels_that_the_plain_loop_drops(heads, kv_heads, ratio, scorer):
    tensors = inputs(heads + kv_heads, heads, kv_heads, LENGTH, STEPS)
    policy = kvlab.policy("think", ratio=ratio, window=WINDOW, scorer=scorer)
    result, watch = watched(policy, tensors, LENGTH)
    for index in range(LAYERS):
        arrays = exact(*(t[index] for t in tensors))
        queries, keys, values = arrays
        gone = oracles.think_channels(queries, keys, LENGTH, WINDOW, ratio)
        assert oracles.think_channels(*shaken(queries, keys), LENGTH, WINDOW, ratio) == gone, "near-ties"
        assert all(len(channels) == int(16 * ratio) for channels in gone)
        kept = sets(result.kept(index))
        assert kept == (
            [list(range(LENGTH))] * kv_heads if scorer is None else sets(scorer_sets(scorer, tensors, index))
        )
        thin = keys.copy()
        for group, channels in enumerate(gone):
            thin[group, : LENGTH - WINDOW, channels] = 0
        for step in range(STEPS):
            for head in range(heads):
                group = head * kv_heads // heads
                positions = [*kept[group], *range(LENGTH, LENGTH + step + 1)]
                weights = oracles.attention_weights(queries[head, LENGTH + step], thin[group, positions])
                expected = weights @ values[group, positions]
                np.testing.assert_allclose(watch.outputs[step][index, head], expected, atol=2e-5)
    if ratio and scorer is None:
        assert result.summary["mass_lost"] == pytest.approx(0, abs=1e-6) and result.summary["output_error"] > 0.01


def scorer_sets(scorer, tensors, index):
    queries, keys, values = (t[index : index + 1, :, :LENGTH] for t in tensors)
    return scorer.keep(queries, keys, values)[0]


@pytest.mark.parametrize("scorer", [None, snapkv()], ids=["alone", "snapkv"])
def test_bytes_are_those_of_the_numbers_that_are_left(tiny, scorer):
    """6 of 16 channels of each key, but for the last 8 of the prompt and those generated; and a mask for each head."""
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("think", window=WINDOW, scorer=scorer)
    replay = kvlab.replay(kvlab.capture(lm, prompt(LENGTH), STEPS), policy)
    heads, stored = 2 * 2, 24 if scorer else LENGTH
    older = sum(p < LENGTH - WINDOW for layer in range(2) for kept in sets(replay.kept(layer)) for p in kept)
    mask = heads * 16
    for step in range(1, STEPS + 1):
        expected = heads * (stored + step) * 2 * 16 * 4 - older * 6 * 4 + mask
        assert replay.stored_bytes[step - 1] == replay.read_bytes[step - 1] == expected
    with kvlab.compress(lm.model, policy, probes=["bytes"]) as session:
        generate(lm.model, prompt(LENGTH), STEPS + 1)
    assert session.kv_bytes + session.aux_bytes == session.read_bytes == replay.stored_bytes[-1]
    assert session.layers["bytes"].sum() == replay.stored_bytes[-1]
    table = session.table.query("measure == 'stored_bytes' and step == @STEPS")
    assert table["value"].sum() == replay.stored_bytes[-1]


@pytest.mark.parametrize("family", ["tiny-qwen3", "hybrid-gemma2"])
def test_replay_and_live_run_attend_to_the_same_keys(tiny, family):
    lm, policy = tiny(family), kvlab.policy("think", window=WINDOW, scorer=snapkv(30))
    ids, mask = left_padded(prompt(50, seed=1)[0], prompt(LENGTH, seed=2)[0])
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids, 2, attention_mask=mask)
    for row, alone in enumerate((prompt(50, seed=1), prompt(LENGTH, seed=2))):
        trace = kvlab.capture(lm, alone, 1)
        replay = kvlab.replay(trace, policy)
        for place, number in enumerate(trace.layers):
            assert sets(session.kept_after_prefill(number, row)) == sets(replay.kept(number))
            group = next(g for g in session._cache.compressed[place].groups if row in g.numbers(2))
            thin, store = policy.pruned(trace.prompt)[place], group.store
            assert store.memory["channels"][0].equal(thin)
            older = store.positions[0] < alone.shape[1] - WINDOW
            for head in range(2):
                assert not store.keys[0, head][older[head]][:, thin[head]].any()
                assert store.keys[0, head][~older[head]].all()


def test_what_the_model_made_is_not_written_to(tiny):
    trace = kvlab.capture(tiny("tiny-llama-gqa"), prompt(LENGTH), 2)
    before = trace.keys.clone()
    kvlab.replay(trace, kvlab.policy("think", window=WINDOW))
    assert trace.keys.equal(before)


def test_a_prompt_within_the_window_is_left_as_it_is(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("think")
    plain = generate(lm.model, prompt(30), 5)
    with kvlab.compress(lm.model, policy) as session:
        assert generate(lm.model, prompt(30), 5).sequences.equal(plain.sequences)
    assert session.kv_bytes == 34 * 2 * 2 * 2 * 16 * 4 and session.aux_bytes == 0


def test_a_second_turn_drops_channels_of_what_is_stored_by_then(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("think", window=WINDOW)
    for turns, whole in (("recompress", WINDOW + 1), ("leave", WINDOW + 2 + 10 + 1)):
        with kvlab.compress(lm.model, policy, turns=turns) as session:
            first = generate(lm.model, prompt(50), 3)
            longer = torch.cat([first.sequences, prompt(9, 1)], 1)
            generate(lm.model, longer, 2, past_key_values=first.past_key_values)
        keys = session._cache.compressed[0].groups[0].store.keys
        assert int((keys[0, 0] != 0).all(-1).sum()) == whole


def test_what_it_cannot_be_put_around_is_refused():
    for scorer, why in [
        ("snapkv", r"scorer='snapkv' has no budget; give a policy, such as kvlab.policy\('snapkv', budget=256\)"),
        (kvlab.policy("h2o", budget=30), "think needs an inner policy that only chooses .*, not h2o"),
        (kvlab.policy("kvzip", budget=30), "think needs an inner policy that only chooses .*, not kvzip"),
        (
            kvlab.policy("snapkv", budget=40, sets="head"),
            "think needs an inner policy that only chooses .*, not snapkv",
        ),
    ]:
        with pytest.raises(KvlabError, match=why) as told:
            kvlab.policy("think", scorer=scorer)
        assert "\n" not in str(told.value)
    with pytest.raises(KvlabError, match="think does not score tokens"):
        kvlab.policy("adakv", budget=40, scorer="think")
    assert (
        kvlab.policy("think", scorer=kvlab.policy("adakv", budget=40))
        .keep(*(t[None] for t in layer(1, prompt=60)))
        .shape[1]
        == 2
    )
