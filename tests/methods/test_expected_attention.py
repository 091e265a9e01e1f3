"""Expected attention against plain loops, and what it needs of a model: queries before RoPE and the rotation."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.live_runs import generate, left_padded, prompt
from support.tensors import exact, layer, sets, shaken

import kvlab
from kvlab.core.rotation import Rotation
from kvlab.errors import KvlabError

ROTATION = Rotation((1.0, 0.35, 0.1, 0.02, 0.004))  # a part of 16 channels


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "parameters",
    [{}, dict(covariance=False), dict(value_norm=False, sinks=0), dict(epsilon=0.02, future=1, sinks=7)],
    ids=str,
)
def test_it_keeps_what_the_plain_loops_keep(heads, kv_heads, parameters):
    queries, keys, values = layer(heads + kv_heads, heads, kv_heads, prompt=60)
    before = queries * 0.4 + torch.randn(heads, 1, 16, generator=torch.Generator().manual_seed(5))
    options = dict(future=30) | parameters

    def oracle(pre, k, v):
        def turn(vector, position):
            return oracles.turned(vector, position, ROTATION.frequencies)

        scores = oracles.expected_attention(pre, k, v, turn, **options)
        return [oracles.top_positions(head, 20) for head in scores]

    arrays = exact(before, keys, values)
    expected = oracle(*arrays)
    assert oracle(*shaken(*arrays, size=1e-6)) == expected, "the test's input has near-ties"
    policy = kvlab.policy("expected_attention", budget=20, **options)
    kept = policy.keep(queries[None, :, -1:], keys[None], values[None], rotation=ROTATION, pre_queries=before[None])
    assert sets(kept[0]) == expected
    assert all(set(range(options.get("sinks", 4))) <= set(positions) for positions in expected)


@pytest.mark.parametrize("family", ["tiny-qwen3", "tiny-phi3", "tiny-granite", "hybrid-gemma3", "hybrid-llama4"])
def test_replay_and_live_run_keep_the_same(tiny, family):
    """Whole, in pieces, and as a row of a left-padded batch."""
    lm, policy = tiny(family), kvlab.policy("expected_attention", budget=20, future=64)
    short, long = prompt(50, seed=2)[0], prompt(70, seed=3)[0]
    replays = [kvlab.replay(kvlab.capture(lm, ids, 0, policies=[policy]), policy) for ids in (short, long)]
    ids, mask = left_padded(short, long)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids, 3, attention_mask=mask)
    with kvlab.compress(lm.model, policy) as pieces, torch.inference_mode():
        past = None
        for piece in long[None].split(30, 1):
            past = lm.model(piece, past_key_values=past, use_cache=True).past_key_values
        pieces.end_prompt()
    for number in replays[0].trace.layers:
        for row, replay in enumerate(replays):
            assert sets(session.kept_after_prefill(number, row)) == sets(replay.kept(number))
        assert sets(pieces.kept_after_prefill(number)) == sets(replays[1].kept(number))


def test_what_is_missing_is_said(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("expected_attention", budget=20)
    with pytest.raises(KvlabError, match="expected_attention needs the queries .* capture with queries='all'"):
        kvlab.replay(kvlab.capture(lm, prompt(70), 2), policy)
    trace = kvlab.capture(lm, prompt(70), 2, queries="all")
    assert kvlab.replay(trace, policy).kept(0).shape == (2, 20)
    tensors = [t[None] for t in layer(1, prompt=60)]
    with pytest.raises(KvlabError, match="needs the queries of the whole prompt before RoPE"):
        policy.keep(*tensors)
    with pytest.raises(KvlabError, match=r"how is not known here: capture the trace anew, or pass rotation= to keep"):
        policy.keep(*tensors, pre_queries=tensors[0])
    with pytest.raises(KvlabError, match=r"pre_queries must be .* = \[1, 6, 60, 16\], and is \[1, 6, 59, 16\]"):
        policy.keep(*tensors, pre_queries=tensors[0][:, :, 1:])
    given = dict(rotations=[ROTATION], pre_queries=tensors[0])
    assert kvlab.replay(kvlab.Trace.from_tensors(*tensors, 50, **given), policy).kept(0).shape == (2, 20)
    with pytest.raises(KvlabError, match="rotations are one for each of the 1 layers, within heads of 16"):
        kvlab.Trace.from_tensors(*tensors, 50, rotations=[Rotation((1.0,) * 9)])


def test_a_later_turn_is_refused_and_stored_whole_where_asked(tiny):
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("expected_attention", budget=20)
    for turns in ("recompress", "leave"):
        with kvlab.compress(lm.model, policy, turns=turns):
            first = generate(lm.model, prompt(50), 3)
            longer = torch.cat([first.sequences, prompt(9, 1)], 1)
            if turns == "recompress":
                with pytest.raises(KvlabError, match="queries of its prompt, and the session saw 10;"):
                    generate(lm.model, longer, 3, past_key_values=first.past_key_values)
            else:
                generate(lm.model, longer, 3, past_key_values=first.past_key_values)


def test_queries_before_rope_are_forgotten_once_the_prompt_has_ended(tiny):
    lm = tiny("tiny-llama-gqa")
    with kvlab.compress(lm.model, kvlab.policy("expected_attention", budget=20)) as session:
        past = generate(lm.model, prompt(50), 3).past_key_values
    assert all(layer.before_rope.queries is None for layer in past.compressed)
    assert session.kept(0).shape == (2, 22)
