"""What a capture takes - texts, documents, token ids, lists of them - and what it refuses before anything runs."""

from __future__ import annotations

import pytest
import torch
from support.eager import CLOSE, attention_by_hand, eager, sequence
from support.sessions import UNFIT, unfit

import kvlab
from kvlab.core import hooks
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.methods import has_budget

STEPS = 6


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
        kvlab.capture(still(lm), sequence(8) % 60, 2)


def test_a_sliding_window_must_span_the_sequence_and_then_is_none(tiny, monkeypatch):
    lm = tiny("tiny-mistral", sliding_window=16)
    trace = kvlab.capture(lm, sequence(10), STEPS, 10, pseudo=())
    for layer, expected in enumerate(eager(lm, trace.ids).weights):
        found = attention_by_hand(trace.queries[layer], trace.keys[layer], trace.scaling)
        torch.testing.assert_close(found.float(), expected, **CLOSE)
    monkeypatch.setattr(lm.model, "forward", lambda *_a, **_k: pytest.fail("the model ran"))
    with pytest.raises(KvlabError, match="sliding window, layer . of 16 tokens; .*, not 17"):
        kvlab.capture(lm, sequence(11), STEPS, pseudo=())
    with pytest.raises(KvlabError, match="16 tokens, not 18"):  # eight pseudo-tokens count as well
        kvlab.capture(lm, sequence(10), STEPS, pseudo=[kvlab.policy("dapq", budget=4, window=8)])


def test_prompts_beyond_the_context(tiny, still):
    lm = tiny(max_position_embeddings=32)
    assert kvlab.capture(lm, sequence(26), 6, pseudo=()).length == 32
    with pytest.raises(KvlabError, match="27 tokens and 6 follow it, which is beyond the 32 that random:tiny-llama"):
        kvlab.capture(still(lm), sequence(27), 6, pseudo=())


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
        kvlab.capture(lm, sequence())
    assert kvlab.capture(lm, sequence(), 0).steps == 0


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
    assert (trace.accumulated is not None) == one.needs.accumulated
    assert (trace.queries.shape[2] == 117 + 3) == one.needs.every_query
    by_name = kvlab.capture(lm, torch.arange(3, 120), new_tokens=3, window=1, pseudo=(), policies=[name])
    assert kvlab.replay(by_name, one).kept(0).equal(kvlab.replay(trace, one).kept(0))
