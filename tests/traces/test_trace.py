"""What a capture records, against transformers' eager attention and against arithmetic by hand, for every family."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from support.eager import CLOSE, attention_by_hand, eager, greedy, queries_before_rope, rope, sequence
from support.families import FAMILIES
from support.sessions import state

import kvlab
from kvlab.core import attention, hooks
from kvlab.errors import KvlabError
from kvlab.inputs import models
from kvlab.traces.passes import prefilled, pseudo_queries

PROMPT, STEPS, WINDOW = 21, 6, 9


@pytest.fixture(scope="module")
def captured(tiny):
    """captured(family): its model, one capture of it, and what eager attention sees of the same tokens."""

    @functools.cache
    def make(family):
        lm = tiny(family)
        trace = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, accumulate=True)
        return lm, trace, eager(lm, trace.ids)

    return make


# --- what is recorded ---


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_and_keys_give_the_models_own_attention(captured, family):
    _, trace, seen = captured(family)
    assert (trace.prompt_length, trace.steps, trace.queries.shape[2]) == (PROMPT, STEPS, WINDOW + STEPS)
    for layer, expected in enumerate(seen.weights):
        found = attention_by_hand(trace.queries[layer], trace.keys[layer], trace.scaling)
        torch.testing.assert_close(found.float(), expected[:, -WINDOW - STEPS :], **CLOSE)
        ours = attention.weights(
            trace.queries[layer], trace.keys[layer], trace.scaling, attention.last_visible(WINDOW + STEPS, trace.length)
        )
        torch.testing.assert_close(ours, expected[:, -WINDOW - STEPS :], **CLOSE)
        mixed = attention.output(ours, trace.values[layer]).transpose(0, 1).flatten(1)
        torch.testing.assert_close(mixed, seen.mixed[layer][-WINDOW - STEPS :], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulated_attention_is_the_sum_over_all_prompt_queries(captured, family):
    _, trace, seen = captured(family)
    expected = torch.stack([w[:, :PROMPT, :PROMPT].sum(1) for w in seen.weights])
    torch.testing.assert_close(trace.accumulated, expected, **CLOSE)
    assert trace.prompt.accumulated(None) is trace.accumulated


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_before_rope_are_the_projection_and_rotate_into_the_others(captured, family):
    lm, trace, seen = captured(family)
    positions = torch.arange(trace.length)[-WINDOW - STEPS :]
    for layer, block in enumerate(lm.model.model.layers):
        expected = queries_before_rope(block.self_attn, seen.hidden[layer], trace.heads)[:, -WINDOW - STEPS :]
        torch.testing.assert_close(trace.pre_queries[layer], expected, **CLOSE)
        torch.testing.assert_close(trace.queries[layer].double(), rope(trace.pre_queries[layer], positions), **CLOSE)
    assert torch.equal(trace.response_pre_queries, trace.pre_queries[:, :, -STEPS:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_response_is_the_greedy_one_and_its_last_token_is_fed(captured, family):
    lm, trace, _ = captured(family)
    ids = sequence(PROMPT)
    assert torch.equal(trace.ids[:PROMPT], ids)
    assert torch.equal(trace.ids[PROMPT:], greedy(lm, ids, STEPS))
    generated = lm.model.generate(ids[None], max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(trace.ids, generated[0])
    assert trace.keys.shape[2] == trace.values.shape[2] == PROMPT + STEPS
    assert trace.response_queries.shape[2] == STEPS
    assert trace.meta["model"] == lm.signature and trace.meta["document"].startswith("ids@")
    assert trace.signature != kvlab.capture(lm, sequence(PROMPT, seed=2), 0).signature


def test_the_real_model_is_recorded_as_well(lm, trace):
    seen = eager(lm, trace.ids)
    n = trace.queries.shape[2]
    assert n == 64 + 24 and 380 <= trace.prompt_length <= 480
    for layer in (0, 13, 29):
        found = attention_by_hand(trace.queries[layer], trace.keys[layer], trace.scaling)
        torch.testing.assert_close(found.float(), seen.weights[layer][:, -n:], **CLOSE)
    assert torch.equal(trace.ids[trace.prompt_length :], seen.logits.argmax(-1)[trace.prompt_length - 1 : -1])
    last = torch.arange(trace.length)[-n:]
    torch.testing.assert_close(trace.queries[7].double(), rope(trace.pre_queries[7], last, 1e5), atol=1e-3, rtol=1e-3)


def test_an_end_of_sequence_token_is_no_stop(tiny):
    lm = tiny()
    expected = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW)
    ends = models.LM(copy.deepcopy(lm.model), None, lm.name, lm.sha256)
    first = int(expected.ids[PROMPT])
    ends.model.config.eos_token_id = ends.model.generation_config.eos_token_id = first
    assert torch.equal(kvlab.capture(ends, sequence(PROMPT), STEPS, WINDOW).ids, expected.ids)


@pytest.mark.parametrize("tokens", [4, 3])
def test_as_many_tokens_as_heads_is_no_riddle(tiny, tokens):
    """Qwen3's q-norm puts out [batch, tokens, heads, head_dim]; with 4 tokens and 4 heads its shape says nothing."""
    lm, ids = tiny("tiny-qwen3"), sequence(tokens)
    trace, seen = kvlab.capture(lm, ids, 0, tokens), eager(lm, ids)
    for layer, block in enumerate(lm.model.model.layers):
        expected = queries_before_rope(block.self_attn, seen.hidden[layer], trace.heads)
        torch.testing.assert_close(trace.pre_queries[layer], expected, **CLOSE)


