"""What a capture records, against transformers' eager attention and against arithmetic by hand, for every family."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from support.eager import attention_by_hand, eager, greedy, queries_before_rope, rope
from support.families import FAMILIES
from support.sessions import UNFIT, state, unfit

import kvlab
from kvlab.core import attention, hooks
from kvlab.errors import KvlabError
from kvlab.inputs import corpus, models
from kvlab.methods import has_budget
from kvlab.traces.run import prefilled, pseudo_queries

PROMPT, STEPS, WINDOW = 21, 6, 9
CLOSE = dict(atol=1e-4, rtol=1e-4)


def prompt(n=PROMPT, seed=1):
    return torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def captured(tiny):
    """captured(family): its model, one capture of it, and what eager attention sees of the same tokens."""

    @functools.cache
    def make(family):
        lm = tiny(family)
        trace = kvlab.capture(lm, prompt(), STEPS, WINDOW, accumulate=True)
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
    ids = prompt()
    assert torch.equal(trace.ids[:PROMPT], ids)
    assert torch.equal(trace.ids[PROMPT:], greedy(lm, ids, STEPS))
    generated = lm.model.generate(ids[None], max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(trace.ids, generated[0])
    assert trace.keys.shape[2] == trace.values.shape[2] == PROMPT + STEPS
    assert trace.response_queries.shape[2] == STEPS
    assert trace.meta["model"] == lm.signature and trace.meta["document"].startswith("ids@")
    assert trace.signature != kvlab.capture(lm, prompt(seed=2), 0).signature


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
    expected = kvlab.capture(lm, prompt(), STEPS, WINDOW)
    ends = models.LM(copy.deepcopy(lm.model), None, lm.name, lm.sha256)
    first = int(expected.ids[PROMPT])
    ends.model.config.eos_token_id = ends.model.generation_config.eos_token_id = first
    assert torch.equal(kvlab.capture(ends, prompt(), STEPS, WINDOW).ids, expected.ids)


@pytest.mark.parametrize("tokens", [4, 3])
def test_as_many_tokens_as_heads_is_no_riddle(tiny, tokens):
    """Qwen3's q-norm puts out [batch, tokens, heads, head_dim]; with 4 tokens and 4 heads its shape says nothing."""
    lm, ids = tiny("tiny-qwen3"), prompt(tokens)
    trace, seen = kvlab.capture(lm, ids, 0, tokens), eager(lm, ids)
    for layer, block in enumerate(lm.model.model.layers):
        expected = queries_before_rope(block.self_attn, seen.hidden[layer], trace.heads)
        torch.testing.assert_close(trace.pre_queries[layer], expected, **CLOSE)


def test_windows_and_all_queries(tiny):
    lm = tiny()
    everything = kvlab.capture(lm, prompt(), STEPS, queries="all")
    assert everything.queries.shape[2] == PROMPT + STEPS
    for window, kept in ((0, 0), (1, 1), (PROMPT, PROMPT), (500, PROMPT)):
        trace = kvlab.capture(lm, prompt(), STEPS, window)
        assert torch.equal(trace.queries, everything.queries[:, :, PROMPT - kept :])
        assert torch.equal(trace.pre_queries, everything.pre_queries[:, :, PROMPT - kept :])
        assert torch.equal(trace.response_queries, everything.response_queries)


def test_a_given_response_is_followed_instead_of_the_greedy_one(tiny):
    lm, given = tiny(), prompt(5, seed=2)
    trace = kvlab.capture(lm, prompt(), 4, WINDOW, response=given)
    assert torch.equal(trace.ids, torch.cat([prompt(), given[:4]])) and trace.meta["response"] == "given"
    seen = eager(lm, trace.ids)
    for layer, expected in enumerate(seen.weights):
        found = attention_by_hand(trace.queries[layer], trace.keys[layer], trace.scaling)
        torch.testing.assert_close(found.float(), expected[:, -WINDOW - 4 :], **CLOSE)
    own = kvlab.capture(lm, prompt(), STEPS, WINDOW)
    again = kvlab.capture(lm, prompt(), STEPS, WINDOW, response=own.ids[PROMPT:])
    assert torch.equal(again.queries, own.queries) and torch.equal(again.keys, own.keys)


