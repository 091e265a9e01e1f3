"""Likelihoods and responses on a compressed cache, against plain transformers and sessions written out by hand.

None of this needs the harness.
"""

from __future__ import annotations

import sys

import pytest
import torch
from support.live_runs import everything, prompt, small
from transformers import GenerationConfig

import kvlab
from kvlab import cli
from kvlab.harness.reading import Reader
from kvlab.harness.settings import generation

SOME = ["streamingllm", "snapkv", "h2o", "zsmerge", "quest", "adakv", "kvzip"]
CONTEXT, CONTINUATION = prompt(70, 3)[0].tolist(), prompt(6, 4)[0].tolist()


@pytest.fixture(scope="module")
def model(reader):
    return reader


def plain(lm, context, continuation):
    """The log-likelihood of each token of a continuation, by one pass of the model."""
    with torch.inference_mode():
        logits = lm.model(torch.tensor([[*context, *continuation]])).logits[0].log_softmax(-1)
    return [float(logits[len(context) - 1 + i, token]) for i, token in enumerate(continuation)]


def by_hand(lm, policy, context, continuation, compressed):
    """The same with a session, token by token behind what is compressed."""
    ids, told = torch.tensor([[*context, *continuation]]), []
    options = dict(turns="leave", tokenizer=lm.tokenizer, max_new_tokens=len(continuation))
    with kvlab.compress(lm.model, policy, **options) as session, torch.inference_mode():
        past = lm.model(ids[:, :compressed]).past_key_values
        session.end_prompt()
        if compressed < len(context) - 1:
            lm.model(ids[:, compressed : len(context) - 1], past_key_values=past)
        for place, token in enumerate(continuation, len(context) - 1):
            logits = lm.model(ids[:, place : place + 1], past_key_values=past).logits[0, -1]
            told.append(float(logits.log_softmax(-1)[token]))
    return sum(told), session


@pytest.mark.parametrize("compressed", [None, 40])
def test_the_full_cache_finds_the_likelihood_of_plain_transformers(model, compressed):
    found = Reader(model, kvlab.policy("full")).likelihood(CONTEXT, CONTINUATION, compressed)
    assert found.logprob == pytest.approx(sum(plain(model, CONTEXT, CONTINUATION)), abs=1e-3)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("compressed", [69, 40])
def test_a_likelihood_is_that_of_a_session_by_hand(model, name, compressed):
    found = Reader(model, small(name)).likelihood(CONTEXT, CONTINUATION, compressed)
    wanted, session = by_hand(model, small(name), CONTEXT, CONTINUATION, compressed)
    assert found.logprob == pytest.approx(wanted, abs=1e-4)
    assert (found.held.stored_bytes, found.held.read_bytes) == (
        session.kv_bytes + session.aux_bytes,
        session.read_bytes,
    )
    assert (found.held.prompt_tokens, found.held.compressed_tokens) == (70, compressed)


@pytest.mark.parametrize("name", SOME)
def test_even_one_token_is_told_by_the_compressed_cache(model, name):
    """A choice such as " A" has no more; taken from the prefill, every policy would do as well as the full cache."""
    (whole,) = plain(model, CONTEXT, CONTINUATION[:1])
    assert abs(Reader(model, small(name)).likelihood(CONTEXT, CONTINUATION[:1]).logprob - whole) > 1e-3
    kept = Reader(model, everything(name)).likelihood(CONTEXT, CONTINUATION[:1])
    assert kept.logprob == pytest.approx(whole, abs=1e-3)


def test_choices_that_share_a_context_do_not_touch_each_other(model):
    shared, choices = Reader(model, small("h2o")), [CONTINUATION, CONTINUATION[::-1], CONTINUATION[2:4]]
    for choice in [*choices, CONTINUATION]:
        assert shared.likelihood(CONTEXT, choice) == Reader(model, small("h2o")).likelihood(CONTEXT, choice)


