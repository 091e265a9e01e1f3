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
from kvlab.errors import KvlabError
from kvlab.harness.reading import Asked, Continued, Reader
from kvlab.harness.settings import batch_of, generation
from kvlab.live.decode_batch import TOGETHER

SOME = ["streamingllm", "snapkv", "h2o", "zsmerge", "quest", "adakv", "kvzip"]
CONTEXT, CONTINUATION = prompt(70, 3)[0].tolist(), prompt(6, 4)[0].tolist()


@pytest.fixture(scope="module")
def model(reader):
    return reader


def told(reader, *one):
    """The likelihood of one continuation."""
    (found,) = reader.likelihoods([Continued(*one)])
    return found


def never(tokens):
    return False


def said(reader, prompt, how, over, compressed):
    """One response."""
    (found,) = reader.responses([Asked(prompt, compressed, over)], how)
    return found


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
    found = told(Reader(model, kvlab.policy("full")), CONTEXT, CONTINUATION, compressed)
    assert found.logprob == pytest.approx(sum(plain(model, CONTEXT, CONTINUATION)), abs=1e-3)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("compressed", [69, 40])
def test_a_likelihood_is_that_of_a_session_by_hand(model, name, compressed):
    found = told(Reader(model, small(name)), CONTEXT, CONTINUATION, compressed)
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
    assert abs(told(Reader(model, small(name)), CONTEXT, CONTINUATION[:1]).logprob - whole) > 1e-3
    kept = told(Reader(model, everything(name)), CONTEXT, CONTINUATION[:1])
    assert kept.logprob == pytest.approx(whole, abs=1e-3)


def test_choices_that_share_a_context_do_not_touch_each_other(model):
    shared, choices = Reader(model, small("h2o")), [CONTINUATION, CONTINUATION[::-1], CONTINUATION[2:4]]
    for choice in [*choices, CONTINUATION]:
        assert told(shared, CONTEXT, choice) == told(Reader(model, small("h2o")), CONTEXT, choice)


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
        assert told(reader, CONTEXT, said).greedy
        assert not told(reader, CONTEXT, [*said[:-1], said[-1] + 1]).greedy


def test_a_context_of_one_token_has_nothing_to_lose(model):
    found = told(Reader(model, small("streamingllm")), CONTEXT[:1], CONTINUATION)
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
        return said(reader, CONTEXT, how, never, 70)[0]

    assert drawn(1) == drawn(1) != drawn(2)
    greedy = said(reader, CONTEXT, generation(model, {}, 12, set()), never, 70)[0]
    assert drawn(3, top_k=1) == greedy and len(greedy) == 12


def test_what_a_models_makers_recommend_does_not_change_a_greedy_response(model):
    """A penalty for repetition is in many a model's generation settings."""
    reader, how = Reader(model, small("snapkv")), generation(model, {}, 12, set())
    before = said(reader, CONTEXT, how, never, 70)
    own = model.model.generation_config
    try:
        model.model.generation_config = GenerationConfig(repetition_penalty=5.0, do_sample=True, temperature=3.0)
        assert said(reader, CONTEXT, how, never, 70) == before
    finally:
        model.model.generation_config = own
    penalised = generation(model, {"repetition_penalty": 5.0}, 12, set())
    assert said(reader, CONTEXT, penalised, never, 70)[0] != before[0]


def test_a_response_ends_where_it_is_told(model):
    reader, how = Reader(model, small("h2o")), generation(model, {}, 12, set())
    whole, _ = said(reader, CONTEXT, how, never, 70)
    short, held = said(reader, CONTEXT, how, lambda tokens: tokens[-1] == whole[4], 70)
    assert short == whole[: whole.index(whole[4]) + 1] and held.prompt_tokens == 70


# ---------------------------------------------------------------- in batches

LENGTHS = 70, 41, 55, 41


def several():
    """Contexts of several lengths with continuations of several lengths, one of a single token."""
    contexts = [prompt(length, 10 + n)[0].tolist() for n, length in enumerate(LENGTHS)]
    return [(ids, prompt(steps, 20 + steps)[0].tolist()) for ids, steps in zip(contexts, (6, 9, 1, 3), strict=True)]


@pytest.mark.parametrize("name", SOME)
def test_a_likelihood_is_the_same_in_a_batch(model, name):
    asked = [Continued(ids, more, compressed) for (ids, more), compressed in zip(several(), (None, 20, None, 40))]
    asked.append(Continued(CONTEXT[:1], CONTINUATION))
    single = list(Reader(model, small(name)).likelihoods(asked))
    for batch in (3, 8):
        for found, wanted in zip(Reader(model, small(name), batch=batch).likelihoods(asked), single, strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert (found.greedy, found.held) == (wanted.greedy, wanted.held)


@pytest.mark.parametrize("name", SOME)
def test_a_response_is_the_same_in_a_batch(model, name):
    """Each ends by itself, one of them with its first token, and is counted as it was when it ended."""
    reader, how = Reader(model, small(name)), generation(model, {"repetition_penalty": 1.3}, 9, set())

    def asked(overs):
        return [Asked(ids, len(ids) - n, over) for n, ((ids, _), over) in enumerate(zip(several(), overs, strict=True))]

    whole = [tokens for tokens, _ in reader.responses(asked([never] * 4), how)]
    ends = [(lambda tokens, end=end: len(tokens) == end) for end in (1, 4, 20, 7)]
    single = list(reader.responses(asked(ends), how))
    assert [tokens for tokens, _ in single] == [tokens[:end] for tokens, end in zip(whole, (1, 4, 20, 7))]
    for batch in (3, 8):
        assert list(Reader(model, small(name), batch=batch).responses(asked(ends), how)) == single


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("context", [1, 30])
def test_chunks_of_a_text_are_the_same_in_a_batch(model, name, context):
    ids = [*CONTEXT, *CONTINUATION]
    single, batched = (Reader(model, small(name), batch=n).rolling(ids[:context], ids[context:], 9) for n in (1, 4))
    assert batched.logprob == pytest.approx(single.logprob, abs=1e-4)
    assert (batched.greedy, batched.held) == (single.greedy, single.held)


def test_a_batch_is_a_number_of_sequences(model):
    with pytest.raises(KvlabError, match="at least one sequence"):
        Reader(model, small("snapkv"), batch=0)
    assert [batch_of(text) for text in (None, 1, "1", "16", "auto", "auto:4")] == [1, 1, 1, 16, TOGETHER, TOGETHER]
    assert (batch_of("auto", 4), batch_of("auto", 64)) == (4, TOGETHER)
    for wrong in (0, "0", "-1", "many", 1.5, "auto4"):
        with pytest.raises(KvlabError, match="neither a number from 1 on nor 'auto'"):
            batch_of(wrong)


def test_without_the_harness_the_command_says_what_to_install(monkeypatch, capsys):
    for name in ("lm_eval", "lm_eval.__main__"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as left:
        cli.main(["lm-eval", "--model", "kvlab"])
    assert left.value.code == 1
    assert "pip install 'kvlab[lm-eval]'" in capsys.readouterr().err