def test_windows_and_all_queries(tiny):
    lm = tiny()
    everything = kvlab.capture(lm, sequence(PROMPT), STEPS, queries="all")
    assert everything.queries.shape[2] == PROMPT + STEPS
    for window, kept in ((0, 0), (1, 1), (PROMPT, PROMPT), (500, PROMPT)):
        trace = kvlab.capture(lm, sequence(PROMPT), STEPS, window)
        assert torch.equal(trace.queries, everything.queries[:, :, PROMPT - kept :])
        assert torch.equal(trace.pre_queries, everything.pre_queries[:, :, PROMPT - kept :])
        assert torch.equal(trace.response_queries, everything.response_queries)


def test_a_given_response_is_followed_instead_of_the_greedy_one(tiny):
    lm, given = tiny(), sequence(5, seed=2)
    trace = kvlab.capture(lm, sequence(PROMPT), 4, WINDOW, response=given)
    assert torch.equal(trace.ids, torch.cat([sequence(PROMPT), given[:4]])) and trace.meta["response"] == "given"
    seen = eager(lm, trace.ids)
    for layer, expected in enumerate(seen.weights):
        found = attention_by_hand(trace.queries[layer], trace.keys[layer], trace.scaling)
        torch.testing.assert_close(found.float(), expected[:, -WINDOW - 4 :], **CLOSE)
    own = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW)
    again = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, response=own.ids[PROMPT:])
    assert torch.equal(again.queries, own.queries) and torch.equal(again.keys, own.keys)


def test_bfloat16_is_stored_as_such_and_judged_as_such():
    lm = models.random_lm("tiny-llama-gqa", device="cpu", dtype="bfloat16")
    trace = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, accumulate=True)
    assert {t.dtype for t in (trace.queries, trace.pre_queries, trace.keys, trace.values)} == {torch.bfloat16}
    assert trace.accumulated.dtype == torch.float32
    torch.testing.assert_close(trace.accumulated.sum(-1), torch.full((2, 4), float(PROMPT)), atol=1e-3, rtol=0)
    seen = eager(lm, trace.ids)
    found = attention_by_hand(trace.queries[0], trace.keys[0], trace.scaling)
    torch.testing.assert_close(found.float(), seen.weights[0][:, -WINDOW - STEPS :].float(), atol=2e-2, rtol=0)


# --- pseudo-queries ---


@pytest.mark.parametrize("family", FAMILIES)
def test_pseudo_queries_with_the_true_tokens_in_place_are_the_decoding_queries(captured, family):
    lm, trace, _ = captured(family)
    keys = trace.keys.clone()
    post, pre = pseudo_queries(lm, prefilled(trace), trace.ids[PROMPT:], torch.arange(STEPS) + PROMPT)
    torch.testing.assert_close(post, trace.response_queries, **CLOSE)
    torch.testing.assert_close(pre, trace.response_pre_queries, **CLOSE)
    assert torch.equal(trace.keys, keys)


@pytest.mark.parametrize("family", ["tiny-llama-mqa", "tiny-qwen3", "tiny-phi3"])
def test_trials_see_the_prompt_and_their_own_trial_only(captured, family):
    lm, trace, _ = captured(family)
    cache = prefilled(trace)
    ids = torch.stack([sequence(STEPS, seed) for seed in (3, 4, 5)])
    positions = torch.stack([torch.arange(STEPS) + start for start in (0, PROMPT, 900)])
    together = pseudo_queries(lm, cache, ids, positions)
    for trial in range(3):
        alone = pseudo_queries(lm, cache, ids[trial], positions[trial])
        for some, one in zip(together, alone, strict=True):
            torch.testing.assert_close(some[trial], one, **CLOSE)
    for post, pre, at in zip(*together, positions, strict=True):
        torch.testing.assert_close(post.double(), rope(pre, at), **CLOSE)

    # Another last token changes no query before it; another prompt changes those of layer 1, which have attended.
    ids[1, -1] += 1
    changed = pseudo_queries(lm, cache, ids, positions)[1]
    torch.testing.assert_close(changed[1, :, :, :-1], together[1][1, :, :, :-1], **CLOSE)
    other = kvlab.capture(lm, sequence(PROMPT, seed=6), 0, 0, pseudo=())
    elsewhere = pseudo_queries(lm, prefilled(other), ids, positions)[1]
    torch.testing.assert_close(elsewhere[:, 0], changed[:, 0], **CLOSE)
    assert (elsewhere[:, 1] - changed[:, 1]).abs().amax((1, 3)).min() > 1e-3


