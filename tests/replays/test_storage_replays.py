"""Replays in every storage: against plain loops, step by step, and many steps at once against one at a time."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from support import oracles
from support.stepwise import Watch
from support.tensors import exact, layer, sets

import kvlab
from kvlab.core.storage import keys_and_values, kivi
from kvlab.core.turbo import codebook
from kvlab.errors import KvlabError

LAYERS, HEADS, KV_HEADS, DIM, PROMPT, STEPS = 2, 4, 2, 32, 70, 60
SMALL = dict(group=8, residual=20)
FORMS = {
    "fp8": ("fp8", oracles.Fp8),
    "int8": ("int8", oracles.Int8),
    "kivi-4": (kivi(4, **SMALL), lambda: oracles.Kivi(4, **SMALL)),
    "kivi-2": (kivi(2, **SMALL), lambda: oracles.Kivi(2, **SMALL)),
    "nvfp4": ("nvfp4", oracles.Nvfp4),
    "turbo-3": ("turbo-3", lambda: oracles.Turbo(codebook(3, DIM), DIM)),
    "turbo-4/kivi-2": (
        keys_and_values("turbo-4", kivi(2, **SMALL)),
        lambda: oracles.Pair(oracles.Turbo(codebook(4, DIM), DIM), oracles.Kivi(2, **SMALL)),
    ),
}
FURTHEST = {"as_is": 0, "kivi-2": 1.5, "nvfp4": 0.6, "turbo-3": 1.5, "turbo-4/kivi-2": 0.8}
"""How far a key that is read may be from the one that came; 0.4 for other forms."""
POLICIES = {
    "full": {},
    "streamingllm": dict(budget=48),
    "snapkv": dict(budget=48, window=8, kernel=3),
    "morphkv": dict(budget=40, window=8),
}


@pytest.fixture(scope="module")
def tensors():
    return layer(5, HEADS, KV_HEADS, DIM, PROMPT, STEPS, layers=LAYERS)


@pytest.fixture(scope="module")
def trace(tensors):
    return kvlab.Trace.from_tensors(*tensors, PROMPT)


def made(name, **more):
    return kvlab.policy(name, **POLICIES[name], **more)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_step_is_what_the_plain_loops_say(trace, tensors, name, form):
    storage, oracle = FORMS[form]
    watch = Watch()
    stepwise = kvlab.replay(trace, made(name), probes=[watch], storage=storage)
    at_once = kvlab.replay(trace, made(name), storage=storage)
    sizes = np.zeros(STEPS)
    for index in range(LAYERS):
        with oracles.storing(oracle):
            run = getattr(oracles, f"oracle_{name}")
            steps = run(*exact(*(x[index] for x in tensors)), PROMPT, **POLICIES[name])
        for t, step in enumerate(steps):
            for result in (stepwise, at_once):
                assert sets(result.kept(index, t)) == [list(p) for p in step["read"]], f"read at step {t}"
                assert sets(result.stored(index, t)) == [list(p) for p in step["stored"]], f"stored after step {t}"
            if t:
                np.testing.assert_allclose(watch.outputs[t - 1][index], step["output"], atol=3e-5, err_msg=f"step {t}")
                sizes[t - 1] += step["bytes"]
        expected = oracles.replay_measures(*exact(*(x[index] for x in tensors)), PROMPT, steps, 48)
        for result in (stepwise, at_once):
            np.testing.assert_allclose(result.output_error[index].T, expected["output_error"], rtol=2e-4, atol=1e-5)
            np.testing.assert_allclose(result.mass_lost[index].T, expected["mass_lost"], atol=1e-5)
    # MorphKV's profiles, float32 [budget, window] for each head, are its own.
    beside = 40 * 8 * 4 * LAYERS * KV_HEADS if name == "morphkv" else 0
    for result in (stepwise, at_once):
        np.testing.assert_allclose(result.stored_bytes, sizes + beside)


@pytest.mark.parametrize("form", ["as_is", *FORMS])
def test_heads_that_keep_different_numbers(trace, form, tmp_path):
    """duoattention: some heads keep everything, and others roll on."""
    storage = FORMS[form][0] if form in FORMS else form
    policy = kvlab.policy("duoattention", budget=60, sinks=4, recent=24)
    watch = Watch()
    with pytest.warns(UserWarning, match="duoattention") if form else nullcontext():
        result = kvlab.replay(trace, policy, storage=storage, probes=[watch])
    counts = (result.stored(0, STEPS) >= 0).sum(-1).tolist() + (result.stored(1, STEPS) >= 0).sum(-1).tolist()
    assert set(counts) == {28, PROMPT + STEPS}
    store = watch.store
    assert store.ragged and store.keys.shape[2] == store.length == PROMPT + STEPS
    kept = [head for row in result.stored(1, STEPS).tolist() for head in [row]]
    for head, positions in enumerate(kept):
        wanted = [p for p in positions if p >= 0]
        near = trace.keys[1, head, wanted]
        found = store.keys[1, head, : len(wanted)]
        torch.testing.assert_close(found, near, atol=FURTHEST.get(form, 0.4), rtol=0)
    assert not store.keys[store.positions < 0].any()


def test_tables_say_in_what_form_it_was_stored(trace):
    policies = [made("full"), made("snapkv")]
    result = kvlab.replay(trace, policies, storage=["as_is", "kivi-4", "int8"])
    assert len(result) == 6
    assert result["snapkv", 48, "int8"].storage.name == "int8"
    assert list(result.summary.columns[:4]) == ["policy", "budget", "entries", "storage"]
    assert result.summary.storage.tolist() == ["as_is", "kivi-4", "int8"] * 2
    assert set(result.table.storage) == set(result.intervals.storage) == {"as_is", "kivi-4", "int8"}
    for each in result:
        assert set(each.table.storage) == {each.storage.name}
        behind = each.signature.split("|")[2]
        assert behind.endswith(f")+{each.storage}") if each.storage.name != "as_is" else behind.endswith(")")
    plain = kvlab.replay(trace, policies)
    assert "storage" in plain.summary.columns and plain.summary.columns[3] == "recall"
    pd.testing.assert_frame_equal(plain["snapkv"].table, result["snapkv", 48, "as_is"].table)
    with pytest.raises(KvlabError, match=r"no replay of snapkv at budget 48 stored as fp8; there are: .*snapkv\+int8"):
        result["snapkv", 48, "fp8"]


def test_probes_are_told_of_the_storage(trace):
    result = kvlab.replay(trace, made("snapkv"), storage="int8", probes=["bytes", "output_error"])
    assert set(result.records.table.storage) == {"int8"}
    assert result.records.means["output_error"] == pytest.approx(float(result.output_error.mean()))


def test_a_policy_without_a_response_and_a_selection(tensors):
    queries, keys, values = tensors
    silent = kvlab.Trace.from_tensors(queries[:, :, :PROMPT], keys[:, :, :PROMPT], values[:, :, :PROMPT], PROMPT)
    assert kvlab.replay(silent, made("snapkv"), storage="kivi-4").stored_bytes.numel() == 0
    trace = kvlab.Trace.from_tensors(*tensors, PROMPT)
    for name in ("quest", "hybrid", "exact_topk", "sparq"):
        policy = kvlab.policy(name, budget=24)
        plain, small = (kvlab.replay(trace, policy, storage=form) for form in ("as_is", kivi(4, 8, 20)))
        assert (small.read_bytes < plain.read_bytes).all() and (small.stored_bytes < plain.stored_bytes).all()


def test_what_cannot_be_is_one_sentence(trace, random_traces):
    with pytest.raises(KvlabError, match="unknown storage 'kivi-3'; did you mean 'kivi-"):
        kvlab.replay(trace, made("snapkv"), storage="kivi-3")
    with pytest.raises(KvlabError, match="do not divide this model's head size of 16"):
        kvlab.replay(random_traces[0], made("snapkv"), storage="kivi-4")
    with pytest.raises(KvlabError, match="do not divide this model's head size of 16"):
        kvlab.replay([trace, random_traces[0]], ["full"], storage=["int8", "kivi-4"])
    with pytest.raises(KvlabError, match="at least one trace, one policy and one storage"):
        kvlab.replay(trace, made("snapkv"), storage=[])
