"""The ways in which people generate: padded, in chunks, in half precision, in threads, with drafted tokens."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from support.live_runs import EVERYTHING, SMALL, agree, continued, everything, generate, left_padded, prompt, small
from support.tensors import sets
from transformers.generation.streamers import BaseStreamer

import kvlab
from kvlab.errors import KvlabError
from kvlab.inputs import models

# --- batches ---


@pytest.mark.parametrize("name", SMALL)
def test_each_row_of_a_padded_batch_goes_as_it_goes_alone(tiny, name):
    model = tiny("tiny-llama-gqa").model
    rows = [prompt(n, seed=n)[0] for n in (60, 37, 48, 37)]
    ids, mask = left_padded(*rows)
    with kvlab.compress(model, small(name), probes=["mass_lost"]) as session:
        batch = generate(model, ids, 40, attention_mask=mask)
        kept = [[sets(session.kept(layer, row)) for row in range(4)] for layer in range(2)]
        table = session.table
    by_length = {}
    for alone in rows[:3]:  # the last is the second again
        with kvlab.compress(model, small(name), probes=["mass_lost"]) as session:
            by_length[len(alone)] = generate(model, alone[None], 40), session
    for row, alone in enumerate(rows):
        single, session = by_length[len(alone)]
        assert batch.sequences[row, 60:].tolist() == single.sequences[0, len(alone) :].tolist()
        assert [kept[layer][row] for layer in range(2)] == [sets(session.kept(layer)) for layer in range(2)]
        mine = table[table.sequence == row].reset_index(drop=True)
        torch.testing.assert_close(torch.tensor(mine.value), torch.tensor(session.table.value), atol=1e-4, rtol=0)


def test_padding_is_never_stored(tiny):
    model = tiny().model
    ids, mask = left_padded(prompt(60)[0], prompt(20)[0])
    with kvlab.compress(model, "full") as session:
        generate(model, ids, 5, attention_mask=mask)
    assert session.kv_bytes == (64 + 24) * 2 * 2 * 2 * 16 * 4


# --- chunks ---


@pytest.mark.parametrize("name", [*list(SMALL), "full"])
def test_a_prompt_in_pieces_is_one_prompt(tiny, name):
    model = tiny().model
    ids, mask = left_padded(prompt(60, seed=1)[0], prompt(33, seed=2)[0])
    policy = small(name) if name in SMALL else kvlab.policy(name)
    with kvlab.compress(model, policy) as session:
        whole = generate(model, ids, attention_mask=mask)
        kept = sets(session.kept_after_prefill(1, 1))
        agree(generate(model, ids, attention_mask=mask, prefill_chunk_size=23), whole)
        assert sets(session.kept_after_prefill(1, 1)) == kept
        past, positions = None, (mask.cumsum(1) - 1).clamp_min(0)
        for piece in (slice(0, 20), slice(20, 38), slice(38, 60)):
            past = model(
                ids[:, piece],
                attention_mask=mask[:, : piece.stop],
                position_ids=positions[:, piece],
                past_key_values=past,
            ).past_key_values
        session.end_prompt()
        session.end_prompt()
        assert sets(session.kept_after_prefill(1, 1)) == kept


def test_end_prompt_shrinks_at_once(tiny):
    model = tiny().model
    with kvlab.compress(model, small("snapkv")) as session, torch.inference_mode():
        out = model(prompt(60))
        with pytest.raises(KvlabError, match="has not ended yet"):
            session.kept_after_prefill(0)
        session.end_prompt()
        assert session.kept(0).shape == (2, 14) and session.kv_bytes == 14 * 2 * 2 * 2 * 16 * 4
        model(prompt(1), past_key_values=out.past_key_values)
        assert session.kept(0).shape == (2, 15)


def test_arguments_may_be_positional_and_gradients_on(tiny):
    model = copy.deepcopy(tiny().model).requires_grad_(True)
    ids, mask = left_padded(prompt(40)[0], prompt(20)[0])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with kvlab.compress(model, small("streamingllm")) as session:
        past = model(ids, mask, positions).past_key_values
        for _step in range(3):
            mask = torch.cat([mask, mask[:, :1] | 1], 1)
            out = model(prompt(1, rows=2), mask, mask.sum(1, keepdim=True) - 1, past)
    assert [session.kept(0, row).max() for row in range(2)] == [42, 22]
    assert not any(g.store.keys.requires_grad for layer in out.past_key_values.layers for g in layer.groups)


# --- types, modes, threads ---


@pytest.fixture(scope="module")
def half():
    """half(dtype): a model, a prompt, and what the model says to it."""

    @functools.cache
    def make(dtype):
        lm, ids = models.random_lm("tiny-llama-gqa", device="cpu", dtype=dtype), prompt(50)
        return lm, ids, generate(lm.model, ids, 16)

    return make


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_half_precision(half, dtype, name):
    lm, ids, expected = half(dtype)
    with kvlab.compress(lm.model, everything(name)), torch.inference_mode():
        found = generate(lm.model, ids, 16)
    # The same tokens up to where the two best are within rounding of each other.
    for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
        torch.testing.assert_close(a, b, atol=0.3, rtol=0.1)
        if found.sequences[0, 50 + step] != expected.sequences[0, 50 + step]:
            best = expected.logits[step][0].float().topk(2).values
            assert best[0] - best[1] < 0.3
            break
    if name != "full":
        with kvlab.compress(lm.model, small(name), probes=["mass_lost", "entropy", "output_error"]) as session:
            out = generate(lm.model, ids, 16)
        store = out.past_key_values.layers[0].groups[0].store
        assert store.keys.dtype == store.values.dtype == getattr(torch, dtype)
        assert session.table.value.notna().all()


def test_inference_mode_may_be_left_between_turns(tiny):
    model = tiny().model
    with kvlab.compress(model, small("zsmerge")):
        with torch.inference_mode():
            first = generate(model, prompt(50))
        ids = torch.cat([first.sequences.clone(), prompt(5)], 1)
        found = continued(model, first.past_key_values, ids)
    assert found.sequences.shape == (1, 50 + 12 + 5 + 12)


class Collected(BaseStreamer):
    """Token ids as they come."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_and_another_thread(tiny):
    model, ids = tiny().model, prompt(50)
    with kvlab.compress(model, small("morphkv")) as session:
        expected = generate(model, ids)
        streamer, found = Collected(), []
        thread = threading.Thread(target=lambda: found.append(generate(model, ids, streamer=streamer)))
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and sets(session.kept(0))
    agree(found[0], expected, atol=0)
    assert streamer.ended and streamer.tokens == expected.sequences[0].tolist()


@pytest.mark.parametrize("name", ["full", "snapkv", "dapq", "streamingllm"])
def test_drafted_tokens_are_taken_back(tiny, name):
    model, ids = tiny().model, prompt(20).repeat(1, 3)
    options = dict(prompt_lookup_num_tokens=3, output_logits=False)
    expected = generate(model, ids, 20, output_logits=False)
    with kvlab.compress(model, everything(name), turns="leave"):
        if name == "streamingllm":
            with pytest.raises(KvlabError, match="cannot take tokens back"):
                generate(model, ids, 20, **options)
        else:
            assert generate(model, ids, 20, **options).sequences.tolist() == expected.sequences.tolist()
