"""Hybrid models in half precision: live runs keep what replays keep, and a full budget changes nothing that matters."""

from __future__ import annotations

import pytest
import torch
from support.families import HYBRIDS
from support.live_runs import EVERYTHING, SMALL, prompt
from support.tensors import sets

import kvlab
from kvlab.inputs import models


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("name", ["snapkv", "h2o", "rocketkv"])
def test_live_keeps_what_a_replay_keeps(family, name):
    """And a budget as large as everything leaves the logits as they are, but for the last bits of that precision."""
    lm = models.random_lm(family, device="cpu", dtype="bfloat16")
    one, ids = kvlab.policy(name, **SMALL[name]), prompt(60, seed=7)
    trace = kvlab.capture(lm, ids, 3, policies=[one], pseudo=())
    assert trace.keys.dtype == torch.bfloat16
    opened = kvlab.replay(trace, one)
    with kvlab.compress(lm.model, one, max_new_tokens=3) as session, torch.inference_mode():
        out = lm.model(ids)
        lm.model(trace.ids[60].view(1, 1), past_key_values=out.past_key_values)
        for layer in lm.layout.compressed:
            assert sets(session.kept_after_prefill(layer)) == sets(opened.kept(layer))
    plain = forced(lm.model, ids, trace.ids[60:])
    apart = {}
    for method in (kvlab.policy(name, **EVERYTHING[name]), kvlab.policy("streamingllm", budget=6)):
        with kvlab.compress(lm.model, method):
            apart[method] = float((forced(lm.model, ids, trace.ids[60:]) - plain).norm() / plain.norm())
    all_of_it, little = apart.values()
    assert all_of_it < 0.02 < little


@torch.inference_mode()
def forced(model, ids, told):
    """Logits of the tokens that are fed one by one after a prompt."""
    past, logits = model(ids).past_key_values, []
    for token in told:
        out = model(token.view(1, 1), past_key_values=past)
        past = out.past_key_values
        logits.append(out.logits[0, -1].float())
    return torch.stack(logits)
