"""What a capture of a hybrid model records: its compressed layers alone, against transformers' eager attention."""

from __future__ import annotations

import functools
import json

import pytest
import safetensors
import torch
from support.eager import attention_by_hand, eager, greedy, queries_before_rope, rope
from support.families import HYBRIDS
from support.hybrids import hybrid
from support.live_runs import SMALL
from support.sessions import state

import kvlab
from kvlab.core import attention
from kvlab.core.layout import WHOLE, Layout
from kvlab.errors import KvlabError
from kvlab.traces import retrieval_heads
from kvlab.traces.passes import prefilled, pseudo_queries

PROMPT, STEPS, WINDOW = 45, 6, 20  # beyond every window of 16
CLOSE = dict(atol=1e-4, rtol=1e-4)
ROTATES = ("hybrid-gemma2", "hybrid-gemma3", "hybrid-gpt-oss", "hybrid-lfm2")


def prompt(n=PROMPT, seed=1):
    return torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def captured(tiny):
    """captured(family): its model, one capture of it, and what eager attention sees of the same tokens."""

    @functools.cache
    def make(family):
        lm = hybrid(tiny, family)
        policies = [kvlab.policy("dapq", budget=8, window=5)]
        trace = kvlab.capture(lm, prompt(), STEPS, WINDOW, accumulate=True, pseudo=policies)
        return lm, trace, eager(lm, trace.ids)

    return make


@pytest.mark.parametrize("family", HYBRIDS)
def test_queries_and_keys_give_the_models_own_attention(captured, family):
    lm, trace, seen = captured(family)
    assert trace.layers == lm.layout.compressed and trace.n_layers == 2 and trace.layout == lm.layout
    assert (trace.prompt_length, trace.steps, trace.queries.shape[2]) == (PROMPT, STEPS, WINDOW + STEPS)
    for place, expected in enumerate(seen.weights):
        softmax = trace.softmax.row(place)
        found = attention_by_hand(
            trace.queries[place], trace.keys[place], trace.scaling, trace.softcap, softmax.sinks
        ).float()
        torch.testing.assert_close(found, expected[:, -WINDOW - STEPS :], **CLOSE)
        visible = attention.last_visible(WINDOW + STEPS, trace.length)
        ours = attention.weights(trace.queries[place], trace.keys[place], softmax, visible)
        torch.testing.assert_close(ours, expected[:, -WINDOW - STEPS :], **CLOSE)
        if family != "hybrid-qwen3-next":  # whose gates stand between attention and projection
            mixed = attention.output(ours, trace.values[place]).transpose(0, 1).flatten(1)
            torch.testing.assert_close(mixed, seen.mixed[place][-WINDOW - STEPS :], **CLOSE)


def test_the_shares_of_sinks_are_worth_a_test(captured):
    _, trace, seen = captured("hybrid-gpt-oss")
    shares = 1 - torch.stack(seen.weights).sum(-1)
    assert 0.1 < float(shares.mean()) < 0.6 and trace.sinks.shape == (2, 4)


def test_the_soft_cap_bends_what_is_tested(captured):
    _, trace, seen = captured("hybrid-gemma2")
    straight = attention_by_hand(trace.queries[0], trace.keys[0], trace.scaling).float()
    assert trace.softcap == 4.0 and trace.sinks is None
    assert (straight - seen.weights[0][:, -WINDOW - STEPS :]).abs().max() > 0.05


@pytest.mark.parametrize("family", HYBRIDS)
def test_accumulated_attention_is_the_sum_over_all_prompt_queries(captured, family):
    _, trace, seen = captured(family)
    expected = torch.stack([w[:, :PROMPT, :PROMPT].sum(1) for w in seen.weights])
    torch.testing.assert_close(trace.accumulated, expected, **CLOSE)


