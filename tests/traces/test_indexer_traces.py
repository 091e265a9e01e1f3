"""Models with a sparse indexer (DSA): its choice is recorded as the model made it, and replayed beside policies."""

from __future__ import annotations

import functools

import pytest
import torch
from support.eager import eager, greedy
from support.latents import INDEXED, WIDTH, indexed
from support.live_runs import small
from support.refusals import refusal
from transformers import DynamicCache

import kvlab
from kvlab.attribution.attribute import attribute
from kvlab.core import attention
from kvlab.traces.passes import prefilled, pseudo_queries

PROMPT, STEPS, N, TOP = 45, 6, 26, 24
CLOSE = dict(atol=1e-4, rtol=1e-4)
FAMILIES = (INDEXED, "glm-moe-dsa")


def prompt(n=PROMPT):
    return torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def captured(tiny):
    """captured(family): its model, one capture, and what eager attention sees of the same tokens."""

    @functools.cache
    def make(family, length=PROMPT):
        lm = indexed(tiny, family)
        trace = kvlab.capture(lm, prompt(length), STEPS, N - STEPS, accumulate=True)
        return lm, trace, eager(lm, trace.ids)

    return make


def choices(lm, ids):
    """What each layer's indexer picks for each token, by the plain model: `[layers, tokens, k]`."""
    found = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda _m, _i, out: found.append(out[0]))
        for layer in lm.model.model.layers
    ]
    with torch.no_grad():
        lm.model(ids[None], past_key_values=DynamicCache(config=lm.model.config))
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_choice_is_that_of_the_models_indexer(captured, family):
    lm, trace, seen = captured(family)
    assert trace.chosen.shape == (2, STEPS, TOP)
    expected = choices(lm, trace.ids)[:, -STEPS:].sort(-1).values
    assert trace.chosen.tolist() == expected.tolist()
    # Attention of zero is on what is not chosen, and on that alone.
    for place, weights in enumerate(seen.weights):
        read = torch.zeros(STEPS, trace.length, dtype=torch.bool).scatter(1, trace.chosen[place], True)
        assert torch.equal((weights[:, -STEPS:] > 0).all(0), read)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_and_keys_over_the_choice_give_the_models_own_attention(captured, family):
    lm, trace, seen = captured(family)
    assert trace.ids[PROMPT:].tolist() == greedy(lm, trace.ids[:PROMPT], STEPS).tolist()
    picked = choices(lm, trace.ids)[:, -N:].long()
    for place in range(2):
        visible = torch.zeros(N, trace.length, dtype=torch.bool).scatter(1, picked[place], True)
        visible &= attention.last_visible(N, trace.length)
        ours = attention.weights(trace.queries[place], trace.keys[place], trace.softmax.row(place), visible)
        torch.testing.assert_close(ours, seen.weights[place][:, -N:], **CLOSE)
        means = attention.output(ours, trace.values[place])[..., WIDTH:]
        values = lm.model.model.layers[place].self_attn.kv_b_proj.weight.view(4, 16 + 12, -1)[:, 16:]
        heads = torch.einsum("hnr,hvr->nhv", means, values).flatten(1)
        torch.testing.assert_close(heads, seen.mixed[place][-N:], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_and_pseudo_queries_on_it_are_alike(captured, family):
    lm, trace, _ = captured(family)
    chunked = kvlab.capture(lm, prompt(), STEPS, N - STEPS, chunk=7, pseudo=())
    assert torch.equal(chunked.chosen, trace.chosen)
    torch.testing.assert_close(chunked.keys, trace.keys, **CLOSE)
    positions = torch.arange(PROMPT, trace.length)
    found, _ = pseudo_queries(lm, prefilled(trace, lm), trace.ids[PROMPT:], positions)
    torch.testing.assert_close(found, trace.response_queries, **CLOSE)
    twice, _ = pseudo_queries(lm, prefilled(trace, lm), trace.ids[PROMPT:].expand(2, -1), positions)
    torch.testing.assert_close(twice, found.expand_as(twice), **CLOSE)


def test_a_replay_shows_the_choice_beside_policies(captured, tmp_path):
    _, trace, _ = captured(INDEXED)
    lm, path = captured(INDEXED)[0], tmp_path / "into.safetensors"
    mapped = kvlab.capture(lm, prompt(), STEPS, N - STEPS, into=path)
    loaded = kvlab.Trace.load(trace.save(tmp_path / "trace.safetensors"))
    assert torch.equal(loaded.chosen, trace.chosen) and torch.equal(mapped.chosen, trace.chosen)
    assert loaded.latent == mapped.latent == WIDTH
    found = kvlab.replay(loaded, [loaded.indexer, kvlab.policy("exact_topk", budget=TOP), kvlab.policy("full")])
    table = found.summary.set_index("policy")
    assert table.mass_lost["full"] < 1e-6 < table.mass_lost["exact_topk"] < table.mass_lost["indexer"]
    assert table.read_bytes["indexer"] == table.read_bytes["exact_topk"] == 2 * TOP * 32 * 4
    # All are measured by attention over the whole past.
    lost = []
    for place in range(2):
        visible = attention.last_visible(STEPS, trace.length)
        weights = attention.weights(trace.response_queries[place], trace.keys[place], trace.softmax.row(place), visible)
        lost.append(1 - weights.gather(2, trace.chosen[place].expand(4, -1, -1)).sum(-1))
    assert table.mass_lost["indexer"] == pytest.approx(float(torch.stack(lost).mean()), abs=1e-5)


def test_fewer_tokens_than_it_may_choose_are_all_read(captured):
    _, trace, _ = captured(INDEXED, 20)
    for step in range(STEPS):
        expected = list(range(min(21 + step, TOP)))
        found = trace.chosen[0, step].tolist()
        assert len([at for at in found if at >= 0]) == len(expected)
        assert step > 3 or found == expected + [-1] * (TOP - len(expected))
    few = kvlab.replay(trace, trace.indexer)
    assert float(few.mass_lost[:, :, :4].max()) < 1e-6


def test_what_an_indexer_cannot_have_is_one_sentence(captured, tiny):
    lm, trace, _ = captured(INDEXED)
    for sentence in (refusal(kvlab.compress, lm, "full"), refusal(attribute, lm, small("snapkv"), prompt(), 4)):
        assert sentence.startswith("DeepseekV32ForCausalLM has a sparse indexer")
    plain = kvlab.capture(tiny("latent-deepseek-v3"), prompt(), 2, pseudo=())
    assert "holds no choice of a sparse indexer" in refusal(lambda: plain.indexer)
    assert "another trace" in refusal(kvlab.replay, plain, trace.indexer)
    assert "pass the model" in refusal(prefilled, trace)
    with pytest.raises(kvlab.KvlabError, match="an indexer's choice"):
        kvlab.traces.checks.check(kvlab.traces.trace.replace(trace, chosen=trace.chosen[:1]))
