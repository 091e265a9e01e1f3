"""Replays of several layers whose needs differ, and the sets of the oracles; shared by the tests of layer budgets."""

from __future__ import annotations

import torch

import kvlab
from support import oracles
from support.tensors import exact, layer, sets, shaken

SMALL = dict(window=8, kernel=5)
SHARES = ("pyramidkv", "zigzagkv", "dynamickv", "cake")


def model(seed, heads=8, kv_heads=2, prompt=60, layers=4, new=0, n=None):
    """Tensors of several layers whose attention is ever sharper, so that what they need differs."""
    queries, keys, values = layer(seed, heads, kv_heads, prompt=prompt, layers=layers, new=new, n=n)
    return queries * torch.linspace(0.3, 2, layers)[:, None, None, None], keys, values


def replayed(tensors, prompt, name, **parameters):
    return kvlab.replay(kvlab.Trace.from_tensors(*tensors, prompt), kvlab.policy(name, **parameters))


def kept_sets(result, step=0):
    return [sets(result.kept(index, step)) for index in range(result.trace.n_layers)]


def decided(name, tensors, prompt, **parameters):
    """The oracle's sets, [layer][kv_head]; the input must decide clearly, so the same with a little noise."""
    oracle, arrays = getattr(oracles, f"oracle_{name}"), exact(*tensors)
    kept = oracle(*arrays, prompt, **parameters)
    assert oracle(*shaken(*arrays), prompt, **parameters) == kept, "the test's input has near-ties"
    return kept
