"""One trace of random tensors, replayed and run through the oracles; shared by the tests of the replay."""

from functools import lru_cache

import numpy as np

import kvlab
from support import oracles
from support.tensors import exact, layer, sets, shaken

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PROMPT, STEPS = 2, 6, 2, 16, 48, 40


@lru_cache
def tensors(seed=21):
    queries, keys, values = layer(seed, HEADS, KV_HEADS, HEAD_DIM, PROMPT, STEPS, layers=LAYERS)
    pseudo = layer(seed + 1, HEADS, KV_HEADS, HEAD_DIM, PROMPT, layers=LAYERS, n=10)[0]
    return queries, keys, values, pseudo


@lru_cache
def trace(seed=21):
    queries, keys, values, pseudo = tensors(seed)
    return kvlab.Trace.from_tensors(queries, keys, values, PROMPT, pseudo=pseudo)


def key(name, parameters):
    return name, tuple(sorted(parameters.items()))


@lru_cache
def replayed(name, parameters):
    return kvlab.replay(trace(), kvlab.policy(name, **dict(parameters)))


@lru_cache
def oracle(name, parameters, seed=21):
    """The oracle's steps for each layer; and the same sets under a little noise, so that no decision is a near-tie."""
    run = getattr(oracles, f"oracle_{name}")
    layers = []
    for arrays in zip(*exact(*tensors(seed))):
        more = dict(parameters, **(dict(pseudo=arrays[3]) if name == "dapq" else {}))
        steps = run(*arrays[:3], PROMPT, **more)
        noisy = run(*shaken(*arrays[:3]), PROMPT, **more)
        assert [s["stored"] for s in noisy] == [s["stored"] for s in steps], "the test's input has near-ties"
        layers.append(steps)
    return layers


@lru_cache
def measured_by_oracle(name, parameters, layer_index, seed=21):
    arrays = [a[layer_index] for a in exact(*tensors(seed))]
    budget = dict(parameters).get("budget", PROMPT + STEPS)
    steps = oracle(name, parameters, seed)[layer_index]
    return oracles.replay_measures(*arrays[:3], PROMPT, steps, budget)


def from_table(result, measure, layer_index, by):
    rows = result.table
    rows = rows[(rows.measure == measure) & (rows.layer == layer_index)]
    return rows.pivot(index="step", columns=by, values="value").sort_index().to_numpy(dtype=float)


def agrees_on_one_layer(heads, kv_heads, prompt, steps, name, parameters, **how):
    queries, keys, values = layer(41, heads, kv_heads, HEAD_DIM, prompt, steps, layers=1, **how)
    result = kvlab.replay(kvlab.Trace.from_tensors(queries, keys, values, prompt), kvlab.policy(name, **parameters))
    arrays = exact(queries[0], keys[0], values[0])
    expected = getattr(oracles, f"oracle_{name}")(*arrays, prompt, **parameters)
    for t in range(steps + 1):
        assert sets(result.kept(0, t)) == [list(p) for p in expected[t]["read"]], f"step {t}"
        assert sets(result.stored(0, t)) == [list(p) for p in expected[t]["stored"]], f"step {t}"
    measured = oracles.replay_measures(*arrays, prompt, expected, parameters["budget"])
    np.testing.assert_allclose(result.output_error[0].T, measured["output_error"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.mass_lost[0].T, measured["mass_lost"], atol=1e-5)