def test_bfloat16_is_stored_as_such_and_judged_as_such():
    lm = models.random_lm("tiny-llama-gqa", device="cpu", dtype="bfloat16")
    trace = kvlab.capture(lm, prompt(), STEPS, WINDOW, accumulate=True)
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
    ids = torch.stack([prompt(STEPS, seed) for seed in (3, 4, 5)])
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
    other = kvlab.capture(lm, prompt(seed=6), 0, 0, pseudo=())
    elsewhere = pseudo_queries(lm, prefilled(other), ids, positions)[1]
    torch.testing.assert_close(elsewhere[:, 0], changed[:, 0], **CLOSE)
    assert (elsewhere[:, 1] - changed[:, 1]).abs().amax((1, 3)).min() > 1e-3


def test_pseudo_queries_at_position_0_see_the_whole_prompt(captured):
    """Against a plain run of the same tokens in the same order, of which the last ones are told other positions."""
    lm, trace, _ = captured("tiny-llama-gqa")
    ids, positions = prompt(STEPS, 7), torch.arange(STEPS)
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
            torch.cat([prompt(), ids])[None],
            attention_mask=mask,
            use_cache=False,
            position_ids=torch.cat([torch.arange(PROMPT), positions])[None],
        )
    expected = rope(queries_before_rope(model.model.layers[1].self_attn, seen[0], trace.heads), positions)
    torch.testing.assert_close(post[1].double(), expected, **CLOSE)


def test_captured_pseudo_queries_are_those_that_the_policies_ask_for(tiny):
    lm = tiny()
    wanted = [kvlab.policy("dapq", budget=8, window=5, first=2), kvlab.policy("dapq", budget=8, content="vocabulary")]
    trace = kvlab.capture(lm, prompt(), STEPS, WINDOW, pseudo=[*wanted, "snapkv"])
    assert set(trace.pseudo) == {one.pseudo_key for one in wanted}
    for one in wanted:
        tokens = one.pseudo_tokens(prompt(), 256, None)
        expected, _ = pseudo_queries(lm, prefilled(trace), tokens, torch.arange(len(tokens)) + PROMPT)
        torch.testing.assert_close(trace.prompt.pseudo(one), expected, **CLOSE)
    plain = kvlab.capture(lm, prompt(), STEPS, WINDOW, pseudo=())
    assert plain.pseudo == {}
    for name in ("queries", "pre_queries", "keys", "values", "ids"):  # cropped off without a trace
        assert torch.equal(getattr(plain, name), getattr(trace, name)), name
    with pytest.raises(KvlabError, match="dapq needs pseudo-queries"):
        plain.prompt.pseudo(wanted[0])


# --- the model afterwards ---


@pytest.mark.parametrize("family", ["tiny-llama-gqa", "tiny-qwen3"])
def test_the_model_is_as_it_was(tiny, family):
    lm = tiny(family)
    before, logits = state(lm.model), lm.model(prompt()[None]).logits
    trace = kvlab.capture(lm, prompt(), STEPS, accumulate=True)
    cache = prefilled(trace)
    pseudo_queries(lm, cache, prompt(4), torch.arange(4))
    assert state(lm.model) == before and torch.equal(lm.model(prompt()[None]).logits, logits)
    assert cache.get_seq_length() == PROMPT and {layer.store.length for layer in cache.layers} == {PROMPT}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 4, 7])  # 2 layers: the prefill, the pseudo-queries, and the third step
def test_the_model_is_as_it_was_after_a_failure(tiny, monkeypatch, call, error):
    lm, calls = tiny(), []
    expected = kvlab.capture(lm, prompt(), STEPS)
    before, logits = state(lm.model), lm.model(prompt()[None]).logits
    plain = hooks.attend

    def fails(*args):
        calls.append(args)
        if len(calls) == call:
            raise error("out of luck")
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "attend", fails)
        with pytest.raises(error, match="out of luck"):
            kvlab.capture(lm, prompt(), STEPS)
    assert state(lm.model) == before and torch.equal(lm.model(prompt()[None]).logits, logits)
    assert torch.equal(kvlab.capture(lm, prompt(), STEPS).queries, expected.queries)