def test_pseudo_queries_at_position_0_see_the_whole_prompt(captured):
    """Against a plain run of the same tokens in the same order, of which the last ones are told other positions."""
    lm, trace, _ = captured("tiny-llama-gqa")
    ids, positions = sequence(STEPS, 7), torch.arange(STEPS)
    post, _ = pseudo_queries(lm, prefilled(trace), ids, positions)
    model = copy.deepcopy(lm.model)
    seen = []
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append(kwargs["hidden_states"][0, -STEPS:]), with_kwargs=True
    )
    mask = torch.zeros(1, 1, PROMPT + STEPS, PROMPT + STEPS)
    mask += torch.full_like(mask, -1e9).triu(1)
    with torch.no_grad():
        model(
            torch.cat([sequence(PROMPT), ids])[None],
            attention_mask=mask,
            use_cache=False,
            position_ids=torch.cat([torch.arange(PROMPT), positions])[None],
        )
    expected = rope(queries_before_rope(model.model.layers[1].self_attn, seen[0], trace.heads), positions)
    torch.testing.assert_close(post[1].double(), expected, **CLOSE)


def test_captured_pseudo_queries_are_those_that_the_policies_ask_for(tiny):
    lm = tiny()
    wanted = [kvlab.policy("dapq", budget=8, window=5, first=2), kvlab.policy("dapq", budget=8, content="vocabulary")]
    trace = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, pseudo=[*wanted, "snapkv"])
    assert set(trace.pseudo) == {one.pseudo_key for one in wanted}
    for one in wanted:
        tokens = one.pseudo_tokens(sequence(PROMPT), 256, None)
        expected, _ = pseudo_queries(lm, prefilled(trace), tokens, torch.arange(len(tokens)) + PROMPT)
        torch.testing.assert_close(trace.prompt.pseudo(one), expected, **CLOSE)
    plain = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, pseudo=())
    assert plain.pseudo == {}
    for name in ("queries", "pre_queries", "keys", "values", "ids"):  # cropped off without a trace
        assert torch.equal(getattr(plain, name), getattr(trace, name)), name
    with pytest.raises(KvlabError, match="dapq needs pseudo-queries"):
        plain.prompt.pseudo(wanted[0])


# --- the model afterwards ---


@pytest.mark.parametrize("family", ["tiny-llama-gqa", "tiny-qwen3"])
def test_the_model_is_as_it_was(tiny, family):
    lm = tiny(family)
    before, logits = state(lm.model), lm.model(sequence(PROMPT)[None]).logits
    trace = kvlab.capture(lm, sequence(PROMPT), STEPS, accumulate=True)
    cache = prefilled(trace)
    pseudo_queries(lm, cache, sequence(4), torch.arange(4))
    assert state(lm.model) == before and torch.equal(lm.model(sequence(PROMPT)[None]).logits, logits)
    assert cache.get_seq_length() == PROMPT and {layer.store.length for layer in cache.layers} == {PROMPT}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 4, 7])  # 2 layers: the prefill, the pseudo-queries, and the third step
def test_the_model_is_as_it_was_after_a_failure(tiny, monkeypatch, call, error):
    lm, calls = tiny(), []
    expected = kvlab.capture(lm, sequence(PROMPT), STEPS)
    before, logits = state(lm.model), lm.model(sequence(PROMPT)[None]).logits
    plain = hooks.attend

    def fails(*args):
        calls.append(args)
        if len(calls) == call:
            raise error("out of luck")
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "attend", fails)
        with pytest.raises(error, match="out of luck"):
            kvlab.capture(lm, sequence(PROMPT), STEPS)
    assert state(lm.model) == before and torch.equal(lm.model(sequence(PROMPT)[None]).logits, logits)
    assert torch.equal(kvlab.capture(lm, sequence(PROMPT), STEPS).queries, expected.queries)


@pytest.mark.parametrize("call", [1, 2])
def test_a_failure_among_pseudo_queries_leaves_the_cache_cropped(tiny, monkeypatch, call):
    lm, calls, plain = tiny(), [], hooks.attend
    cache = prefilled(kvlab.capture(lm, sequence(PROMPT), 0))
    expected = pseudo_queries(lm, cache, sequence(4), torch.arange(4))

    def fails(*args):
        calls.append(args)
        if len(calls) == call:
            raise RuntimeError("out of luck")
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "attend", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            pseudo_queries(lm, cache, sequence(4), torch.arange(4))
    assert {layer.store.length for layer in cache.layers} == {layer.store.seen for layer in cache.layers} == {PROMPT}
    for found, before in zip(pseudo_queries(lm, cache, sequence(4), torch.arange(4)), expected, strict=True):
        assert torch.equal(found, before)
