"""A prompt that is fed in chunks leaves the trace that it leaves in one piece, for every family."""

from __future__ import annotations

import functools

import pytest
import torch
from support.eager import sequence
from support.families import FAMILIES, HYBRIDS
from support.hybrids import hybrid
from support.texts import FERRY

import kvlab
from kvlab.core import attention, hooks
from kvlab.errors import KvlabError
from kvlab.inputs import models
from kvlab.traces import passes

PROMPT, STEPS, WINDOW = 45, 4, 20
CLOSE = dict(share=1e-4)
ASKED = dict(accumulate=True, pseudo=[kvlab.policy("dapq", budget=8, window=5)], policies=["kvzip"])


@pytest.fixture(scope="module")
def whole(tiny):
    """whole(family): its model, and a capture of it in one piece."""

    @functools.cache
    def make(family):
        lm = hybrid(tiny, family)
        return lm, kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, **ASKED)

    return make


def alike(found, expected, share=None, **close):
    """share: of a tensor's largest number, since sums of other parts round by shares of what is summed."""
    ours, theirs = found._tensors(), expected._tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if share is not None:
            largest = float(theirs[name].abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
            close = dict(atol=share * largest, rtol=0)
        torch.testing.assert_close(tensor, theirs[name], msg=lambda said, name=name: f"{name}: {said}", **close)
    assert (found.rotations, found.scaling, found.meta) == (expected.rotations, expected.scaling, expected.meta)


@pytest.mark.parametrize("chunk", [7, 1, 20, 44, 45, 400])
@pytest.mark.parametrize("family", ["tiny-llama-gqa", "hybrid-gemma2"])
def test_any_chunk_gives_the_same_trace(whole, family, chunk):
    lm, expected = whole(family)
    assert {"accumulated", "nll", "sinks", "pseudo/first_last/4/5"} - expected._tensors().keys() == {"sinks"}
    alike(kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, chunk=chunk, **ASKED), expected, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES + HYBRIDS)
def test_every_family_in_chunks(whole, family):
    """Chunks end within, at and beyond a window of 16 and a convolution of 3."""
    lm, expected = whole(family)
    alike(kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, chunk=18, **ASKED), expected, **CLOSE)


def test_all_queries_and_all_likelihoods_come_from_all_chunks(tiny):
    one = kvlab.capture(tiny(), sequence(PROMPT), 0, queries="all")
    assert one.queries.shape[2] == PROMPT and one.nll.shape == (PROMPT - 1,)
    alike(kvlab.capture(tiny(), sequence(PROMPT), 0, queries="all", chunk=8), one, **CLOSE)


def test_the_real_model_in_chunks(lm):
    text = (FERRY * 3)[:4400]
    asked = dict(new_tokens=4, window=300, accumulate=True, policies=["dapq"])
    one = kvlab.capture(lm, text, **asked)
    assert 800 < one.prompt_length < 1300 and one.nll.shape == (256,)
    alike(kvlab.capture(lm, text, chunk=256, **asked), one, atol=5e-3, rtol=1e-3)


def longest_passes(monkeypatch, run):
    """How many tokens each forward pass was fed, how many logits it gave, and the widest mask of attention."""
    fed, masked = [], []
    # Masks are those of PyTorch's kernel; blocks by oneDNN need none.
    monkeypatch.setenv("KVLAB_ONEDNN", "0")
    forward, attend = passes.forward, attention.F.scaled_dot_product_attention

    def feeding(lm, ids, cache, positions=None, logits_of=1):
        fed.append((len(ids), logits_of))
        return forward(lm, ids, cache, positions, logits_of)

    def attending(queries, *rest, attn_mask=None, **more):
        masked.append(0 if attn_mask is None else attn_mask.shape[-2])
        return attend(queries, *rest, attn_mask=attn_mask, **more)

    monkeypatch.setattr(passes, "forward", feeding)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", attending)
    run()
    return fed, max(masked)


@pytest.mark.parametrize("fused", [True, False], ids=["without a mask", "with a mask"])
def test_a_chunk_bounds_the_tokens_the_logits_and_the_mask_of_a_pass(tiny, monkeypatch, fused):
    monkeypatch.setattr(attention, "FUSED", attention.FUSED if fused else None)
    asked = dict(new_tokens=0, queries="all", pseudo=())
    fed, masked = longest_passes(monkeypatch, lambda: kvlab.capture(tiny(), sequence(400), chunk=64, **asked))
    assert [n for n, _ in fed] == [64] * 6 + [16] and masked == (0 if fused else 64)
    # Likelihoods of the last 256 tokens take the logits of 257.
    assert [logits for _, logits in fed] == [1, 1, 49, 64, 64, 64, 16]


def test_long_prompts_are_fed_in_chunks_by_themselves(tiny, monkeypatch):
    monkeypatch.setattr(passes, "WHOLE", 100)
    monkeypatch.setattr(passes, "CHUNK", 40)
    asked = dict(new_tokens=0, pseudo=())
    for length, expected in ((100, [100]), (101, [40, 40, 21])):
        with monkeypatch.context() as patched:
            fed, _ = longest_passes(patched, lambda length=length: kvlab.capture(tiny(), sequence(length), **asked))
        assert [n for n, _ in fed] == expected


GROWING = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
TWO_TABLES = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 8,
    long_factor=[4.0] * 8,
    original_max_position_embeddings=32,
)


@pytest.mark.parametrize(
    "changes",
    [
        dict(max_position_embeddings=64, rope_parameters=GROWING | dict(original_max_position_embeddings=32)),
        dict(rope_parameters=TWO_TABLES),
    ],
    ids=["dynamic", "longrope"],
)
def test_a_model_whose_rotation_depends_on_what_it_is_fed_takes_a_prompt_whole(monkeypatch, changes):
    monkeypatch.setattr(passes, "WHOLE", 10)
    lm = models.random_lm("tiny-llama-gqa", device="cpu", dtype="float32", **changes)
    fed, _ = longest_passes(monkeypatch, lambda: kvlab.capture(lm, sequence(PROMPT), 0, pseudo=()))
    assert [n for n, _ in fed] == [PROMPT]
    with pytest.raises(KvlabError, match=f"RoPE depends on the length .* {PROMPT} tokens .* leave chunk"):
        kvlab.capture(lm, sequence(PROMPT), 0, pseudo=(), chunk=10)
    # Below the length at which its tables change it is as any other.
    expected = kvlab.capture(lm, sequence(30), STEPS, pseudo=(), chunk=30)
    alike(kvlab.capture(lm, sequence(30), STEPS, pseudo=(), chunk=10), expected, **CLOSE)


@pytest.mark.parametrize("chunk, said", [(0, "at least one token"), (-3, "of -3"), (2.5, "chunk must be a whole")])
def test_a_chunk_that_is_none(tiny, chunk, said):
    with pytest.raises(KvlabError, match=said):
        kvlab.capture(tiny(), sequence(PROMPT), chunk=chunk)


def test_what_runs_on_top_of_a_prompt_leaves_its_cache_as_it_is(whole):
    lm, trace = whole("tiny-llama-gqa")
    cache = passes.prefilled(trace)
    keys = cache.stores[0].keys
    with hooks.hooked(lm.model, hooks.Call.attend, pre_rope=False):
        passes.forward(lm, sequence(5), cache.transient())
    assert cache.stores[0].keys.data_ptr() == keys.data_ptr() == trace.keys.data_ptr()
    assert cache.stores[0].length == PROMPT