@pytest.mark.parametrize("call", [1, 2])
def test_a_failure_among_pseudo_queries_leaves_the_cache_cropped(tiny, monkeypatch, call):
    lm, calls, plain = tiny(), [], hooks.attend
    cache = prefilled(kvlab.capture(lm, prompt(), 0))
    expected = pseudo_queries(lm, cache, prompt(4), torch.arange(4))

    def fails(*args):
        calls.append(args)
        if len(calls) == call:
            raise RuntimeError("out of luck")
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "attend", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            pseudo_queries(lm, cache, prompt(4), torch.arange(4))
    assert {layer.store.length for layer in cache.layers} == {layer.store.seen for layer in cache.layers} == {PROMPT}
    for found, before in zip(pseudo_queries(lm, cache, prompt(4), torch.arange(4)), expected, strict=True):
        assert torch.equal(found, before)


# --- refused before anything runs ---


@pytest.fixture
def still(monkeypatch):
    """still(lm): the same model, whose forward pass must not be called."""

    def make(lm):
        monkeypatch.setattr(lm.model, "forward", lambda *_a, **_k: pytest.fail("the model ran"))
        return lm

    return make


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_cannot_be_hooked(still, name):
    lm, message = unfit(name)
    with pytest.raises(KvlabError, match=message):
        kvlab.capture(still(lm), prompt(8) % 60, 2)


def test_a_sliding_window_must_span_the_sequence_and_then_is_none(tiny, monkeypatch):
    lm = tiny("tiny-mistral", sliding_window=16)
    trace = kvlab.capture(lm, prompt(10), STEPS, 10, pseudo=())
    for layer, expected in enumerate(eager(lm, trace.ids).weights):
        found = attention_by_hand(trace.queries[layer], trace.keys[layer], trace.scaling)
        torch.testing.assert_close(found.float(), expected, **CLOSE)
    monkeypatch.setattr(lm.model, "forward", lambda *_a, **_k: pytest.fail("the model ran"))
    with pytest.raises(KvlabError, match="sees a window of 16 tokens, and the sequence has 17"):
        kvlab.capture(lm, prompt(11), STEPS, pseudo=())
    with pytest.raises(KvlabError, match="the sequence has 18"):  # eight pseudo-tokens count as well
        kvlab.capture(lm, prompt(10), STEPS, pseudo=[kvlab.policy("dapq", budget=4, window=8)])


def test_prompts_beyond_the_context(tiny, still):
    lm = tiny(max_position_embeddings=32)
    assert kvlab.capture(lm, prompt(26), 6, pseudo=()).length == 32
    with pytest.raises(KvlabError, match="27 tokens and 6 follow it, which is beyond the 32 that random:tiny-llama"):
        kvlab.capture(still(lm), prompt(27), 6, pseudo=())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(text_or_ids="  \n "), "the document is empty"),
        (dict(text_or_ids=[]), "the prompt is empty"),
        (dict(text_or_ids=torch.zeros(1, 0)), "the prompt is empty"),
        (dict(text_or_ids="a text"), "no tokenizer"),
        (dict(text_or_ids={"ids": [3]}), "a text, a Document or token ids, and not dict"),
        (
            dict(text_or_ids=torch.zeros(2, 5, dtype=torch.int64)),
            r"one sequence .* \(2, 5\); capture several as a list",
        ),
        (dict(text_or_ids=[3.5, 4.0]), "whole token ids"),
        (dict(text_or_ids=[3, 256]), r"the prompt has the token id 256, and random:tiny-llama-gqa knows 0 \.\. 255"),
        (dict(text_or_ids=[3, -1]), "the prompt has the token id -1"),
        (dict(response=[5, 999]), "the response has the token id 999"),
        (dict(new_tokens=-1), "must not be negative, and are -1 and 32"),
        (dict(window=-2), "must not be negative, and are 64 and -2"),
        (dict(queries="some"), "queries='some': it is 'all'"),
        (dict(pseudo=["dapk"]), "did you mean 'dapq'"),
        (dict(pseudo=[kvlab.policy("dapq", budget=4, content="sentence")]), "no tokenizer"),
        (dict(text_or_ids=[[3, 4], [5, 6]], response=[7]), "one response cannot follow several documents"),
    ],
)
def test_bad_arguments_get_a_sentence(tiny, still, arguments, message):
    with pytest.raises(KvlabError, match=message):
        kvlab.capture(still(tiny()), **({"text_or_ids": [3, 4, 5]} | arguments))


