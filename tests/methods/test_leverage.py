"""Leverage scores of keys before RoPE, against plain loops."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import generate, prompt
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.core.rotation import Rotation
from kvlab.errors import KvlabError

ROTATION = Rotation((1.0, 0.35, 0.1, 0.02, 0.004), 1.1)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("sketch", [5, 48])
def test_it_keeps_what_the_plain_loop_keeps(heads, kv_heads, sketch):
    queries, keys, values = layer(heads + kv_heads, heads, kv_heads, prompt=70)
    policy = kvlab.policy("leverage", budget=20, sketch=sketch, seed=3)
    drawn = exact(policy.drawn(2, 16))

    def turn_back(key, position):
        return oracles.turned(key, -position, ROTATION.frequencies, factor=1 / 1.1)

    def oracle(k):
        return [oracles.top_positions(head, 20) for head in oracles.leverage(k, turn_back, drawn)]

    expected = oracle(exact(keys))
    assert oracle(*shaken(exact(keys))) == expected, "the test's input has near-ties"
    kept = policy.keep(queries[None], keys[None], values[None], layer=2, n_layers=3, rotation=ROTATION)
    assert sets(kept[0]) == expected
    other = policy.replace(seed=4).keep(queries[None], keys[None], values[None], layer=2, n_layers=3, rotation=ROTATION)
    assert other.equal(kept) == (sketch >= 16), "as many columns as channels lose nothing, whatever the draw"


def test_a_key_like_no_other_stays():
    queries, keys, values = (t[None] for t in layer(1, 4, 2, prompt=60))
    keys[:, :, 40] = 0
    keys[:, :, :, 3] *= 1e-3
    keys[:, :, 17, 3] = 5
    kept = kvlab.policy("leverage", budget=3).keep(queries, keys, values, rotation=Rotation())
    assert all(17 in positions and 40 not in positions for positions in sets(kept[0]))


def test_after_an_earlier_turn_keys_are_turned_back_from_where_they_stand(tiny):
    """What is stored after the second turn is what the plain loop keeps of the entries and positions before it."""
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("leverage", budget=20)
    rotation = kvlab.capture(lm, prompt(50), 0).rotations[1]
    with kvlab.compress(lm.model, policy) as session, torch.inference_mode():
        first = generate(lm.model, prompt(50), 3)
        past = lm.model(prompt(9, 1), past_key_values=first.past_key_values).past_key_values
        store = session._cache.compressed[1].groups[0].store
        keys, positions = exact(store.keys[0]), store.positions[0].tolist()
        lm.model(prompt(1, 2), past_key_values=past)
    drawn = exact(policy.drawn(1, 16))
    for head, kept in enumerate(sets(session.kept_after_prefill(1))):
        where = positions[head]

        def turn_back(key, slot, where=where):
            return oracles.turned(key, -where[slot], rotation.frequencies)

        (scores,) = oracles.leverage(keys[head : head + 1], turn_back, drawn)
        assert kept == [where[slot] for slot in oracles.top_positions(scores, 20)]


def test_a_rotation_that_is_not_known_is_asked_for():
    tensors = [t[None] for t in layer(1, prompt=60)]
    with pytest.raises(KvlabError, match="leverage turns vectors as the model does, and how is not known here"):
        kvlab.replay(kvlab.Trace.from_tensors(*tensors, 50), kvlab.policy("leverage", budget=20))
