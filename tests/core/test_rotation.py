"""How layers turn queries and keys: against plain loops, and read off every family of the test matrix."""

from __future__ import annotations

import copy

import pytest
import torch
from support import oracles
from support.families import FAMILIES, HYBRIDS
from support.live_runs import prompt

import kvlab
from kvlab.core.rotation import Rotation, agreeing, candidates
from kvlab.errors import KvlabError
from kvlab.inputs import models

FREQUENCIES = (1.0, 0.3, 0.05)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [6, 9])
def test_vectors_turn_as_in_the_plain_loop_and_back(interleaved, head_dim):
    rotation = Rotation(FREQUENCIES, 1.25, interleaved)
    x = torch.randn(2, 4, head_dim, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 3, 17, 200])
    found = rotation.turned(x, positions)
    for row in range(2):
        for place, position in enumerate(positions.tolist()):
            expected = oracles.turned(x[row, place].double().numpy(), position, FREQUENCIES, interleaved, 1.25)
            torch.testing.assert_close(found[row, place].double(), torch.from_numpy(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rotation.turned_back(found, positions), x, atol=1e-5, rtol=1e-5)
    mean = rotation.mean(positions, head_dim)
    for row in range(2):
        each = torch.stack([rotation.turned(x[row, :1], position[None])[0] for position in positions])
        torch.testing.assert_close(mean @ x[row, 0], each.mean(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_every_family_turns_as_a_capture_says(tiny, family, tmp_path):
    trace = kvlab.capture(tiny(family), prompt(70), 2, queries="all")
    positions = torch.arange(trace.length)
    for place, rotation in enumerate(trace.rotations):
        turned = rotation.turned(trace.pre_queries[place], positions)
        torch.testing.assert_close(turned, trace.queries[place].float(), atol=1e-4, rtol=1e-4)
        assert (len(rotation.frequencies) == 0) == (family == "hybrid-llama4"), "its whole-past layers do not turn"
    assert kvlab.Trace.load(trace.save(tmp_path / "saved.safetensors")).rotations == trace.rotations


def test_a_part_of_each_head_and_pairs_of_neighbours_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    before, positions = torch.randn(1, 4, 30, 16, generator=generator), torch.arange(100, 130)[None]
    own = Rotation((1.0, 0.1, 0.01, 0.001))
    choices = [own, Rotation(own.frequencies, interleaved=True), Rotation((1.0, 0.2, 0.04, 0.008)), Rotation()]
    for truth in choices:
        after = truth.turned(before, positions[:, None])
        assert agreeing(choices, before, after, positions) == truth
        assert agreeing(choices, before, after.bfloat16(), positions) == truth
    assert agreeing(choices, before, before.flip(-1), positions) is None
    assert agreeing(choices, before[:, :, :1], before[:, :, :1], positions[:, :1] * 0) == own


def test_the_tables_of_a_model_are_its_candidates(tiny):
    found = list(candidates(tiny("hybrid-gemma3").model))
    assert len({choice.frequencies for choice in found}) == 3 and found[-1] == Rotation()
    assert {choice.interleaved for choice in found[:-1]} == {False, True}


@pytest.fixture(scope="module")
def strange(tiny):
    """A model that turns in a way of its own: backwards."""
    lm = tiny("tiny-llama-gqa")
    model = copy.deepcopy(lm.model)
    tables = model.model.rotary_emb
    forward = tables.forward

    def backwards(x, position_ids):
        cosines, sines = forward(x, position_ids)
        return cosines, -sines

    tables.forward = backwards
    return models.LM(model, None, "strange", "2" * 64)


def test_a_rotation_that_does_not_agree_is_refused_in_one_sentence(strange, tmp_path):
    trace = kvlab.capture(strange, prompt(60), 2, policies=["expected_attention"])
    assert trace.rotations == (None, None)
    policy = kvlab.policy("expected_attention", budget=20)
    told = "expected_attention rotates vectors .* kvlab does not know this model's rotation"
    for one in (trace, kvlab.Trace.load(trace.save(tmp_path / "strange.safetensors"))):
        with pytest.raises(KvlabError, match=told):
            kvlab.replay(one, policy)
    with kvlab.compress(strange.model, policy), pytest.raises(KvlabError, match=told):
        strange.model.generate(prompt(60), max_new_tokens=3, pad_token_id=0)
