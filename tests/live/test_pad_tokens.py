"""A prompt that holds the pad id as a token of its own: a session speaks of no padding, and nothing is hidden."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvlab
from kvlab import KvlabError
from kvlab.inputs import models

PAD = 7
NEW = dict(max_new_tokens=6, do_sample=False)


@pytest.fixture(scope="module")
def olmo(tmp_path_factory):
    """A tiny OLMo 2, loaded from a folder, whose pad id is a token like any other."""
    folder = tmp_path_factory.mktemp("models") / "olmo"
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "olmo2",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.3,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=63,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    lm = models.load(folder, device="cpu")
    lm.model.generation_config.eos_token_id = None  # a response of random weights may hold it
    return lm


def prompt(*at, tokens=40, seed=1):
    """Ids without the pad id but at these places, `[1, tokens]`."""
    ids = torch.randint(PAD + 1, 63, (1, tokens), generator=torch.Generator().manual_seed(seed))
    ids[0, list(at)] = PAD
    return ids


@pytest.mark.parametrize("at", [(20,), (0,), (0, 1, 30), (39,), (3, 4, 5, 39)], ids=str)
def test_a_prompt_with_the_pad_id_is_read_whole(olmo, at):
    ids = prompt(*at)
    expected = olmo.model.generate(ids, attention_mask=torch.ones_like(ids), **NEW)
    with kvlab.compress(olmo.model, "full") as session:
        found = olmo.model.generate(ids, **NEW)
    assert torch.equal(found, expected)
    assert session.kept(1).shape[-1] == 40 + 5
    trace = kvlab.capture(olmo, ids, 6, 32)
    assert torch.equal(trace.ids, expected[0]), "live and captured are one response"
    policy = kvlab.policy("snapkv", budget=16, window=8)
    with kvlab.compress(olmo.model, policy) as session:
        olmo.model.generate(input_ids=ids, **NEW)
    for layer in range(2):
        assert torch.equal(session.kept_after_prefill(layer), kvlab.replay(trace, policy).kept(layer, 0))


def test_a_later_turn_with_the_pad_id(olmo):
    ids = prompt(5)
    with kvlab.compress(olmo.model, "full") as session:
        first = olmo.model.generate(ids, return_dict_in_generate=True, **NEW)
        both = torch.cat([first.sequences, prompt(2, tokens=9)], 1)
        found = olmo.model.generate(both, past_key_values=first.past_key_values, **NEW)
    expected = olmo.model.generate(both, attention_mask=torch.ones_like(both), **NEW)
    assert torch.equal(found, expected) and session.kept(0).shape[-1] >= 40


def test_a_left_padded_batch_keeps_its_padding_and_its_tokens(olmo):
    """Rows of 40 and 30 tokens that both begin with the pad id and hold it in their middle, and no mask."""
    long, short = prompt(0, 17), prompt(0, 12, tokens=30, seed=2)
    ids = torch.cat([long, torch.cat([torch.full((1, 10), PAD), short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    expected = olmo.model.generate(ids, attention_mask=mask, **NEW)
    with kvlab.compress(olmo.model, "full"):
        assert torch.equal(olmo.model.generate(ids, **NEW), expected)


def test_a_plainly_padded_batch_is_what_transformers_takes_it_for(olmo):
    ids = torch.cat([prompt(), torch.cat([torch.full((1, 10), PAD), prompt(tokens=30, seed=2)], 1)])
    expected = olmo.model.generate(ids, **NEW)
    with kvlab.compress(olmo.model, "full"):
        assert torch.equal(olmo.model.generate(ids, **NEW), expected)


def test_padding_on_the_right_is_still_refused(olmo):
    ids = torch.cat([prompt(), torch.cat([prompt(tokens=30, seed=2), torch.full((1, 10), PAD)], 1)])
    with pytest.raises(KvlabError, match="only left padding"), kvlab.compress(olmo.model, "full"):
        olmo.model.generate(ids, **NEW)


def test_a_mask_that_is_given_stands(olmo):
    ids = prompt(0, 1, 20)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    expected = olmo.model.generate(ids, attention_mask=mask, **NEW)
    with kvlab.compress(olmo.model, "full") as session:
        assert torch.equal(olmo.model.generate(ids, attention_mask=mask, **NEW), expected)
    assert session.kept(0).shape[-1] == 38 + 5


def test_the_model_is_left_as_it_came(olmo):
    with pytest.raises(RuntimeError, match="in the middle"), kvlab.compress(olmo.model, "full"):
        assert "generate" in vars(olmo.model)
        raise RuntimeError("in the middle")
    assert "generate" not in vars(olmo.model)
