"""The caller's own cache in a session and after it: every method of transformers' `Cache`, held against a plain one."""

from __future__ import annotations

import copy
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from support.live_runs import agree, continued, everything, generate, prompt, small
from transformers import DynamicCache

import kvlab
from kvlab import KvlabError


def fed(model, ids, policy="full", **options):
    """A cache of the caller's that a session has filled with `ids`, compressed."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvlab.compress(model, policy, **options):
        model(ids, past_key_values=cache)
    return cache


def plain(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", ["full", "snapkv", "h2o", "quest", "pyramidkv"])
def test_a_chat_in_the_callers_cache_is_one_conversation(tiny, name):
    """transformers' documented loop: the same cache object for every turn, and all ids each time."""
    model, first, more = tiny().model, prompt(40), prompt(15, seed=7)

    def chat(cache):
        one = generate(model, first, 8, past_key_values=cache)
        two = generate(model, torch.cat([one.sequences, more], 1), 8, past_key_values=cache)
        return two, cache.get_seq_length()

    expected, length = chat(DynamicCache(config=model.config))
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        with kvlab.compress(model, everything(name), turns="leave"):
            found, seen = chat(cache)
        agree(found, expected)
        assert seen == length == 40 + 8 + 15 + 7 and isinstance(cache, DynamicCache)


def test_what_a_cache_tells_of_itself_is_what_is_stored(tiny):
    model = tiny().model
    cache, bare = fed(model, prompt(40, rows=2), small("snapkv")), plain(model, prompt(40, rows=2))
    assert cache.layers[0].keys.shape == (2, 2, 14, 16) and cache.get_seq_length() == 40 and len(cache) == len(bare)
    assert cache.batch_size == 2 and [len(entry) for entry in cache] == [3, 3]
    whole = fed(model, prompt(40, rows=2))
    for (keys, values, _), (wanted_keys, wanted_values, _) in zip(whole, bare, strict=True):
        torch.testing.assert_close(keys, wanted_keys)
        torch.testing.assert_close(values, wanted_values)
    for name in ("is_compileable", "is_croppable", "is_sliding", "is_linear", "is_dummy", "is_initialized"):
        assert getattr(whole, name) == getattr(bare, name), name
    assert whole.get_max_length() == bare.get_max_length() and whole.get_query_offset() == bare.get_query_offset()
    assert whole.get_mask_sizes(3, 0) == bare.get_mask_sizes(3, 0)


