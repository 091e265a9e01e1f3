"""What a capture of latent attention records: one KV head of latents, against transformers' eager attention."""

from __future__ import annotations

import functools

import pytest
import torch
from support.eager import eager, greedy, rope
from support.latents import HEADS, OTHERS, RANK, SHAPED, WIDTH, latent
from support.live_runs import SMALL
from support.sessions import state

import kvlab
from kvlab.core import attention, hookable
from kvlab.errors import KvlabError
from kvlab.traces.passes import prefilled, pseudo_queries

PROMPT, STEPS, N = 45, 6, 38
CLOSE = dict(atol=1e-4, rtol=1e-4)
FAMILIES = [*SHAPED, *OTHERS]
TURNING = [name for name in FAMILIES if name not in ("latent-kimi-linear", "deepseek-v3-yarn")]
PROJECTING = kvlab.policy("criticalkv", **SMALL["criticalkv"])


@pytest.fixture(scope="module")
def captured(tiny):
    """captured(family): its model, one capture of it, and what eager attention sees of the same tokens."""

    @functools.cache
    def make(family):
        lm = latent(tiny, family)
        ids = torch.randint(3, 256, (PROMPT,), generator=torch.Generator().manual_seed(1))
        trace = kvlab.capture(lm, ids, STEPS, N - STEPS, accumulate=True, policies=[PROJECTING])
        return lm, trace, eager(lm, trace.ids)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_one_head_of_latents_gives_the_models_own_attention_and_outputs(captured, family):
    lm, trace, seen = captured(family)
    assert trace.latent == WIDTH and trace.keys.shape[1::2] == (1, WIDTH + RANK)
    assert trace.heads == HEADS and trace.n_layers == 2
    visible = attention.last_visible(N, trace.length)
    for place, module in enumerate(hookable.layers_of(lm.model)):
        ours = attention.weights(trace.queries[place], trace.keys[place], trace.softmax.row(place), visible)
        torch.testing.assert_close(ours, seen.weights[place][:, -N:], **CLOSE)
        means = attention.output(ours, trace.values[place])
        assert (means[..., :WIDTH] == 0).all()
        values = module.kv_b_proj.weight.view(HEADS, 16 + 12, RANK)[:, 16:]
        heads = torch.einsum("hnr,hvr->nhv", means[..., WIDTH:], values).flatten(1)
        torch.testing.assert_close(heads, seen.mixed[place][-N:], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_projection_takes_means_of_latents_to_the_layers_output(captured, family):
    lm, trace, seen = captured(family)
    visible = attention.last_visible(N, trace.length)
    for place, module in enumerate(hookable.layers_of(lm.model)):
        ours = attention.weights(trace.queries[place], trace.keys[place], trace.softmax.row(place), visible)
        means = attention.output(ours, trace.values[place]).transpose(0, 1).flatten(1)
        expected = seen.mixed[place][-N:] @ module.o_proj.weight.T
        torch.testing.assert_close(means @ trace.projections[place].T, expected, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_entries_are_the_normed_latent_and_the_rotary_part(captured, family):
    lm, trace, seen = captured(family)
    for place, module in enumerate(hookable.layers_of(lm.model)):
        projected = module.kv_a_proj_with_mqa(seen.hidden[place])
        scale = getattr(module, "mla_scale_kv_lora", 1.0)
        latents = module.kv_a_layernorm(projected[:, :RANK]) * scale
        torch.testing.assert_close(trace.keys[place, 0, :, WIDTH:], latents, **CLOSE)
        torch.testing.assert_close(trace.values[place, 0, :, WIDTH:], latents, **CLOSE)
        norms = projected[:, RANK:].norm(dim=-1)
        torch.testing.assert_close(trace.keys[place, 0, :, :WIDTH].norm(dim=-1), norms, **CLOSE)


@pytest.mark.parametrize("family", TURNING)
def test_queries_before_rope_become_those_after(captured, family):
    """By the rotation that the trace tells, and by hand; only the rotary part turns."""
    _, trace, _ = captured(family)
    positions = torch.arange(trace.length)[-N:]
    for place in range(2):
        before, after = trace.pre_queries[place], trace.queries[place]
        torch.testing.assert_close(trace.rotations[place].turned(before, positions), after, **CLOSE)
        torch.testing.assert_close(before[..., WIDTH:], after[..., WIDTH:])
        turned = rope(before[..., :WIDTH], positions).float()
        if family == "latent-deepseek-v2":  # neighbours are pairs
            apart = torch.cat([before[..., :WIDTH:2], before[..., 1:WIDTH:2]], -1)
            turned = rope(apart, positions).float().unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        torch.testing.assert_close(turned, after[..., :WIDTH], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulated_attention_and_the_response_are_the_models_own(captured, family):
    lm, trace, seen = captured(family)
    expected = torch.stack([w[:, :PROMPT, :PROMPT].sum(1) for w in seen.weights])
    torch.testing.assert_close(trace.accumulated, expected, **CLOSE)
    assert trace.ids[PROMPT:].tolist() == greedy(lm, trace.ids[:PROMPT], STEPS).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_is_recorded_alike_and_the_model_is_left_as_it_was(captured, family):
    lm, trace, _ = captured(family)
    before = state(lm.model)
    chunked = kvlab.capture(lm, trace.ids[:PROMPT], STEPS, N - STEPS, chunk=7, pseudo=())
    torch.testing.assert_close(chunked.keys, trace.keys, **CLOSE)
    torch.testing.assert_close(chunked.queries, trace.queries, **CLOSE)
    assert state(lm.model) == before
    assert not any("expand_kv" in vars(module) for module in lm.model.modules())


@pytest.mark.parametrize("family", SHAPED)
def test_pseudo_queries_on_a_trace_are_those_of_the_model(captured, family):
    lm, trace, _ = captured(family)
    ids, positions = trace.ids[PROMPT:], torch.arange(PROMPT, trace.length)
    found, _ = pseudo_queries(lm, prefilled(trace, lm), ids, positions)
    torch.testing.assert_close(found, trace.response_queries, **CLOSE)


@pytest.mark.parametrize("family", SHAPED)
def test_a_file_keeps_a_latent_trace(captured, tmp_path, family):
    _, trace, _ = captured(family)
    loaded = kvlab.Trace.load(trace.save(tmp_path / "trace.safetensors"))
    assert loaded.latent == WIDTH and torch.equal(loaded.keys, trace.keys)
    policy = kvlab.policy("snapkv", **SMALL["snapkv"])
    found, expected = (kvlab.replay(each, policy) for each in (loaded, trace))
    for name in ("stored_bytes", "output_error"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_of_everything_loses_nothing_and_counts_a_latent_once(captured, family):
    _, trace, _ = captured(family)
    whole = kvlab.replay(trace, "full")
    assert float(whole.output_error.max()) == 0 and float(whole.mass_lost.max()) == 0
    entry = (RANK + WIDTH) * 4
    assert whole.stored_bytes.tolist() == [2 * entry * (PROMPT + step) for step in range(1, STEPS + 1)]
    small = kvlab.replay(trace, kvlab.policy("streamingllm", budget=12))
    assert set(small.stored_bytes.tolist()) == {2 * entry * 12} and float(small.output_error.mean()) > 0.01


@pytest.mark.parametrize(("storage", "bits"), [("int8", 8.5), ("turbo-4", 4.5), ("kivi-4", None)])
def test_a_rounded_latent_is_counted_once(captured, storage, bits):
    _, trace, _ = captured("latent-deepseek-v3")
    plain = kvlab.replay(trace, kvlab.policy("full"))
    rounded = kvlab.replay(trace, kvlab.policy("full"), storage=storage)
    assert 0 < float(rounded.output_error.mean()) < 0.3 or storage == "kivi-4"
    if bits:
        entries = 2 * (PROMPT + STEPS)
        assert rounded.stored_bytes[-1] == entries * (RANK + WIDTH) * bits / 8
    assert rounded.stored_bytes[-1] <= plain.stored_bytes[-1]


def test_a_trace_of_an_impossible_latent_is_refused(captured):
    _, trace, _ = captured("latent-deepseek-v3")
    with pytest.raises(KvlabError, match="latent attention has one KV head"):
        kvlab.traces.checks.check(kvlab.traces.trace.replace(trace, latent=64))
