"""The ways in which people generate: padded, in chunks, in turns, in half precision, in threads."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from support.live_runs import EVERYTHING, ONE_TURN, SMALL, agree, generate, left_padded, prompt
from support.tensors import sets
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import kvlab
from kvlab.errors import KvlabError
from kvlab.inputs import models

STORE_ALL = ("quest", "sparq", "hybrid", "exact_topk")
STORE_MORE = ("duoattention", "rocketkv")  # than their budget, but not all
LOOK_FAR_BACK = ("h2o", "keyformer", "scissorhands", "triattention")  # with room for all, beyond what was fed inside


def small(name):
    return kvlab.policy(name, **SMALL[name])


def everything(name):
    return kvlab.policy(name, **EVERYTHING[name])


def continued(model, past, ids, n=12, **options):
    """A response to `ids`, of which `past` holds the beginning."""
    return generate(model, ids, n, past_key_values=past, **options)


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


# --- several prompts, several turns ---


@pytest.mark.parametrize("name", SMALL)
def test_prompts_in_one_session_do_not_see_each_other(tiny, name):
    model = tiny().model
    prompts = [prompt(50, seed=1), prompt(41, seed=2), prompt(50, seed=1)]
    with kvlab.compress(model, small(name), probes=["mass_lost"]) as session:
        found = [generate(model, ids) for ids in prompts]
    agree(found[2], found[0], atol=0)
    with kvlab.compress(model, small(name)):
        agree(generate(model, prompts[1]), found[1])
    table = session.table
    assert sorted(table.prompt.unique()) == [1, 2, 3]
    first, last = (table[table.prompt == n].drop(columns="prompt").reset_index(drop=True) for n in (1, 3))
    assert first.equals(last)


def two_turns(model):
    """Two responses of a batch of two, the second to more of the user's tokens."""
    ids, mask = left_padded(prompt(40, seed=1)[0], prompt(29, seed=2)[0])
    new, ones = prompt(7, seed=3, rows=2), torch.ones(2, 7 + 12, dtype=torch.long)
    first = generate(model, ids, attention_mask=mask)
    longer = torch.cat([first.sequences, new], 1)
    return first, continued(model, first.past_key_values, longer, attention_mask=torch.cat([mask, ones], 1))


@pytest.fixture(scope="module")
def plain_turns(tiny):
    return two_turns(tiny().model)


@pytest.mark.parametrize(
    "name, turns",
    [
        # Keyformer scores with every query of a prompt, and those of a response are not kept.
        (name, turns)
        for name in EVERYTHING
        for turns in ("recompress", "leave")
        if turns == "leave" or name not in ("keyformer", "triattention")
    ],
)
def test_a_second_turn_at_full_budget_goes_on_as_plain_generation(tiny, plain_turns, name, turns):
    model = tiny().model
    with kvlab.compress(model, everything(name), turns=turns, probes=["mass_lost"]) as session:
        for found, wanted in zip(two_turns(model), plain_turns, strict=True):
            agree(found, wanted)
    assert sorted(session.table.step.unique()) == list(range(1, 23))
    assert session.means["mass_lost"] < 1e-5


@pytest.mark.parametrize("name", SMALL)
def test_a_second_turn_is_recompressed_or_left(tiny, name):
    model, budget = tiny().model, SMALL[name]["budget"]
    once = small(name).acts_while_decoding
    for turns in ("recompress", "leave"):
        with kvlab.compress(model, small(name), turns=turns, probes=["mass_lost", "step_recall"]) as session:
            first = generate(model, prompt(50), 12)
            after_first = session.kv_bytes
            longer = torch.cat([first.sequences, prompt(20, seed=8)], 1)
            model(longer[:, 61:], past_key_values=first.past_key_values)
            assert session.kv_bytes == after_first + 21 * 2 * 2 * 2 * 16 * 4
            last = torch.cat([longer, prompt(2, seed=9)], 1)
            if turns == "recompress" and name in ONE_TURN:
                with pytest.raises(KvlabError, match="turns='leave'"):
                    continued(model, first.past_key_values, last, 9)
                continue
            second = continued(model, first.past_key_values, last, 9)
            stored = session.kv_bytes // (2 * 2 * 2 * 16 * 4)
            if name in STORE_ALL:
                assert stored == 50 + 12 + 20 + 2 + 8
            elif name in STORE_MORE:
                assert budget < stored <= 50 + 12 + 20 + 2 + 8
            elif name in ("rkv", "triattention"):
                assert budget - 4 <= stored <= budget, "it makes room for four at once"
            elif turns == "recompress":
                assert stored == (budget if once else budget + 8)
            elif not once:
                assert stored == budget + 11 + 21 + 2 + 8
            assert int(session.kept(0).max()) == 50 + 12 + 20 + 2 + 8 - 1
        assert second.sequences.shape == (1, 93)
        assert (session.table.value >= 0).all() and session.table.value.max() <= 1


def test_a_turn_shorter_than_the_window_is_observed_together_with_the_response(tiny):
    model = tiny().model
    policy = kvlab.policy("snapkv", budget=20, window=16)
    with kvlab.compress(model, policy) as session:
        first = generate(model, prompt(50), 12)
        continued(model, first.past_key_values, torch.cat([first.sequences, prompt(3, seed=8)], 1), 4)
        assert session.kept_after_prefill(0)[0, -16:].tolist() == list(range(65 - 16, 65))