def test_greedy_is_what_the_compressed_model_itself_would_say(model):
    reader, policy, said = Reader(model, small("snapkv")), small("snapkv"), []
    for _ in range(3):
        ids = torch.tensor([[*CONTEXT, *said]])
        options = dict(turns="leave", tokenizer=model.tokenizer)
        with kvlab.compress(model.model, policy, **options) as session, torch.inference_mode():
            past = model.model(ids[:, :69]).past_key_values
            session.end_prompt()
            for token in ids[0, 69:]:
                logits = model.model(token.view(1, 1), past_key_values=past).logits[0, -1]
        said.append(int(logits.argmax()))
        assert reader.likelihood(CONTEXT, said).greedy
        assert not reader.likelihood(CONTEXT, [*said[:-1], said[-1] + 1]).greedy


def test_a_context_of_one_token_has_nothing_to_lose(model):
    found = Reader(model, small("streamingllm")).likelihood(CONTEXT[:1], CONTINUATION)
    assert found.logprob == pytest.approx(sum(plain(model, CONTEXT[:1], CONTINUATION)), abs=1e-3)


@pytest.mark.parametrize("context", [1, 30])
@pytest.mark.parametrize("name", SOME)
def test_a_text_is_read_in_chunks_each_behind_all_before_it_compressed(model, name, context):
    ids, reader = [*CONTEXT, *CONTINUATION], Reader(model, small(name))
    found = reader.rolling(ids[:context], ids[context:], chunk=25)
    first = 25 if context == 1 else 0
    wanted = sum(plain(model, ids[:1], ids[1:])[:first])
    borders = [*range(context + first, len(ids), 25), len(ids)]
    for start, end in zip(borders, borders[1:]):
        wanted += by_hand(model, small(name), ids[:start], ids[start:end], start - 1)[0]
    assert found.logprob == pytest.approx(wanted, abs=1e-3)
    assert found.held.compressed_tokens == borders[-2] - 1
    assert Reader(model, kvlab.policy("full")).rolling(ids[:context], ids[context:], 25).logprob == pytest.approx(
        sum(plain(model, ids[:context], ids[context:])), abs=1e-3
    )


def test_a_text_of_one_chunk_is_not_compressed_at_all(model):
    found = Reader(model, small("streamingllm")).rolling(CONTEXT[:1], CONTEXT[1:], chunk=69)
    assert found.held is None and found.logprob == pytest.approx(sum(plain(model, CONTEXT[:1], CONTEXT[1:])), abs=1e-3)


def test_sampling_draws_from_torchs_seed_and_stays_within_what_was_asked(model):
    reader, asked = Reader(model, small("snapkv")), {"do_sample": True, "temperature": 2.0}

    def drawn(seed, **more):
        torch.manual_seed(seed)
        how = generation(model, asked | more, 12, set())
        return reader.response(CONTEXT, how, lambda tokens: False, 70)[0]

    assert drawn(1) == drawn(1) != drawn(2)
    greedy = reader.response(CONTEXT, generation(model, {}, 12, set()), lambda tokens: False, 70)[0]
    assert drawn(3, top_k=1) == greedy and len(greedy) == 12


def test_what_a_models_makers_recommend_does_not_change_a_greedy_response(model):
    """A penalty for repetition is in many a model's generation settings."""
    reader, how = Reader(model, small("snapkv")), generation(model, {}, 12, set())
    before = reader.response(CONTEXT, how, lambda tokens: False, 70)
    own = model.model.generation_config
    try:
        model.model.generation_config = GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=3.0)
        assert reader.response(CONTEXT, how, lambda tokens: False, 70) == before
    finally:
        model.model.generation_config = own
    penalised = generation(model, {"repetition_penalty": 5.0}, 12, set())
    assert reader.response(CONTEXT, penalised, lambda tokens: False, 70)[0] != before[0]


def test_a_response_ends_where_it_is_told(model):
    reader, how = Reader(model, small("h2o")), generation(model, {}, 12, set())
    whole, _ = reader.response(CONTEXT, how, lambda tokens: False, 70)
    short, held = reader.response(CONTEXT, how, lambda tokens: tokens[-1] == whole[4], 70)
    assert short == whole[: whole.index(whole[4]) + 1] and held.prompt_tokens == 70


def test_without_the_harness_the_command_says_what_to_install(monkeypatch, capsys):
    for name in ("lm_eval", "lm_eval.__main__"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as left:
        cli.main(["lm-eval", "--model", "kvlab"])
    assert left.value.code == 1
    assert "pip install 'kvlab[lm-eval]'" in capsys.readouterr().err