def test_reset_begins_anew(tiny):
    model, ids = tiny().model, prompt(30, seed=3)
    expected = generate(model, ids)
    cache = DynamicCache(config=model.config)
    with kvlab.compress(model, small("snapkv")) as session:
        generate(model, prompt(50), past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.batch_size == -1 and session.kv_bytes == 0
        alone = generate(model, ids)
        agree(continued(model, cache, ids), alone)
    cache.reset()
    with kvlab.compress(model, everything("snapkv")):
        agree(continued(model, cache, ids), expected)


def test_a_prefix_is_cropped_back_to_and_used_again(tiny):
    model, prefix = tiny().model, prompt(40)
    cache, bare = DynamicCache(config=model.config), plain(model, prefix)
    with kvlab.compress(model, "full"), torch.no_grad():
        model(prefix, past_key_values=cache)
        for seed in (1, 2):
            ids = torch.cat([prefix, prompt(9, seed=seed)], 1)
            agree(continued(model, cache, ids), continued(model, bare, ids))
            for past in (cache, bare):
                past.crop(40 - past.get_seq_length())
            assert cache.get_seq_length() == bare.get_seq_length() == 40


def test_tokens_are_taken_back_as_long_as_nothing_was_evicted_for_them(tiny):
    model = tiny().model
    with kvlab.compress(model, small("snapkv")), torch.no_grad():
        past = generate(model, prompt(40), 6).past_key_values
        assert past.is_croppable
        past.crop(-5)
        assert past.get_seq_length() == 40 and past.layers[0].keys.shape[2] == 14
        with pytest.raises(KvlabError, match="reaches into a prompt"):
            past.crop(-1)
        with pytest.raises(KvlabError, match=r"crop\(-3\)"):
            past.crop(3)
        with pytest.raises(KvlabError, match="more tokens than the 40"):
            past.crop(-41)
    with kvlab.compress(model, small("h2o")):
        past = generate(model, prompt(40), 6).past_key_values
        assert not past.is_croppable
        with pytest.raises(KvlabError, match="h2o cannot take tokens back"):
            past.crop(-1)


# --- outside the session ---


def test_a_prompt_compressed_inside_is_asked_outside(tiny):
    """kvpress's way. What the model answers over the entries left is what the session itself answers over them."""
    model, ids, question = tiny().model, prompt(60), prompt(7, seed=4)
    for policy in ("full", small("snapkv"), small("knorm"), everything("snapkv")):
        outside = fed(model, ids, policy)
        with torch.no_grad(), kvlab.compress(model, policy, turns="leave") as session:
            inside = DynamicCache(config=model.config)
            model(ids, past_key_values=inside)
            session.end_prompt()
            expected = generate(model, torch.cat([ids, question], 1), past_key_values=inside)
            stored = session.kept(0).shape[1]
        agree(generate(model, torch.cat([ids, question], 1), past_key_values=outside), expected)
        assert outside.get_seq_length() == 60 + 7 + 11 and outside.layers[0].keys.shape[2] == stored
    agree(expected, generate(model, torch.cat([ids, question], 1)))


def test_a_cache_fed_outside_goes_on_inside(tiny):
    model, ids, more = tiny().model, prompt(60), prompt(7, seed=4)
    expected = generate(model, torch.cat([ids, more], 1), 4)
    cache = fed(model, ids)
    with torch.no_grad():
        model(more[:, :3], past_key_values=cache)
        with kvlab.compress(model, "full"):
            agree(continued(model, cache, torch.cat([ids, more], 1), 4), expected)


@pytest.mark.parametrize("name, why", [("h2o", "acts at every step"), ("quest", "acts at every step")])
def test_what_only_a_session_can_serve_is_refused_outside(tiny, name, why):
    model = tiny().model
    cache = fed(model, prompt(60), small(name))
    with pytest.raises(KvlabError, match=f"{name} {why}.*inside `with kvlab.compress"):
        model(prompt(1), past_key_values=cache)


def test_uneven_caches_and_prompts_that_no_policy_has_seen_are_refused_outside(tiny):
    model = tiny().model
    cache = fed(model, prompt(60), kvlab.policy("adakv", budget=40, floor=0.2))
    with pytest.raises(KvlabError, match="different numbers of entries"):
        model(prompt(1), past_key_values=cache)
    with torch.no_grad(), kvlab.compress(model, small("snapkv")):
        cache = model(prompt(60)).past_key_values
    with pytest.raises(KvlabError, match="no policy has compressed yet"):
        model(prompt(1), past_key_values=cache)


# --- copies ---


def test_a_cache_is_copied_whole_and_pickled_as_long_as_it_is(tiny):
    model, ids, more = tiny().model, prompt(40), prompt(5, seed=2)
    cache = fed(model, ids)
    expected = generate(model, torch.cat([ids, more], 1))
    for made in (ForkingPickler.loads(ForkingPickler.dumps(cache)), copy.deepcopy(cache)):
        agree(continued(model, made, torch.cat([ids, more], 1)), expected)
    assert cache.get_seq_length() == 40
    with pytest.raises(KvlabError, match="cannot be pickled"):
        ForkingPickler.dumps(fed(model, ids, small("snapkv")))


def test_a_failed_pass_is_no_past(tiny, monkeypatch):
    model, cache = copy.deepcopy(tiny().model), DynamicCache()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with kvlab.compress(model, "full"), torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(prompt(20), past_key_values=cache)
        handle.remove()
        with pytest.raises(KvlabError, match="failed half-way"):
            model(prompt(1), past_key_values=cache)
        cache.reset()
        model(prompt(20), past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_a_model_is_not_copied_inside_its_session(tiny):
    model = tiny().model
    with kvlab.compress(model, "full"), pytest.raises(KvlabError, match="copy it before"):
        copy.deepcopy(model)
    copy.deepcopy(model)
