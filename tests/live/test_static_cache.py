"""A compressed prompt goes on in a cache of fixed size: the session's tokens, from a step that is compiled once."""

from __future__ import annotations

import pytest
import torch
from support.live_runs import generate, left_padded, prompt, small
from torch._dynamo.utils import counters
from transformers import CompileConfig

import kvlab
from kvlab.inputs import models

STEPS = 20


@pytest.fixture(scope="module")
def lm() -> models.LM:
    return models.random_lm("tiny-llama-gqa", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compressed(lm, policy, ids, **options):
    """A session that was left with its prompt compressed, and the first token of the response."""
    with torch.no_grad(), kvlab.compress(lm.model, policy, **options) as session:
        token = lm.model(ids).logits[:, -1:].argmax(-1)
        session.end_prompt()
    return session, token


def inside(lm, policy, ids):
    """The session's own tokens `[batch, 1 + STEPS]` and logits `[batch, STEPS, vocabulary]`."""
    with torch.no_grad(), kvlab.compress(lm.model, policy) as session:
        tokens, logits = [lm.model(ids).logits[:, -1:].argmax(-1)], []
        for _ in range(STEPS):
            logits.append(lm.model(tokens[-1], past_key_values=session._cache).logits)
            tokens.append(logits[-1].argmax(-1))
    return torch.cat(tokens, 1), torch.cat(logits, 1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["snapkv", "keydiff", "knorm", "full"])
def test_compiled_steps_give_the_session_s_tokens_and_are_compiled_once(lm, name, rows):
    ids = prompt(60, rows=rows)
    expected, logits = inside(lm, small(name), ids)
    session, token = compressed(lm, small(name), ids)
    cache, stored = session.static_cache(STEPS), session.kept(1).shape[-1]
    step, tokens, graphs = torch.compile(lm.model, backend="eager", fullgraph=True), [token], []
    assert cache.is_compileable and cache.layers[1].keys.shape[2] == stored + STEPS
    with torch.no_grad():
        for number in range(STEPS):
            found = step(tokens[-1], past_key_values=cache).logits
            torch.testing.assert_close(found[:, 0], logits[:, number], atol=1e-4, rtol=1e-4)
            tokens.append(found.argmax(-1))
            graphs.append(counters["stats"]["unique_graphs"])
    assert torch.cat(tokens, 1).tolist() == expected.tolist()
    assert graphs == [1] * STEPS
    assert int(cache.get_seq_length()) == 60 + STEPS and session.kept(1).shape[-1] == stored


def test_padding_in_front_of_all_rows_stays_hidden(lm):
    ids, mask = prompt(60), torch.ones(1, 64, dtype=torch.int64)
    mask[:, :4] = 0
    expected, _ = inside(lm, small("snapkv"), ids)
    padded = torch.cat([ids[:, :4], ids], 1)
    with kvlab.compress(lm.model, small("snapkv")) as session:
        found = generate(lm.model, padded, 1, attention_mask=mask).sequences
        session.end_prompt()
    whole = torch.cat([mask, mask.new_ones(1, 1)], 1)
    more = generate(lm.model, found, 8, past_key_values=session.static_cache(8), attention_mask=whole).sequences
    assert more[:, 64:].tolist() == expected[:, :9].tolist()


def test_generate_compiles_its_steps_by_itself(lm):
    ids = prompt(60)
    with kvlab.compress(lm.model, small("snapkv")):
        expected = generate(lm.model, ids, 9).sequences
    session, token = compressed(lm, small("snapkv"), ids)
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True  # transformers compiles on GPUs alone otherwise
    fed = torch.cat([ids, token], 1)
    found = generate(lm.model, fed, 8, past_key_values=session.static_cache(8), compile_config=compiled).sequences
    assert found.tolist() == expected.tolist() and counters["stats"]["unique_graphs"] == 1


def test_caches_of_one_prompt_go_on_apart(lm):
    session, token = compressed(lm, small("snapkv"), prompt(60))
    first, second = session.static_cache(4), session.static_cache(4)
    with torch.inference_mode():
        one = lm.model(token, past_key_values=first).logits
        lm.model(token + 1, past_key_values=first)
        assert torch.equal(lm.model(token, past_key_values=second).logits, one)
    with pytest.raises(IndexError):
        for _ in range(3):
            lm.model(token, past_key_values=first)


@pytest.mark.parametrize("name", ["h2o", "quest", "streamingllm", "zsmerge"])
def test_a_policy_that_acts_at_every_step_is_refused(lm, name):
    session, _ = compressed(lm, small(name), prompt(60))
    with pytest.raises(kvlab.KvlabError, match=f"{name} acts at every step, so its cache is of no use outside"):
        session.static_cache(8)


def test_what_has_no_fixed_shape_is_refused(lm):
    ids, one = prompt(60), small("snapkv")
    with pytest.raises(kvlab.KvlabError, match="no prompt has been fed yet"):
        kvlab.compress(lm.model, one).static_cache(8)
    with pytest.raises(kvlab.KvlabError, match="room is for at least one token, and is 0"):
        compressed(lm, one, ids)[0].static_cache(0)
    with pytest.raises(kvlab.KvlabError, match="entries as they are; leave out storage="):
        compressed(lm, one, ids, storage="int8")[0].static_cache(8)
    with pytest.raises(kvlab.KvlabError, match="hold different numbers of entries"):
        compressed(lm, small("pyramidkv"), ids)[0].static_cache(8)
    padded, mask = left_padded(prompt(60)[0], prompt(44, 1)[0])
    with kvlab.compress(lm.model, one) as session:
        generate(lm.model, padded, 2, attention_mask=mask)
    with pytest.raises(kvlab.KvlabError, match="hold different numbers of entries"):
        session.static_cache(8)
    windows = models.random_lm("hybrid-gemma2", device="cpu", dtype="float32")
    with pytest.raises(kvlab.KvlabError, match="of which a policy compresses every layer"):
        compressed(windows, one, ids)[0].static_cache(8)
    static = compressed(lm, one, ids)[0].static_cache(8)
    with pytest.raises(kvlab.KvlabError, match="a static cache is for the response to one prompt"):
        static.reset()
