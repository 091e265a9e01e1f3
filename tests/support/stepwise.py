"""Replays of two layers at once, watched at every step and held against the oracles; shared by the tests of policies
that evict or select while they decode."""

from __future__ import annotations

import numpy as np
import torch

import kvlab
from kvlab.core.store import LayerStore
from kvlab.instruments.probes import Probe
from kvlab.methods import Prompt
from support.tensors import exact, layer, sets, shaken

LAYERS, HEAD_DIM = 2, 16
SELECTING = ["quest", "sparq", "hybrid", "rocketkv"]


def inputs(seed, heads, kv_heads, prompt, steps=0):
    """Queries, keys and values of two layers, float32."""
    return layer(seed, heads, kv_heads, HEAD_DIM, prompt, steps, layers=LAYERS)


def begun(policy, tensors, prompt, max_new_tokens=0, **more):
    """A store of the first `prompt` tokens, compressed; more: as `Prompt` takes it."""
    queries, keys, values = (t[:, :, :prompt] for t in tensors)
    store = LayerStore(keys.clone(), values.clone())
    store.layers = (0, 1)
    policy.compress(store, Prompt(queries, keys, values, store.layers, 2, max_new_tokens=max_new_tokens, **more))
    return store


class Watch(Probe):
    """Keeps each step's attention output [layers, heads, d], what finding loads (bytes), and the store itself."""

    name = "watch"

    def __init__(self):
        self.outputs, self.overhead, self.entry_bytes, self.store = [], [], 0, None

    def look(self, seen, records, where):
        self.outputs.append(seen.step.output[:, :, 0].clone())
        self.overhead.append(seen.policy.overhead_bytes(seen.store))
        self.entry_bytes, self.store = seen.store.entry_bytes, seen.store


def watched(policy, tensors, prompt, **more):
    """A replay of the tensors and the probe that watched it."""
    watch = Watch()
    trace = kvlab.Trace.from_tensors(*tensors, prompt, **more)
    return kvlab.replay(trace, policy, probes=[watch]), watch


def decided(run, tensors, size=1e-5):
    """The oracle's steps; the same under a little noise, so that no decision is a near-tie that float32 could turn."""
    arrays = exact(*tensors)
    steps, noisy = run(*arrays), run(*shaken(*arrays, size=size))
    assert [(s["read"], s["stored"]) for s in noisy] == [(s["read"], s["stored"]) for s in steps], (
        "the test's input has near-ties"
    )
    return steps


def agrees(result, watch, index, expected):
    """The replay's layer `index` did at every step what the oracle's steps say."""
    for t, step in enumerate(expected):
        assert sets(result.kept(index, t)) == [list(p) for p in step["read"]], f"read at layer {index} step {t}"
        assert sets(result.stored(index, t)) == [list(p) for p in step["stored"]], f"stored after step {t}"
        if t:
            np.testing.assert_allclose(watch.outputs[t - 1][index], step["output"], atol=2e-5, err_msg=f"step {t}")


def never_comes_back(result, index, steps):
    """What is stored after a step was stored before it, or is the step's own entry."""
    prompt = result.trace.prompt_length
    for t in range(1, steps + 1):
        for old, new in zip(sets(result.stored(index, t - 1)), sets(result.stored(index, t)), strict=True):
            assert set(new) <= set(old) | {prompt + t - 1}, f"step {t}"


def tensor(array):
    return torch.from_numpy(np.asarray(array)).float()