@pytest.mark.parametrize("turns", ["recompress", "leave"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_plain_cache_with_content_is_continued(tiny, name, turns):
    model, ids = tiny().model, prompt(60)
    expected = generate(model, ids)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=past)
    if name in LOOK_FAR_BACK:
        with kvlab.compress(model, everything(name)), pytest.raises(KvlabError, match="only 30"):
            continued(model, past, ids)
        return
    with kvlab.compress(model, everything(name), turns=turns):
        agree(continued(model, past, ids), expected)
    assert past.get_seq_length() == 30


def test_what_a_plain_cache_cannot_tell_is_said(tiny):
    model, ids = tiny().model, prompt(60)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :57], past_key_values=past)
    with kvlab.compress(model, small("snapkv")), pytest.raises(KvlabError, match="last 6 queries, and only 3 were fed"):
        continued(model, copy.deepcopy(past), ids)
    with kvlab.compress(model, small("dapq")), pytest.raises(KvlabError, match="not all are known"):
        continued(model, copy.deepcopy(past), ids)
    with kvlab.compress(model, small("streamingllm")):
        lossy = generate(model, ids).past_key_values
    with kvlab.compress(model, "full", probes=["mass_lost"]), pytest.raises(KvlabError, match="has lost entries"):
        model(ids[:, :1], past_key_values=lossy)


def test_a_prefix_can_be_copied_and_shared(tiny):
    model, prefix = tiny().model, prompt(40)
    ends = [prompt(10, seed=1), prompt(14, seed=2)]
    with kvlab.compress(model, small("snapkv")) as session:
        expected = [generate(model, torch.cat([prefix, end], 1)) for end in ends]
        with torch.no_grad():
            shared = model(prefix).past_key_values
        for end, wanted in zip(ends, expected, strict=True):
            agree(continued(model, copy.deepcopy(shared), torch.cat([prefix, end], 1)), wanted)
        assert shared.get_seq_length() == 40 and session.kept(0).shape[1] == 14 + 11


def test_another_policy_may_take_over(tiny):
    model, past = tiny().model, None
    for name, aux in (("morphkv", True), ("streamingllm", False), ("zsmerge", True)):
        with kvlab.compress(model, small(name)) as session, torch.no_grad():
            for piece in prompt(60, seed=5).split([58, 1, 1], 1):
                past = model(piece, past_key_values=past).past_key_values
        assert session.kept(0).shape[1] == SMALL[name]["budget"]
        assert (session.aux_bytes > 0) == aux
    with kvlab.compress(model, small("snapkv")), pytest.raises(KvlabError, match="only 0 were fed"):
        model(prompt(1), past_key_values=past)


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


def test_a_turn_left_whole_leaves_morphkv_no_stale_attention(tiny):
    """None of the window's tokens but the last was seen attending, so its row alone decides."""

    class Weights(kvlab.instruments.probes.Probe):
        name, needs_weights, last = "weights", True, {}

        def look(self, seen, records, where):
            self.last[where["layer"]] = seen.step.weights[0].clone(), seen.store.positions[0].clone()

    lm, ids = tiny("tiny-llama-gqa"), prompt(60, seed=8)
    policy, probe = kvlab.policy("morphkv", budget=14, window=6), Weights()
    with kvlab.compress(lm.model, policy, probes=[probe], turns="leave") as session, torch.inference_mode():
        cache = lm.model(ids[:, :40]).past_key_values
        for piece in (ids[:, 40:41], ids[:, 41:42], ids[:, 42:52], ids[:, 52:53]):
            lm.model(piece, past_key_values=cache)
    for layer in range(2):
        weights, positions = probe.last[layer]
        assert positions.shape[1] == 14 + 11
        for group, summed in enumerate(weights.unflatten(0, (len(positions), -1)).sum(1)):
            best = summed[:-6].topk(8).indices.sort().values
            expected = positions[group][best].tolist() + list(range(47, 53))
            assert session.kept(layer)[group].tolist() == expected


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "zigzagkv", "dynamickv"])
def test_layers_share_one_budget_in_a_later_turn_too(tiny, name):
    model, policy = tiny().model, kvlab.policy(name, budget=64, window=8)
    with kvlab.compress(model, policy) as session, torch.inference_mode():
        past = model(prompt(200)).past_key_values
        for turn in (prompt(60, seed=1), prompt(20, seed=2)):
            session.end_prompt()
            sizes = [session.kept_after_prefill(layer).shape[1] for layer in range(2)]
            assert sum(sizes) <= 2 * 64 and min(sizes) >= 8
            model(turn, past_key_values=past)
        session.end_prompt()
        assert sum(session.kept_after_prefill(layer).shape[1] for layer in range(2)) <= 2 * 64


def test_what_a_cache_gathered_before_the_session_is_not_added_up(tiny):
    model, ids = tiny().model, prompt(60)
    with torch.no_grad():
        past = model(ids[:, :40]).past_key_values
    with kvlab.compress(model, small("h2o")), pytest.raises(KvlabError, match="only 20 of 60 were fed inside"):
        model(ids[:, 40:], past_key_values=past)


def test_a_compressed_cache_is_no_beginning_for_another_policy(tiny):
    model = tiny().model
    with kvlab.compress(model, small("snapkv")) as session, torch.inference_mode():
        past = model(prompt(60)).past_key_values
        session.end_prompt()
        model(prompt(10, seed=1), past_key_values=past)
    with kvlab.compress(model, small("streamingllm")) as session, pytest.raises(KvlabError, match="compressed already"):
        session.branch(past)
