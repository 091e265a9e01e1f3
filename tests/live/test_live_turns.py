"""Several prompts and several turns: what a later turn finds of the first, and caches that were filled elsewhere."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from support import oracles
from support.eager import eager
from support.live_runs import (
    EVERYTHING,
    ONE_TURN,
    SMALL,
    Witness,
    agree,
    continued,
    everything,
    generate,
    left_padded,
    prompt,
    small,
)
from support.tensors import exact, sets
from transformers import DynamicCache

import kvlab
from kvlab.core.geometry import geometry
from kvlab.errors import KvlabError
from kvlab.methods.rocketkv import RocketKV

STORE_ALL = ("quest", "sparq", "hybrid", "exact_topk")
STORE_MORE = ("duoattention", "rocketkv")  # than their budget, but not all
# At a budget of 2,000, beyond what was fed inside the session.
LOOK_FAR_BACK = ("h2o", "keyformer", "scissorhands", "triattention")


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
        # These score with every query of a prompt, and those of a response are not kept.
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
    once = small(name).needs.steps or small(name).needs.selects
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
            elif name == "simlayerkv":
                response = 8 if turns == "recompress" else 11 + 21 + 2 + 8
                assert 2 + 6 + response <= stored <= budget + response, "whole layers do not fill a budget"
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
        with (
            kvlab.compress(model, everything(name)),
            pytest.raises(KvlabError, match=" 60 queries.* 30|not 30 of 60 tokens"),
        ):
            continued(model, past, ids)
        return
    with kvlab.compress(model, everything(name), turns=turns):
        agree(continued(model, past, ids), expected)
    assert past.get_seq_length() == 60 + 12 - 1, "the caller's own cache is the one that was filled"


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
    with (
        kvlab.compress(model, "full", probes=["mass_lost"]),
        pytest.raises(KvlabError, match="has evicted or rounded entries"),
    ):
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


@pytest.mark.parametrize("name", [name for name in SMALL if name not in (*STORE_ALL, *STORE_MORE, "full", "think")])
def test_a_question_that_comes_after_the_compression_finds_no_more_than_the_budget(tiny, name):
    model, policy = tiny().model, small(name)
    with kvlab.compress(model, policy, turns="leave") as session, torch.inference_mode():
        past = model(prompt(60)).past_key_values
        session.end_prompt()
        model(prompt(7, seed=1), past_key_values=past)
        stored = [session.kept(layer).shape[1] for layer in range(2)]
        shape = geometry(model.config)
        assert session.kv_bytes <= (policy.budget + 7) * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
        model(prompt(5, seed=2), past_key_values=past)
        assert [session.kept(layer).shape[1] for layer in range(2)] == [n + 5 for n in stored], "a chunk more of it"


def test_morphkv_chooses_what_such_a_question_finds_by_the_prompts_own_window(tiny):
    """Algorithm 1 on the prompt's last rows, as eager attention sees them: none of the question's is among them."""
    lm, ids = tiny("tiny-llama-gqa"), prompt(40, seed=8)
    with kvlab.compress(lm.model, kvlab.policy("morphkv", budget=14, window=6), turns="leave") as session:
        with torch.inference_mode():
            past = lm.model(ids).past_key_values
            session.end_prompt()
            lm.model(prompt(7, seed=1), past_key_values=past)
    for layer, weights in enumerate(eager(lm, ids[0]).weights):
        grouped = weights.unflatten(0, (session.kept(layer).shape[0], -1)).sum(1)
        for head, rows in enumerate(grouped):
            best = rows[-6:, :34].sum(0).topk(8).indices.sort().values
            assert session.kept(layer)[head].tolist() == [*best.tolist(), *range(34, 47)]


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
    with (
        kvlab.compress(model, small("h2o")),
        pytest.raises(KvlabError, match="feed the whole prompt .*, not 20 of 60 tokens"),
    ):
        model(ids[:, 40:], past_key_values=past)


def test_a_compressed_cache_is_no_beginning_for_another_policy(tiny):
    model = tiny().model
    with kvlab.compress(model, small("snapkv")) as session, torch.inference_mode():
        past = model(prompt(60)).past_key_values
        session.end_prompt()
        model(prompt(10, seed=1), past_key_values=past)
    with kvlab.compress(model, small("streamingllm")) as session, pytest.raises(KvlabError, match="compressed already"):
        session.branch(past)


@pytest.mark.parametrize("turns", ["recompress", "leave"])
def test_a_second_turn_can_read_what_the_first_ones_mask_hid(tiny, monkeypatch, turns):
    """RocketKV-MT: each turn's mask and each step's reads from scratch; what is left alone keeps the first mask."""
    own, new, asked = dict(budget=12, window=6, kernel=3), 12, []
    compress = RocketKV.compress

    def watched(self, store, prompt):
        asked.append((exact(prompt.window(6)[0]), exact(prompt.keys[0])))
        compress(self, store, prompt)

    monkeypatch.setattr(RocketKV, "compress", watched)
    model, witness, policy = tiny().model, Witness(), kvlab.policy("rocketkv", turns="multi", **own)
    with kvlab.compress(model, policy, turns=turns, probes=[witness], max_new_tokens=new) as session:
        first = generate(model, prompt(50), new)
        ended = len({step for _, step in witness.steps})
        longer = torch.cat([first.sequences, prompt(20, seed=8)], 1)
        continued(model, first.past_key_values, longer, new)
        assert [sets(session.kept(layer)) for layer in range(2)] == [[list(range(50 + new + 20 + new - 1))] * 2] * 2

    def mask(turn, layer):
        queries, keys = asked[2 * turn + layer]
        # A budget of t leaves room for sqrt(t x length) entries, less those that are to come.
        left = max(math.isqrt((keys.shape[1] + new) * 12) - new, 7)
        queries = np.concatenate([np.zeros((queries.shape[0], keys.shape[1] - 6, queries.shape[2])), queries], 1)
        return oracles.snapkv_pp_kept(queries, keys, keys.shape[1], left, 6, 3, 63, 511, 48000)

    turns_asked = len(asked) // 2
    assert turns_asked == (2 if turns == "recompress" else 1)
    found = 0
    for (layer, number), step in witness.steps.items():
        turn = int(number > ended and turns == "recompress")
        kept, seen = mask(turn, layer), asked[2 * turn + layer][1].shape[1]
        page, rank = oracles.hybrid_settings(len(kept[0]) + new, 12, 16)
        for group, read in enumerate(sets(step["read"][0])):
            stored = sets(step["stored"][0])[group]
            open_ = kept[group] + [place for place in stored if place >= seen]
            if turns == "recompress":
                keys = exact(first.past_key_values.compressed[layer].groups[0].store.keys[0, group])[open_]
                queries = exact(step["queries"][0])[2 * group : 2 * group + 2]
                assert read == [open_[i] for i in oracles.hybrid_selection(12, page, rank)(queries, keys)]
            assert set(read) <= set(open_)
            if number > ended:
                found += len({place for place in read if place < 50} - set(mask(0, layer)[group]))
    assert found > 0 if turns == "recompress" else found == 0