@pytest.mark.parametrize("family", HYBRIDS)
def test_queries_before_rope_are_the_projection(captured, family):
    lm, trace, seen = captured(family)
    positions = torch.arange(trace.length)[-WINDOW - STEPS :]
    for place, layer in enumerate(trace.layers):
        module = lm.model.model.layers[layer].self_attn
        expected = queries_before_rope(module, seen.hidden[place], trace.heads)[:, -WINDOW - STEPS :]
        torch.testing.assert_close(trace.pre_queries[place], expected, **CLOSE)
        if family in ROTATES:
            turned = rope(trace.pre_queries[place], positions)
            torch.testing.assert_close(trace.queries[place].double(), turned, **CLOSE)
    if family == "hybrid-llama4":  # its layers without a window are those without RoPE
        torch.testing.assert_close(trace.queries, trace.pre_queries, **CLOSE)


def test_llama_4s_temperature_is_in_the_queries_that_are_recorded(tiny):
    lm = tiny("hybrid-llama4", floor_scale=8, attn_scale=0.5)
    trace = kvlab.capture(lm, prompt(), STEPS, WINDOW, pseudo=())
    for place, expected in enumerate(eager(lm, trace.ids).weights):
        found = attention_by_hand(trace.queries[place], trace.keys[place], trace.scaling)
        torch.testing.assert_close(found.float(), expected[:, -WINDOW - STEPS :], **CLOSE)
    assert (trace.queries - trace.pre_queries).abs().max() > 0.1


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_response_is_the_greedy_one(captured, family):
    lm, trace, _ = captured(family)
    assert torch.equal(trace.ids[PROMPT:], greedy(lm, prompt(), STEPS))


@pytest.mark.parametrize("family", HYBRIDS)
def test_pseudo_queries_with_the_true_tokens_in_place_are_the_decoding_queries(captured, family):
    lm, trace, _ = captured(family)
    before = state(lm.model)
    cache = prefilled(trace, lm)
    here, other = torch.arange(STEPS) + PROMPT, prompt(STEPS, 9)
    post, pre = pseudo_queries(lm, cache, trace.ids[PROMPT:], here)
    torch.testing.assert_close(post, trace.response_queries, **CLOSE)
    torch.testing.assert_close(pre, trace.response_pre_queries, **CLOSE)
    # Nothing of one pass is left for the next, in no layer.
    many, _ = pseudo_queries(lm, cache, torch.stack([other, trace.ids[PROMPT:]]), torch.stack([here, here]))
    torch.testing.assert_close(many[1], trace.response_queries, **CLOSE)
    assert (many[0] - many[1]).abs().max() > 1e-2
    assert {store.length for store in cache.stores} == {PROMPT} and state(lm.model) == before


def test_a_part_of_the_layers_is_no_prefilled_cache(captured):
    _, trace, _ = captured("hybrid-gemma3")
    with pytest.raises(KvlabError, match="holds only the compressed layers of its model; .* pass the model"):
        prefilled(trace)


@pytest.mark.parametrize("family", HYBRIDS)
def test_captured_pseudo_queries_are_cropped_off_without_a_trace(captured, family):
    lm, trace, _ = captured(family)
    plain = kvlab.capture(lm, prompt(), STEPS, WINDOW, pseudo=())
    for name in ("queries", "pre_queries", "keys", "values", "ids"):
        assert torch.equal(getattr(plain, name), getattr(trace, name)), name
    one = kvlab.policy("dapq", budget=8, window=5)
    tokens = one.pseudo_tokens(prompt(), 256, None)
    expected, _ = pseudo_queries(lm, prefilled(trace, lm), tokens, torch.arange(5) + PROMPT)
    torch.testing.assert_close(trace.prompt.pseudo(one), expected, **CLOSE)


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_the_others_hold_is_counted_beside(captured, family):
    lm, trace, _ = captured(family)
    with kvlab.compress(lm.model, "full") as session, torch.inference_mode():
        out = lm.model(trace.ids[None, :PROMPT])
        for token in trace.ids[PROMPT:]:
            lm.model(token.view(1, 1), past_key_values=out.past_key_values)
    assert trace.uncompressed_bytes == session.uncompressed_bytes > 0
    assert f"2 of {lm.n_layers} layers" in repr(trace)


