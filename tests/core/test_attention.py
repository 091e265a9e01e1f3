"""The one place where attention is computed, against loops and transformers; and the seam into a model."""

from __future__ import annotations

import math

import pytest
import torch
from support.eager import attention_by_hand
from support.families import FAMILIES
from support.sessions import UNFIT, state, unfit
from support.tensors import layer

from kvlab.core import attention, hooks
from kvlab.core.softmax import Softmax
from kvlab.errors import KvlabError
from kvlab.inputs import models

SHAPES = [(6, 2), (4, 4), (4, 1)]


# --- the arithmetic ---


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_weights_are_a_masked_and_biased_softmax(heads, kv_heads):
    queries, keys, _ = layer(1, heads, kv_heads, 8, prompt=13, n=5)
    generator = torch.Generator().manual_seed(2)
    visible = torch.rand(heads, 5, 13, generator=generator) < 0.6
    visible[..., 0] = True
    bias = torch.randn(heads, 1, 13, generator=generator)
    found = attention.weights(queries, keys, 0.3, visible, bias)
    for h in range(heads):
        for i in range(5):
            products = (queries[h, i] * keys[h // (heads // kv_heads)]).tolist()
            scores = [0.3 * math.fsum(row) + float(bias[h, 0, j]) for j, row in enumerate(products)]
            powers = [math.exp(s) if visible[h, i, j] else 0.0 for j, s in enumerate(scores)]
            expected = torch.tensor([p / sum(powers) for p in powers])
            torch.testing.assert_close(found[h, i], expected, atol=1e-6, rtol=1e-5)


def test_the_softmax_of_half_precision_is_taken_in_float32():
    queries, keys, values = layer(3, prompt=400, n=4)
    half = [x.bfloat16() for x in (queries, keys, values)]
    found = attention.weights(half[0], half[1])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, attention.weights(half[0].float(), half[1].float()))
    torch.testing.assert_close(found.sum(-1), torch.ones(6, 4), atol=1e-6, rtol=0)
    assert attention.weights(queries.double(), keys.double()).dtype == torch.float64


def test_heads_that_cannot_share_evenly_are_refused():
    with pytest.raises(ValueError, match="6 query heads cannot share 4 KV heads"):
        attention.weights(torch.zeros(6, 1, 8), torch.zeros(4, 3, 8))


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("n", [1, 5, 13])
@pytest.mark.parametrize("padded", [False, True])
def test_the_fused_kernel_gives_what_the_weights_give(heads, kv_heads, n, padded):
    parts = [layer(seed, heads, kv_heads, 8, prompt=13, n=n) for seed in (4, 5)]
    queries, keys, values = (torch.stack(x) for x in zip(*parts, strict=True))
    padding = torch.ones(2, 13, dtype=torch.bool)
    if padded:
        padding[1, :4] = False
    found = attention.attend(queries, keys, values, 0.3, padding if padded else None)
    assert torch.isfinite(found).all()
    visible = attention.last_visible(n, 13) & padding[:, None, None]
    for b in range(2):
        rows = attention.output(attention.weights(queries[b], keys[b], 0.3, visible[b]), values[b])
        real = slice(max(0, (4 if padded and b else 0) - (13 - n)), None)
        torch.testing.assert_close(found[b, :, real], rows[:, real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("loud", [1, 30])
def test_what_comes_after_others_needs_no_mask(monkeypatch, heads, kv_heads, loud):
    """Past and own tokens, weighed by their sums, however unlike these are, are what one masked softmax gives."""
    monkeypatch.setattr(attention, "last_visible", None)
    pairs = [layer(seed, heads, kv_heads, 16, prompt=70, n=33) for seed in (4, 5)]
    # Double: the products of loud keys are so large that floats of 32 bits round them by more than is looked for here.
    queries, keys, values = (torch.stack(both).double() for both in zip(*pairs, strict=True))
    keys[:, :, :37] *= loud
    found = attention.attend(queries, keys, values, 0.3)
    monkeypatch.undo()
    monkeypatch.setattr(attention, "FUSED", None)
    torch.testing.assert_close(found, attention.attend(queries, keys, values, 0.3), atol=1e-5, rtol=1e-5)
    expected = attention.output(attention.weights(queries, keys, 0.3, attention.last_visible(33, 70)), values)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_a_mask_that_is_aligned_with_the_last_key_hides_what_comes_later(heads, kv_heads):
    """What CUDA computes without a mask: here torch makes the mask, and a kernel of CUDA is not looked at."""
    queries, keys, values = (x[None] for x in layer(6, heads, kv_heads, 16, prompt=70, n=33))
    found = attention._attend_aligned(queries, keys, values, Softmax.of(0.3))
    expected = attention.output(attention.weights(queries, keys, 0.3, attention.last_visible(33, 70)), values)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize("n, past", [(64, 0), (128, 0), (300, 0), (300, 50), (64, 200), (128, 128), (257, 127)])
@pytest.mark.parametrize("strided", [False, True])
def test_blocks_by_onednn_give_what_the_weights_give(monkeypatch, heads, kv_heads, n, past, strided):
    monkeypatch.setenv("KVLAB_ONEDNN", "1")
    parts = [layer(seed, heads, kv_heads, 8, prompt=past + n, n=n) for seed in (4, 5)]
    queries, keys, values = (torch.stack(each) for each in zip(*parts, strict=True))
    values = torch.cat([values, values[..., :4]], -1)  # values may be longer than keys
    if strided:
        queries, keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (queries, keys, values))
    found = attention.attend(queries, keys, values, 0.3)
    visible = attention.last_visible(n, past + n)
    expected = attention.output(attention.weights(queries.double(), keys.double(), 0.3, visible), values.double())
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    again, gathered = attention.attend_and_accumulate(queries, keys, values, 0.3)
    assert again.equal(found)
    weights = attention.weights(queries.double(), keys.double(), 0.3, visible)
    torch.testing.assert_close(gathered.double(), weights.sum(-2), atol=1e-5, rtol=1e-5)
    blocks = []
    monkeypatch.setattr(attention, "_attend_by_blocks", lambda *given: blocks.append(given))
    values = values[..., :8]
    attention.attend(queries, keys, values, 0.3)
    attention.attend(queries.bfloat16(), keys.bfloat16(), values.bfloat16(), 0.3)
    attention.attend(queries.requires_grad_(), keys, values, 0.3)
    assert len(blocks) == 1, "half precision and gradients are left to PyTorch's own kernel"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_shapes_that_blocks_cannot_take_are_pytorchs(monkeypatch):
    monkeypatch.setenv("KVLAB_ONEDNN", "1")
    empty = [torch.zeros(0, heads, 70, 8) for heads in (4, 2, 2)]
    assert attention.attend(*empty, None).shape == (0, 4, 70, 8)
    queries, keys, values = (x[None] for x in layer(6, 4, 2, 8, prompt=70, n=70))
    found = attention.attend(queries.expand(3, -1, -1, -1), keys, values, None)
    torch.testing.assert_close(found[2:], attention.attend(queries, keys, values, None), atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"tensor a \(4\) must match the size of tensor b \(3\)"):
        attention.attend(queries, *(x[:, [0, 1, 1]] for x in (keys, values)), None)


def test_a_mask_decides_who_sees_whom():
    queries, keys, values = layer(6, 4, 2, 8, prompt=9, n=3)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0, 1]]).bool()
    found = attention.attend(queries[None], keys[None], values[None], None, mask=mask)[0]
    expected = attention.output(attention.weights(queries, keys, visible=mask), values)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    other = values.clone()
    other[:, 7] += 100
    changed = attention.attend(queries[None], keys[None], other[None], None, mask=mask)[0]
    torch.testing.assert_close(changed[:, [0, 2]], found[:, [0, 2]])
    assert (changed[:, 1] - found[:, 1]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("n", [20, 33])
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_accumulated_attention_is_the_sum_of_all_rows(n, chunk):
    queries, keys, _ = layer(7, 4, 2, 8, prompt=33, n=n)
    found = attention.accumulate(queries, keys, 0.4, chunk)
    torch.testing.assert_close(found.double(), attention_by_hand(queries, keys, 0.4).sum(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scaling", [0.4, Softmax(0.4, softcap=5.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("padded", [False, True])
def test_output_and_accumulated_attention_together_are_those_of_each_alone(scaling, padded):
    parts = [layer(seed, 4, 2, 8, prompt=90, n=80) for seed in (7, 8)]
    queries, keys, values = (torch.stack(each) for each in zip(*parts, strict=True))
    padding = torch.arange(90) >= torch.tensor([[0], [13]]) if padded else None
    out, gathered = attention.attend_and_accumulate(queries, keys, values, scaling, padding)
    assert out.equal(attention.attend(queries, keys, values, scaling, padding))
    alone = attention.accumulate(queries, keys, scaling, padding=padding)
    torch.testing.assert_close(gathered, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [3, 5])
def test_projected_queries_find_their_layout_even_with_as_many_tokens_as_heads(heads):
    """A q-norm may put out tokens first or heads first; where both are equally many, only the norms can tell."""
    before = torch.randn(1, heads, heads, 16, generator=torch.Generator().manual_seed(heads))
    after = torch.cat([-before[..., 8:], before[..., :8]], -1)  # a quarter turn keeps norms, as RoPE does
    assert torch.equal(hooks._as_heads(before.transpose(1, 2), after), before)
    assert torch.equal(hooks._as_heads(before, after), before)
    assert torch.equal(hooks._as_heads(before.transpose(1, 2).reshape(1, heads, -1), after), before)


# --- the seam ---


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hooked_model_computes_what_it_did_before(tiny, family):
    lm = tiny(family)
    ids = torch.randint(3, 256, (2, 11), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    before, expected = state(lm.model), lm.model.generate(**inputs)
    seen = []

    def handler(call):
        seen.append((call.layer, call.queries.shape[2], call.pre_rope.shape == call.queries.shape))
        return call.attend()

    with hooks.hooked(lm.model, handler):
        found = lm.model.generate(**inputs)
    assert torch.equal(found, expected)
    assert seen[:4] == [(0, 11, True), (1, 11, True), (0, 1, True), (1, 1, True)]
    assert state(lm.model) == before


def test_left_padding_changes_nothing_for_what_is_no_padding(tiny):
    lm = tiny()
    ids = torch.randint(3, 256, (2, 9), generator=torch.Generator().manual_seed(9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), hooks.hooked(lm.model, lambda call: call.attend()):
        both = lm.model(ids, attention_mask=mask, position_ids=positions).logits
        alone = lm.model(ids[1:, 3:]).logits
    torch.testing.assert_close(both[1, 3:], alone[0], atol=1e-4, rtol=1e-4)


def test_nested_sessions_are_refused_and_the_outer_one_goes_on(tiny):
    lm, calls = tiny(), []
    before = state(lm.model)

    def handler(call):
        calls.append(call.layer)
        return call.attend()

    with hooks.hooked(lm.model, handler):
        with pytest.raises(KvlabError, match="already inside a kvlab session"):
            with hooks.hooked(lm.model, lambda call: pytest.fail("the inner handler ran")):
                pass
        lm.model(torch.tensor([[5, 6, 7]]))
        with hooks.hooked(tiny("tiny-qwen3").model, lambda call: call.attend()):  # another model is free
            pass
    assert calls == [0, 1] and state(lm.model) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failing_handler_leaves_the_model_as_it_was(tiny, error):
    lm, ids = tiny("tiny-qwen3"), torch.tensor([[5, 6, 7]])
    before, logits = state(lm.model), lm.model(ids).logits

    def handler(call):
        if call.layer == 1:
            raise error("in the middle")
        return call.attend()

    with pytest.raises(error, match="in the middle"), hooks.hooked(lm.model, handler):
        lm.model(ids)
    assert state(lm.model) == before and torch.equal(lm.model(ids).logits, logits)


def test_the_implementation_outside_of_a_session_says_so():
    model = models.random_lm("tiny-llama-gqa", device="cpu", dtype="float32").model
    model.set_attn_implementation(hooks.NAME)
    with pytest.raises(KvlabError, match="is not hooked .* inside kvlab's context manager"):
        model(torch.tensor([[5, 6, 7]]))


# --- what cannot be hooked ---


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_cannot_be_hooked_are_refused(name):
    lm, message = unfit(name)
    before = state(lm.model)
    with pytest.raises(KvlabError, match=message), hooks.hooked(lm.model, lambda call: call.attend()):
        pytest.fail("the block was entered")
    assert state(lm.model) == before


def test_windows_shorter_than_the_sequence_are_refused_by_layer(tiny):
    mistral = tiny("tiny-mistral", sliding_window=16).model
    hooks.check_length(mistral, 16)
    with pytest.raises(KvlabError, match="Mistral.* a sliding window, layer 0 of 16 .* at most 16 tokens, not 17"):
        hooks.check_length(mistral, 17)
    some = tiny("tiny-qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1).model
    hooks.check_length(some, 2048)  # the windows of other layers are no bound
    for lm in (tiny("tiny-qwen2", sliding_window=16), tiny("tiny-mistral"), tiny("tiny-phi3")):
        hooks.check_length(lm.model, 2048)
