"""Which layers of a hybrid model are compressed, what the others see, and that a session leaves them alone."""

from __future__ import annotations

import pytest
import torch
from support.eager import eager
from support.families import FAMILIES, HYBRIDS
from support.sessions import state
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvlab.core import adapter, hookable, hooks
from kvlab.core.layout import WHOLE, Layout
from kvlab.errors import KvlabError

SEES = {
    "hybrid-gemma2": ("a window of 16 tokens", [1, 3]),
    "hybrid-gemma3": ("a window of 16 tokens", [2, 4]),
    "hybrid-gpt-oss": ("a window of 16 tokens", [1, 3]),
    "hybrid-llama4": ("a chunk of 16 tokens", [1, 3]),
    "hybrid-qwen3-next": ("a linear state", [1, 3]),
    "hybrid-lfm2": ("a convolution", [1, 3]),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_layers_that_see_the_whole_past_are_compressed(tiny, family):
    lm = tiny(family)
    other, compressed = SEES[family]
    table = lm.layout.table()
    assert table.columns.tolist() == ["layer", "sees", "compressed"]
    assert table.layer.tolist() == list(range(lm.n_layers))
    assert table[table.compressed].layer.tolist() == compressed == list(lm.layout.compressed)
    assert set(table[table.compressed].sees) == {WHOLE} and set(table[~table.compressed].sees) == {other}
    assert [module.layer_idx for module in hookable.layers_of(lm.model)] == compressed
    assert [lm.layout.index(layer) for layer in compressed] == [0, 1]
    assert lm.layout.mixed and lm.layout.others == tuple(table[~table.compressed].layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_a_plain_model_are(tiny, family):
    assert tiny(family).layout == Layout.whole(2) and not tiny(family).layout.mixed


def test_a_model_that_sees_nothing_but_windows_is_compressed_as_a_whole(tiny):
    layout = tiny("tiny-mistral", sliding_window=16).layout
    assert layout.compressed == (0, 1) and set(layout.sees) == {"a window of 16 tokens"} and not layout.mixed
    assert tiny("tiny-qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1).layout.compressed == (0,)


def test_a_layer_that_is_not_compressed_has_no_place(tiny):
    layout = tiny("hybrid-gemma3").layout
    with pytest.raises(KvlabError) as caught:
        layout.index(3)
    assert str(caught.value) == (
        "layer 3 sees a window of 16 tokens and keeps its own cache, which no policy compresses; compressed are layers "
        "2 and 4"
    )
    with pytest.raises(KvlabError, match=r"compressed is layer 0$"):
        Layout((WHOLE, "a convolution"), (0,)).index(1)
    for layer in (-1, 5):
        with pytest.raises(KvlabError, match=rf"layer {layer} is outside 0 \.\. 4"):
            layout.index(layer)


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_others_compute_what_they_did_before(tiny, family):
    """Three prompts of a padded batch, much longer than any window, and further tokens one by one."""
    lm = tiny(family)
    ids = torch.randint(3, 256, (3, 50), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[1, :17] = mask[2, :40] = 0
    inputs = dict(input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    before, expected = state(lm.model), lm.model.generate(**inputs)
    seen = []

    def handler(call):
        seen.append((call.layer, call.index, call.queries.shape[2], call.pre_rope.shape == call.queries.shape))
        return call.attend()

    with hooks.hooked(lm.model, handler):
        found = lm.model.generate(**inputs)
    assert torch.equal(found, expected)
    first, second = lm.layout.compressed
    assert seen[:4] == [(first, 0, 50, True), (second, 1, 50, True), (first, 0, 1, True), (second, 1, 1, True)]
    assert state(lm.model) == before


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_failing_handler_leaves_a_hybrid_model_as_it_was(tiny, family):
    lm, ids = tiny(family), torch.randint(3, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    before = state(lm.model)
    with torch.no_grad():
        logits = lm.model(ids).logits

        def handler(call):
            if call.index == 1:
                raise KeyboardInterrupt
            return call.attend()

        with pytest.raises(KeyboardInterrupt), hooks.hooked(lm.model, handler):
            lm.model(ids)
        assert state(lm.model) == before and torch.equal(lm.model(ids).logits, logits)


def test_soft_caps_and_sinks_reach_the_handler_as_the_model_has_them(tiny):
    for family, softcap in (("hybrid-gemma2", 4.0), ("hybrid-gpt-oss", None)):
        lm, calls = tiny(family), []
        with torch.no_grad(), hooks.hooked(lm.model, lambda call: calls.append(call) or call.attend()):
            lm.model(torch.tensor([[5, 6, 7]]))
        modules = hookable.layers_of(lm.model)
        for call, module in zip(calls, modules, strict=True):
            assert call.softcap == softcap and call.scaling == module.scaling
            assert (call.sinks is None) == (softcap is not None)
            told = hookable.softmax_of(module)
            assert (told.factor, told.softcap) == (call.scaling, call.softcap)
            if call.sinks is not None:
                assert torch.equal(call.sinks, module.sinks) and torch.equal(told.sinks, module.sinks)
                assert not call.sinks.requires_grad


def test_layers_of_different_shapes_are_refused():
    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[1].self_attn.head_dim = 4
    with pytest.raises(KvlabError, match="layers 0 and 1 of LlamaForCausalLM have heads of different sizes or groups"):
        hookable.layers_of(model)


# --- what transformers keeps for the others ---


@pytest.mark.parametrize("family", HYBRIDS)
def test_twins_rows_and_joined_layers_go_on_like_their_originals(tiny, family):
    model = tiny(family).model
    ids = torch.randint(3, 256, (2, 40), generator=torch.Generator().manual_seed(3))
    more = torch.randint(3, 256, (2, 5), generator=torch.Generator().manual_seed(4))
    others = hookable.layout_of(model).others

    def run(cache, tokens):
        return torch.cat([model(token[:, None], past_key_values=cache).logits for token in tokens.unbind(1)], 1)

    def copied(cache, change):
        made = DynamicCache(config=model.config)
        for number, layer in enumerate(cache.layers):
            made.layers[number] = change(layer)
        return made

    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        held = [adapter.layer_bytes(cache.layers[number]) for number in others]
        twin, second = (
            copied(cache, adapter.copy_layer),
            copied(cache, lambda x: adapter.copy_rows(x, torch.tensor([1]))),
        )
        halves = [copied(cache, lambda x, row=row: adapter.copy_rows(x, torch.tensor([row]))) for row in (0, 1)]
        joined = DynamicCache(config=model.config)
        joined.layers[:] = [adapter.join_layers(pair) for pair in zip(*(half.layers for half in halves), strict=True)]
        expected = run(cache, more)
        # None of them was touched by what the original was fed.
        for other, tokens, rows in (
            (twin, more, slice(None)),
            (second, more[1:], slice(1, 2)),
            (joined, more, slice(None)),
        ):
            torch.testing.assert_close(run(other, tokens), expected[rows], atol=1e-4, rtol=1e-4)
    for number, size in zip(others, held, strict=True):
        layer = cache.layers[number]
        tensors = (
            [layer.keys, layer.values]
            if hasattr(layer, "keys")
            else [x for states in (layer.conv_states, layer.recurrent_states) for x in states.values() if x is not None]
        )
        assert size == sum(x.nbytes for x in tensors) > 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_eager_attention_sees_what_a_window_leaves(tiny, family):
    """The other side of the tests of capture looks at the same layers."""
    seen = eager(tiny(family), torch.randint(3, 256, (30,), generator=torch.Generator().manual_seed(2)))
    assert len(seen.weights) == len(seen.mixed) == len(seen.hidden) == 2
    assert all((rows[:, -1] > 0).all() for rows in seen.weights)
