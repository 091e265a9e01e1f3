"""SimLayerKV: lazy layers by a threshold and by a budget, against plain loops."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.layer_budgets import decided, kept_sets, model, replayed
from support.live_runs import generate, prompt
from support.refusals import one_sentence

import kvlab


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "how",
    [
        dict(threshold=0.35, sinks=2, recent=20),
        dict(threshold=0.5, sinks=0, recent=30),
        dict(),
        dict(budget=40, sinks=2, recent=10),
        dict(budget=30),
        dict(budget=80, sinks=2, recent=10),
        dict(budget=100),
    ],
    ids=str,
)
def test_every_layer_keeps_what_the_oracle_keeps(heads, kv_heads, how):
    tensors = model(heads + kv_heads, heads, kv_heads, 90, layers=6)
    assert kept_sets(replayed(tensors, 90, "simlayerkv", **how)) == decided("simlayerkv", tensors, 90, **how)


def test_some_layers_are_lazy_and_some_are_not():
    """Sharp layers look at few tokens, so the two rules tell layers apart in this test's input."""
    tensors = model(3, 4, 2, 90, layers=6)
    for how in (dict(threshold=0.25, sinks=2, recent=20), dict(budget=45, sinks=2, recent=10)):
        sizes = [len(heads[0]) for heads in kept_sets(replayed(tensors, 90, "simlayerkv", **how))]
        assert set(sizes) == {how["sinks"] + how["recent"], 90}, how


def test_a_budget_takes_the_laziest_layers_first():
    queries, keys, values = model(4, 2, 1, 60, layers=3, n=1)
    queries = torch.ones_like(queries)
    keys *= 0.01
    keys[0, :, 30], keys[1, :, 59], keys[2, :, 1] = 2, 1, 3
    result = replayed((queries, keys, values), 60, "simlayerkv", budget=30, sinks=2, recent=10)
    assert [len(heads[0]) for heads in kept_sets(result)] == [60, 12, 12]
    assert result.summary["entries"] == 28


def test_it_streams_alike_live_and_keeps_the_response(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("simlayerkv", threshold=0.5, sinks=2, recent=20)
    with kvlab.compress(lm.model, policy) as session, torch.inference_mode():
        generate(lm.model, prompt(60), 4)
        live = [session.kept_after_prefill(layer).tolist() for layer in range(2)]
        stored = [session.kept(layer).tolist() for layer in range(2)]
    replay = kvlab.replay(kvlab.capture(lm, prompt(60)[0], 4, policies=[policy]), policy)
    assert live == [replay.kept(layer).tolist() for layer in range(2)]
    assert [[row[-3:] for row in layer] for layer in stored] == [[[60, 61, 62]] * 2] * 2


def test_one_layer_alone_cannot_be_told_lazy():
    tensors = model(6, prompt=80, layers=1)
    with one_sentence("replay"):
        kvlab.policy("simlayerkv", budget=40).keep(*tensors, layer=0, n_layers=4)
    assert oracles.oracle_simlayerkv(*(t.numpy() for t in tensors), 80, 80) == [[list(range(80))] * 2]
