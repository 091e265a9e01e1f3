"""Compactor: leverage of keys before RoPE and attention without a causal mask, against plain loops."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.core.rotation import Rotation
from kvlab.errors import KvlabError

ROTATION = Rotation((1.0, 0.35, 0.1, 0.02, 0.004), 1.1)


def turn_back(key, position):
    return oracles.turned(key, -position, ROTATION.frequencies, factor=1 / 1.1)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "how",
    [{}, dict(chunk=13, blend=2.0), dict(chunk=1, sinks=0, recent=0), dict(blend=0.0, chunk=29, sinks=3)],
    ids=str,
)
def test_it_keeps_what_the_plain_loop_keeps(heads, kv_heads, how):
    queries, keys, values = layer(heads + kv_heads, heads, kv_heads, prompt=70, n=70)
    policy = kvlab.policy("compactor", budget=20, sketch=9, seed=3, **how)
    drawn = exact(policy.drawn(2, 16))

    def oracle(q, k, v):
        return [oracles.top_positions(head, 20) for head in oracles.compactor(q, k, v, turn_back, drawn, **how)]

    expected = oracle(*exact(queries, keys, values))
    assert oracle(*shaken(*exact(queries, keys, values))) == expected, "the test's input has near-ties"
    kept = policy.keep(queries[None], keys[None], values[None], layer=2, n_layers=3, rotation=ROTATION)
    assert sets(kept[0]) == expected


def test_a_token_that_only_earlier_ones_would_attend_to_stays():
    """No query at or after the token looks at it; those before it in its chunk do, and a causal mask would hide it."""
    queries, keys, values = (t[None] for t in layer(1, 2, 1, prompt=64, n=64))
    values = torch.ones_like(values)
    keys[:, :, 30] = 0
    keys[:, :, 30, 0] = 4
    queries[..., 0] = -4
    queries[:, :, :30, 0] = 4
    policy = kvlab.policy("compactor", budget=8, sinks=0, recent=0, blend=0)
    assert 30 in policy.keep(queries, keys, values, rotation=Rotation())[0, 0].tolist()
    assert 30 not in policy.replace(chunk=2).keep(queries, keys, values, rotation=Rotation())[0, 0].tolist()


def test_it_needs_every_query_of_the_prompt():
    queries, keys, values = (t[None] for t in layer(1, prompt=60, n=32))
    with pytest.raises(KvlabError, match="compactor looks at the last 60 prompt queries and got 32"):
        kvlab.policy("compactor", budget=20).keep(queries, keys, values, rotation=Rotation())
