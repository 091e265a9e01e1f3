"""What a trace holds by TransformerLens' names, and traces of tensors that plain PyTorch hooks have recorded."""

from __future__ import annotations

import pytest
import torch
from support.eager import CLOSE, eager, queries_before_rope, rope, sequence
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvlab
from kvlab.errors import KvlabError

PROMPT, STEPS, WINDOW = 40, 5, 9


@pytest.fixture(scope="module")
def captured(tiny):
    lm = tiny("tiny-llama-gqa")
    trace = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW)
    return lm, trace, eager(lm, trace.ids)


def by_head(rows, heads):
    """`[tokens, heads * head_dim]` as TransformerLens has it: `[tokens, heads, head_dim]`."""
    return rows.view(len(rows), heads, -1)


@pytest.mark.parametrize("layer", [0, 1])
def test_each_name_gives_what_the_model_computes_there(captured, layer):
    lm, trace, seen = captured
    module, hidden = lm.model.model.layers[layer].self_attn, seen.hidden[layer]
    positions, last = torch.arange(trace.length), slice(-WINDOW - STEPS, None)
    queries = queries_before_rope(module, hidden, trace.heads)
    keys = by_head(module.k_proj(hidden), trace.kv_heads)
    expected = {
        "hook_q": queries.transpose(0, 1)[last],
        "hook_rot_q": rope(queries, positions).float().transpose(0, 1)[last],
        "hook_k": keys,
        "hook_rot_k": rope(keys.transpose(0, 1), positions).float().transpose(0, 1),
        "hook_v": by_head(module.v_proj(hidden), trace.kv_heads),
        "hook_pattern": seen.weights[layer][:, last],
        "hook_z": by_head(seen.mixed[layer], trace.heads)[last],
    }
    for name, wanted in expected.items():
        torch.testing.assert_close(trace.named(f"blocks.{layer}.attn.{name}"), wanted, **CLOSE)
    scores = trace.named(f"blocks.{layer}.attn.hook_attn_scores")
    torch.testing.assert_close(scores.softmax(-1), expected["hook_pattern"], **CLOSE)
    assert (scores.isinf() == (expected["hook_pattern"] == 0)).all()


def test_a_head_and_a_step_are_those_of_the_whole(captured):
    _, trace, seen = captured
    rows = seen.weights[1]
    for step in (1, STEPS):
        position = PROMPT + step - 1
        torch.testing.assert_close(trace.named("blocks.1.attn.hook_pattern", 3, step), rows[3, position], **CLOSE)
        torch.testing.assert_close(trace.named("blocks.1.attn.hook_pattern", step=step), rows[:, position], **CLOSE)
        assert torch.equal(trace.named("blocks.1.attn.hook_rot_k", 1, step), trace.keys[1, 1, position])
        assert torch.equal(trace.named("blocks.1.attn.hook_v", step=step), trace.values[1, :, position])
        assert torch.equal(trace.named("blocks.1.attn.hook_rot_q", 2, step), trace.response_queries[1, 2, step - 1])
    assert torch.equal(trace.named("blocks.0.attn.hook_q", head=2), trace.pre_queries[0, 2])


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("hook_pattern", {}, "no name of a hook.*'blocks.3.attn.hook_pattern'"),
        ("blocks.0.attn.hook_patern", {}, "hook_pattern"),
        ("blocks.2.attn.hook_v", {}, "layer 2 is outside 0 .. 1"),
        ("blocks.0.attn.hook_pattern", {"head": 4}, "head 4 is outside 0 .. 3"),
        ("blocks.0.attn.hook_v", {"head": 2}, "head 2 is outside 0 .. 1"),
        ("blocks.0.attn.hook_v", {"step": 0}, "step 0 is outside 1 .. 5"),
        ("blocks.0.attn.hook_v", {"step": 6}, "step 6 is outside 1 .. 5"),
        ("blocks.0.attn.hook_v", {"step": 1.5}, "step must be a whole number"),
        ("blocks.0.attn.hook_v", {"head": 0.5}, "head must be a whole number"),
    ],
)
def test_what_there_is_not_is_said(captured, name, options, said):
    with pytest.raises(KvlabError, match=said):
        captured[1].named(name, **options)


def test_a_hybrid_models_layers_have_the_models_numbers(tiny):
    trace = kvlab.capture(tiny("hybrid-gemma3"), sequence(PROMPT), STEPS, WINDOW)
    layer = trace.layers[-1]
    assert torch.equal(trace.named(f"blocks.{layer}.attn.hook_rot_k", head=0), trace.keys[-1, 0])
    with pytest.raises(KvlabError, match="no policy compresses"):
        trace.named(f"blocks.{trace.layout.others[0]}.attn.hook_rot_k")


def recorded(lm, ids):
    """Queries, keys and values after RoPE of one plain forward pass, each `[layers, heads, tokens, head_dim]`, noted by
    nothing but PyTorch's own forward hooks.
    """
    noted, tables = {"q": [], "k": [], "v": []}, []

    def note(kind):
        return lambda _module, _args, output: noted[kind].append(output[0])

    layers = [layer.self_attn for layer in lm.model.model.layers]
    hooks = [getattr(layer, f"{kind}_proj").register_forward_hook(note(kind)) for layer in layers for kind in noted]
    hooks.append(lm.model.model.rotary_emb.register_forward_hook(lambda _module, _args, output: tables.append(output)))
    with torch.no_grad():
        lm.model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    parts = {
        kind: torch.stack(rows).unflatten(-1, (-1, layers[0].head_dim)).transpose(1, 2) for kind, rows in noted.items()
    }
    queries, keys = apply_rotary_pos_emb(parts["q"], parts["k"], *tables[0])
    return queries, keys, parts["v"]


@pytest.mark.parametrize("name", ["snapkv", "h2o", "morphkv", "zsmerge", "quest", "exact_topk"])
def test_policies_keep_and_read_the_same_of_a_trace_recorded_elsewhere(tiny, name):
    lm = tiny("tiny-llama-gqa")
    ours = kvlab.capture(lm, sequence(PROMPT), STEPS, queries="all", accumulate=True)
    elsewhere = kvlab.Trace.from_tensors(*recorded(lm, ours.ids), PROMPT, ids=ours.ids, accumulated=ours.accumulated)
    assert torch.equal(elsewhere.ids, ours.ids)
    policy = kvlab.policy(name, budget=20, **({"window": 8} if name in ("snapkv", "morphkv") else {}))
    here, there = kvlab.replay(ours, policy), kvlab.replay(elsewhere, policy)
    for layer in range(2):
        for step in range(STEPS + 1):
            assert torch.equal(here.kept(layer, step), there.kept(layer, step))
    assert there.summary["mass_lost"] == pytest.approx(here.summary["mass_lost"], abs=1e-5)


def test_ids_from_elsewhere_are_a_tensor(captured):
    trace = captured[1]
    with pytest.raises(KvlabError, match="ids must be a torch tensor"):
        kvlab.Trace.from_tensors(trace.queries, trace.keys, trace.values, PROMPT, ids=trace.ids.tolist())


def test_tensors_from_elsewhere_know_nothing_before_rope(captured):
    trace = captured[1]
    bare = kvlab.Trace.from_tensors(trace.queries, trace.keys, trace.values, PROMPT)
    for name, instead in (("hook_q", "hook_rot_q"), ("hook_k", "hook_rot_k")):
        with pytest.raises(KvlabError, match=instead):
            bare.named(f"blocks.0.attn.{name}")
    assert torch.equal(bare.named("blocks.1.attn.hook_pattern"), trace.named("blocks.1.attn.hook_pattern"))