def test_no_capture_inside_another_session(tiny):
    lm = tiny()
    with hooks.hooked(lm.model, lambda call: call.attend()), pytest.raises(KvlabError, match="already inside"):
        kvlab.capture(lm, prompt())
    assert kvlab.capture(lm, prompt(), 0).steps == 0


# --- texts, documents, lists ---


def test_texts_and_documents_become_user_messages(lm):
    text = "The gangway was wet."
    chat = kvlab.capture(lm, text, 2, pseudo=())
    assert torch.equal(chat.ids[:-2], lm.encode(text)[0]) and chat.meta["chat"] == "auto"
    plain = kvlab.capture(lm, text, 2, chat=False, pseudo=())
    assert torch.equal(plain.ids[:-2], lm.encode(text, chat=False)[0]) and plain.prompt_length < chat.prompt_length
    document = corpus.Document("gangway", text)
    found = kvlab.capture(lm, document, 2, pseudo=())
    assert torch.equal(found.queries, chat.queries)
    assert found.signature == f"{lm.signature}|{document.signature}"
    sentence = kvlab.capture(lm, text, 1, pseudo=[kvlab.policy("dapq", budget=8, content="sentence", window=10)])
    assert sentence.pseudo.keys() == {"sentence/Sorry, I don't know. /10"}


@pytest.mark.parametrize(
    "several",
    [
        [[3, 4, 5, 6], [7, 8, 9]],
        [torch.tensor([3, 4, 5, 6]), torch.tensor([[7, 8, 9]])],
        (torch.tensor([3, 4, 5, 6]).numpy(), [7, 8, 9]),
    ],
)
def test_a_list_of_prompts_gives_a_list_of_traces(tiny, several):
    first, second = kvlab.capture(tiny(), several, 2, progress=False)
    assert first.ids[:-2].tolist() == [3, 4, 5, 6] and second.ids[:-2].tolist() == [7, 8, 9]
    one = kvlab.capture(tiny(), torch.tensor([7, 8, 9]), 2)
    assert torch.equal(second.queries, one.queries)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 4, 5],
        (3, 4, 5),
        torch.tensor([[3, 4, 5]]),
        list(torch.tensor([3, 4, 5])),
        list(torch.tensor([3, 4, 5]).numpy()),
        torch.tensor([3, 4, 5], dtype=torch.int32),
    ],
)
def test_token_ids_come_in_any_dress(tiny, ids):
    trace = kvlab.capture(tiny(), ids, 0)
    assert trace.ids.tolist() == [3, 4, 5] and trace.ids.dtype == torch.int64


@pytest.mark.parametrize("name", kvlab.policies())
def test_a_trace_captured_for_a_policy_has_what_it_needs(tiny, name):
    lm = tiny("tiny-llama-gqa")
    one = kvlab.policy(name, budget=70) if has_budget(name) else kvlab.policy(name)
    trace = kvlab.capture(lm, torch.arange(3, 120), new_tokens=3, window=1, pseudo=(), policies=[one])
    assert 0 <= kvlab.replay(trace, one).summary["mass_lost"] < 1
    assert (trace.accumulated is not None) == one.accumulates
    assert (trace.queries.shape[2] == 117 + 3) == (one.observes is None or one.needs.pre_queries)
    by_name = kvlab.capture(lm, torch.arange(3, 120), new_tokens=3, window=1, pseudo=(), policies=[name])
    assert kvlab.replay(by_name, one).kept(0).equal(kvlab.replay(trace, one).kept(0))
