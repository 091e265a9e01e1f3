"""Everything that takes a model or a trace does so on a GPU, with the CPU's numbers and the CPU's positions.

The GPU is a pretended one, which computes like the CPU and mixes with it as little as a real one.
"""

from __future__ import annotations

import pandas as pd
import pretend_gpu
import pytest
import torch
from live_runs import SMALL, generate, left_padded, prompt

import kvlab
from kvlab import models
from kvlab.policies import registry
from kvlab.probes import QuerySimilarity
from kvlab.replay import MEASURES

TINY = dict(shape="tiny-llama-gqa", dtype="float32")
PARAMETERS = SMALL | {"full": {}}
NAMES = sorted(registry())
WHOLE = dict(queries="all", accumulate=True)
PROBES = ["mass_lost", "recall", "output_error", "entropy", "positions", "bytes"]


def on(device: str = "cpu") -> models.LM:
    """The same random weights wherever they lie."""
    lm = models.random_lm(device="cpu", **TINY)
    lm.model.to(device)
    return lm


def policy(name: str) -> kvlab.Policy:
    return kvlab.policy(name, **PARAMETERS[name])


@pytest.fixture(scope="module")
def cpu() -> models.LM:
    return on("cpu")


@pytest.fixture(scope="module")
def gpu() -> models.LM:
    with pretend_gpu.present() as device:
        return on(device)


@pytest.fixture(autouse=True)
def quiet():
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(duoattention|compilerkv)")
        yield


@pytest.fixture(scope="module")
def pairs(cpu, gpu):
    """A function that captures the same on both devices."""
    needed = dict(pseudo=[policy("dapq")], policies=[policy(name) for name in NAMES])
    here = kvlab.capture(cpu, prompt(60), 8, **WHOLE, **needed)
    with pretend_gpu.present():
        there = kvlab.capture(gpu, prompt(60), 8, **WHOLE, **needed)
    return here, there


def close(found, expected):
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3, equal_nan=True)


def same_tables(found: pd.DataFrame, expected: pd.DataFrame):
    pd.testing.assert_frame_equal(found, expected, check_exact=False, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_replay(pairs, name):
    here, there = pairs
    expected = kvlab.replay(here, policy(name), probes=())
    watched = kvlab.replay(here, policy(name), probes=PROBES)
    with pretend_gpu.present():
        found = kvlab.replay(there, policy(name))
        probed = kvlab.replay(there, policy(name), probes=PROBES)
        same_tables(found.table, expected.table)
        same_tables(probed.records.table, watched.records.table)
        for layer in range(here.n_layers):
            for step in range(here.steps + 1):
                assert found.kept(layer, step).tolist() == expected.kept(layer, step).tolist()
                assert found.stored(layer, step).tolist() == expected.stored(layer, step).tolist()


def two_turns(lm: models.LM, one: kvlab.Policy, turns: str, reference: kvlab.Trace):
    """Two prompts of unequal length answered greedily, then a second turn by sampling, each seen by every probe."""
    ids, mask = (x.to(lm.device) for x in left_padded(prompt(60)[0], prompt(44, 1)[0]))
    session = kvlab.compress(lm.model, one, [*PROBES, QuerySimilarity(reference)], turns=turns, max_new_tokens=12)
    with session:
        first = generate(lm.model, ids, 6, attention_mask=mask)
        after = [session.kept_after_prefill(layer, row).tolist() for layer in range(2) for row in range(2)]
        longer = torch.cat([first.sequences, prompt(9, 2, rows=2).to(lm.device)], 1)
        whole = torch.cat([mask, mask.new_ones(2, longer.shape[1] - mask.shape[1])], 1)
        torch.manual_seed(7)
        second = generate(lm.model, longer, 6, past_key_values=first.past_key_values, attention_mask=whole,
                          do_sample=True)
    kept = [session.kept(layer, row).tolist() for layer in range(2) for row in range(2)]
    read = [session.records.positions(layer, step).tolist() for layer in range(2) for step in range(1, 6)]
    return session, second.sequences.tolist(), (after, kept, read)


@pytest.mark.parametrize("name, turns", [
    *((name, "leave" if name in ("keyformer", "compilerkv") else "recompress") for name in NAMES), ("morphkv", "leave")])
def test_a_live_run(cpu, gpu, pairs, name, turns):
    expected, tokens, sets = two_turns(cpu, policy(name), turns, pairs[0])
    with pretend_gpu.present():
        found, others, same = two_turns(gpu, policy(name), turns, pairs[1])
        assert others == tokens and same == sets
        same_tables(found.table, expected.table)
    for size in ("kv_bytes", "aux_bytes", "allocated_bytes", "read_bytes"):
        assert getattr(found, size) == getattr(expected, size)
