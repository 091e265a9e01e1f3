"""CurDKV: the leverage of keys and values, against plain loops."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.tensors import exact, layer, sets, shaken

import kvlab

HOW = [
    {},
    dict(leverage="key"),
    dict(leverage="value", sinks=0),
    dict(leverage="mean", local=7),
    dict(local=None),
    dict(project=True, seed=3),
]


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_it_keeps_what_the_plain_loop_keeps(heads, kv_heads, how):
    queries, keys, values = layer(heads + kv_heads, heads, kv_heads, prompt=70)
    policy = kvlab.policy("curdkv", budget=20, **how)
    drawn = exact(policy.drawn(2, 16)) if policy.project else None

    def oracle(k, v):
        return oracles.oracle_curdkv(k, v, 20, policy.sinks, policy.leverage, policy.local, drawn)

    expected = oracle(*exact(keys, values))
    assert oracle(*shaken(*exact(keys, values))) == expected, "the test's input has near-ties"
    kept = policy.keep(queries[None], keys[None], values[None], layer=2, n_layers=3)
    assert sets(kept[0]) == expected


def test_a_value_counts_as_much_as_a_key():
    """Of tokens alike, one has a long value and one a long key; a token with both long comes first."""
    keys, values = torch.ones(1, 1, 48, 4), torch.ones(1, 1, 48, 4)
    values[:, :, 20] *= 2
    keys[:, :, 36] *= 2
    kept = [kvlab.policy("curdkv", budget=n, sinks=0).keep(keys, keys, values)[0, 0].tolist() for n in (1, 2)]
    assert kept == [[20], [20, 36]]
    keys[:, :, 40], values[:, :, 40] = 2, 2
    assert kvlab.policy("curdkv", budget=1, sinks=0).keep(keys, keys, values)[0, 0].tolist() == [40]


def test_a_block_of_zeros_loses_to_all_others():
    queries, keys, values = (t[None] for t in layer(1, 4, 2, prompt=64))
    values[:, :, 16:32] = 0
    kept = kvlab.policy("curdkv", budget=48, sinks=0).keep(queries, keys, values)
    assert sets(kept[0]) == [[*range(16), *range(32, 64)]] * 2