# --- files ---


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_is_read_back_is_what_was_written(captured, family, tmp_path):
    _, trace, _ = captured(family)
    found = kvlab.Trace.load(trace.save(tmp_path / "a.trace"))
    for name, tensor in trace._tensors().items():
        assert torch.equal(tensor, found._tensors()[name]), name
    assert (found.layout, found.softcap, found.scaling) == (trace.layout, trace.softcap, trace.scaling)
    assert found.meta == trace.meta and found.uncompressed_bytes == trace.uncompressed_bytes
    policy = kvlab.policy("snapkv", **SMALL["snapkv"])
    both = [kvlab.replay(each, policy) for each in (trace, found)]
    assert both[0].summary == both[1].summary and torch.equal(
        both[0].kept(trace.layers[1]), both[1].kept(trace.layers[1])
    )


def header(path):
    with safetensors.safe_open(path, "pt") as file:
        return json.loads(file.metadata()["kvlab"])


def test_only_what_older_versions_cannot_read_has_a_new_format(captured, tiny, tmp_path):
    plain = kvlab.capture(tiny(), prompt(), 2).save(tmp_path / "plain")
    assert header(plain)["format"] == "kvlab-trace-2" and header(plain).keys() == {
        "format",
        "prompt_length",
        "scaling",
        "rotations",
        "meta",
    }
    mixed = header(captured("hybrid-gemma2")[1].save(tmp_path / "mixed"))
    assert mixed["format"] == "kvlab-trace-3" and mixed["softcap"] == 4.0
    assert mixed["layout"] == {"sees": ["a window of 16 tokens", WHOLE] * 2, "compressed": [1, 3]}


@pytest.mark.parametrize("compressed", [[0], [1, 3, 2], [1, 7], [3, 1]])
def test_a_file_that_names_other_layers_than_it_holds_is_refused(captured, tmp_path, compressed):
    _, trace, _ = captured("hybrid-gemma2")
    strange = kvlab.Trace.load(trace.save(tmp_path / "a.trace"))
    strange.layout = Layout(trace.layout.sees, tuple(compressed))
    with pytest.raises(KvlabError, match="is damaged or not a kvlab trace .*2 layers are recorded"):
        kvlab.Trace.load(strange.save(tmp_path / "b.trace"))


def test_tensors_from_elsewhere_may_have_sinks_and_a_soft_cap():
    fit = dict(queries=torch.randn(2, 4, 7, 8), keys=torch.randn(2, 2, 9, 8), values=torch.randn(2, 2, 9, 8))
    trace = kvlab.Trace.from_tensors(**fit, prompt_length=6, softcap=2.0, sinks=torch.ones(2, 4))
    result = kvlab.replay(trace, kvlab.policy("streamingllm", budget=5))
    assert (result.sink_share > 0).all()
    with pytest.raises(KvlabError, match=r"sinks \(2, 2\) is not \[2, 4\]"):
        kvlab.Trace.from_tensors(**fit, prompt_length=6, sinks=torch.ones(2, 2))
    with pytest.raises(KvlabError, match="softcap is a number above 0, and not '-1'"):
        kvlab.Trace.from_tensors(**fit, prompt_length=6, softcap=-1)


# --- what is measured once for a model ---


def test_head_scores_tell_which_layers_they_are_of(captured, tmp_path):
    _, trace, seen = captured("hybrid-gpt-oss")
    needle = torch.arange(10, 15)
    shares = retrieval_heads.needle_shares(trace, needle)
    expected = torch.stack([w[:, -STEPS:, 10:15].sum(-1).mean(-1) for w in seen.weights])
    torch.testing.assert_close(shares, expected, **CLOSE)
