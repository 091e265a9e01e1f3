"""Mistakes that other projects have made, looked for in every policy: batches, repeated heads, budgets, positions."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from support.live_runs import SMALL, WITHOUT_BUDGET, generate, prompt
from support.tensors import sets

import kvlab
from kvlab.methods import registry

LENGTH, STEPS, KV_HEADS, LAYERS = 80, 5, 2, 2
ENTRY = 2 * 16 * 4  # bytes of a key and a value of 16 float32 numbers
BOUNDS_PROMPT = [name for name in SMALL if registry()[name].kind in ("score at prefill", "allocation")]
BOUNDS_PROMPT += ["random", "merging", "rerotated", "attention_matching"]
BOUNDS_ALL = [name for name in SMALL if registry()[name].kind == "decoding"] + ["zsmerge"]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(duoattention|compilerkv)")
        yield


def policy(name, **more):
    return kvlab.policy(name, **((SMALL | WITHOUT_BUDGET)[name] | more))


@pytest.fixture(scope="module")
def trace(tiny):
    """One capture with all that any policy asks for."""
    every = [policy(name) for name in SMALL | WITHOUT_BUDGET]
    return kvlab.capture(tiny("tiny-llama-gqa"), prompt(LENGTH), STEPS, policies=every)


def run(tiny, one, ids):
    with kvlab.compress(tiny("tiny-llama-gqa").model, one, max_new_tokens=STEPS) as session:
        generate(session.model, ids, STEPS + 1)
    return session


def entries(kept):
    return sum(map(len, kept))


@pytest.mark.parametrize("name", SMALL | WITHOUT_BUDGET)
def test_every_sample_of_a_batch_is_compressed_as_if_alone(tiny, name):
    ids = torch.cat([prompt(60, seed=seed) for seed in (1, 2, 3)])
    together = run(tiny, policy(name), ids)
    for row in range(3):
        alone = run(tiny, policy(name), ids[row : row + 1])
        for layer in range(LAYERS):
            assert sets(together.kept_after_prefill(layer, row)) == sets(alone.kept_after_prefill(layer))
            assert sets(together.kept(layer, row)) == sets(alone.kept(layer))


@pytest.mark.parametrize("name", SMALL | WITHOUT_BUDGET)
def test_entries_are_stored_for_each_kv_head_and_never_repeated(tiny, name):
    session = run(tiny, policy(name), prompt(LENGTH))
    stored = 0
    for layer in range(LAYERS):
        assert len(session.kept(layer)) == KV_HEADS
        stored += entries(sets(session.kept(layer)))
    thin = 6 * 4 * (LENGTH - 8) * LAYERS * KV_HEADS if name == "think" else 0
    assert session.kv_bytes == stored * ENTRY - thin


@pytest.mark.parametrize("name", BOUNDS_PROMPT)
@pytest.mark.parametrize("more", [0, 3, 20])
def test_the_budget_counts_sinks_and_window_and_is_spent(trace, name, more):
    """Over all layers and heads, since some share it out; from the least that the method works with."""
    one = policy(name)
    one = one.replace(budget=max(one.minimum, one.budget if name == "duoattention" else 0) + more)
    kept = [sets(kvlab.replay(trace, one).kept(layer)) for layer in range(LAYERS)]
    total = one.budget * LAYERS * KV_HEADS
    assert sum(map(entries, kept)) <= total
    if name not in ("compilerkv", "duoattention", "simlayerkv"):  # whose layers stream or do not, as wholes
        assert sum(map(entries, kept)) >= total - LAYERS * KV_HEADS, "nothing but rounding is left over"


@pytest.mark.parametrize("name", BOUNDS_ALL)
def test_while_decoding_the_budget_bounds_all_that_is_stored(trace, name):
    one = policy(name)
    result = kvlab.replay(trace, one)
    most = one.budget + (one.interval - 1 if name == "decoding" else 0)  # what gathers between two passes
    for step in range(1 if name == "morphkv" else 0, STEPS + 1):  # MorphKV prunes first at the first step
        assert all(len(head) <= most for layer in range(LAYERS) for head in sets(result.stored(layer, step)))


@pytest.mark.parametrize("name", SMALL)
def test_a_fraction_is_one_of_the_prompt_with_all_that_stays(trace, name):
    one = policy(name, budget=40)
    whole, part = kvlab.replay(trace, one), kvlab.replay(trace, one.replace(budget=0.5))
    assert part.budget == 40 == LENGTH * 0.5 and not part.raised
    for layer in range(LAYERS):
        assert part.kept(layer).equal(whole.kept(layer))


@pytest.mark.parametrize("name", [*BOUNDS_PROMPT, *BOUNDS_ALL])
def test_new_entries_stand_where_the_sequence_is_and_not_where_the_store_is(tiny, name):
    """The first layer's keys of the same tokens are those of the full cache, turned by their own positions."""
    one, lm = policy(name), tiny("tiny-llama-gqa")
    with kvlab.compress(lm.model, one, max_new_tokens=STEPS) as session:
        out = generate(lm.model, prompt(LENGTH), STEPS + 1)
    full = kvlab.capture(lm, prompt(LENGTH), STEPS, response=out.sequences[0, LENGTH:-1])
    store = session._cache.compressed[0].groups[0].store
    positions = store.positions[0]
    assert int(positions.max()) >= LENGTH + STEPS - 2
    for head, where in enumerate(sets(positions)):
        new = [slot for slot, position in enumerate(where) if position >= LENGTH]
        expected = full.keys[0, head, [where[slot] for slot in new]]
        if name != "zsmerge":  # which merges what it has no room for
            torch.testing.assert_close(store.keys[0, head, new], expected, atol=1e-5, rtol=1e-4)
        assert one.needs.acts_while_decoding or len(new) == STEPS


def test_a_session_and_its_cache_go_when_nobody_holds_them(tiny):
    """And not when Python next looks for circles, which it seldom does for so few objects, however large."""
    model = tiny("tiny-llama-gqa").model
    gc.collect()
    gc.disable()
    try:
        session = run(tiny, policy("snapkv"), prompt(60))
        with kvlab.compress(model, policy("h2o"), max_new_tokens=STEPS) as second:
            branch = copy.deepcopy(model(prompt(60), use_cache=True).past_key_values)
        assert branch.layers[0]._cache is branch
        watched = [weakref.ref(each) for each in (session, session._cache, second, branch, session._cache.layers[0])]
        assert all(each() is not None for each in watched)
        del session, second, branch
        assert [each() for each in watched] == [None] * 5
    finally:
        gc.enable()


def test_a_cache_outlives_its_session_and_goes_on_in_another(tiny):
    model, ids = tiny("tiny-llama-gqa").model, prompt(60)
    with kvlab.compress(model, policy("snapkv"), turns="leave") as session:
        past = model(ids, use_cache=True).past_key_values
    kept = [session.kept_after_prefill(layer) for layer in range(LAYERS)] if past.ended else None
    del session
    gc.collect()
    with kvlab.compress(model, policy("snapkv"), turns="leave") as another:
        again = model(ids[:, :1], past_key_values=past, use_cache=True).past_key_values
        assert again is past and past.belongs_to(another)
        assert kept is None and max(map(len, another.kept_after_prefill(0))) < 60
    assert model(ids[:, :1], past_key_values=past, use_cache=True).past_key_values.get_seq_length() == 62
