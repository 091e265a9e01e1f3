"""LAQ++: the draft that a small cache gives, and what its queries keep with the prompt's last ones."""

from __future__ import annotations

import pytest
import torch
from support import oracles
from support.live_runs import Witness, generate, left_padded, prompt
from support.tensors import exact, sets

import kvlab
from kvlab.errors import KvlabError

LENGTH, ANSWER = 60, 5
SETTINGS = {"budget": 18, "answer": ANSWER, "draft": 16, "draft_window": 6, "kernel": 3}
FAMILIES = ["tiny-llama-gqa", "tiny-qwen3", "hybrid-qwen3-next", "hybrid-llama4"]


def evicted_draft(lm, ids):
    """Queries `[layers, heads, tokens, head_dim]` and tokens of an answer from a cache that has really evicted."""
    witness, first = Witness(), kvlab.policy("snapkv_pp", budget=16, window=6, kernel=7)
    with kvlab.compress(lm.model, first, probes=[witness]):
        out = generate(lm.model, ids[None], ANSWER + 1)
    layers = sorted({layer for layer, _ in witness.steps})
    steps = range(1, ANSWER + 1)
    queries = [torch.stack([witness.steps[layer, t]["queries"][0] for t in steps], 1) for layer in layers]
    return torch.stack(queries), out.sequences[0, len(ids) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_is_what_an_evicted_cache_answers(tiny, family):
    lm, ids = tiny(family), prompt(LENGTH, seed=4)[0]
    policy = kvlab.policy("laq", **SETTINGS)
    trace = kvlab.capture(lm, ids, 3, policies=[policy])
    expected, tokens = evicted_draft(lm, ids)
    torch.testing.assert_close(trace.prompt.pseudo(policy), expected, atol=1e-4, rtol=1e-3)
    whole = generate(lm.model, ids[None], ANSWER + 1).sequences[0, LENGTH:]
    assert tokens[0] == whole[0], "its first token is the full cache's"
    plain = kvlab.capture(lm, ids, 3, pseudo=())
    torch.testing.assert_close(trace.keys, plain.keys, atol=1e-5, rtol=1e-4)  # the draft leaves nothing


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [4, 0])
def test_replays_and_live_runs_keep_what_the_plain_loops_keep(tiny, family, window):
    lm, ids = tiny(family), prompt(LENGTH, seed=4)[0]
    policy = kvlab.policy("laq", window=window, **SETTINGS)
    trace = kvlab.capture(lm, ids, 3, policies=[policy])
    draft, _ = evicted_draft(lm, ids)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids[None], 3)
    replay = kvlab.replay(trace, policy)
    for place, layer in enumerate(trace.layers):
        states = exact(trace.queries[place], trace.keys[place], trace.values[place])
        steps = oracles.oracle_laq(*states, LENGTH, 18, exact(draft[place]), window, 3)
        assert sets(replay.kept(layer)) == steps[0]["stored"]
        assert sets(session.kept_after_prefill(layer)) == steps[0]["stored"]


def test_the_draft_decides(tiny):
    """Sets differ from those of the window alone, and where the draft sees other entries."""
    lm, ids = tiny(), prompt(LENGTH, seed=4)[0]
    policies = [kvlab.policy("laq", **SETTINGS | {"draft": draft}) for draft in (16, 64)]
    trace = kvlab.capture(lm, ids, 3, policies=policies)
    assert len(trace.pseudo) == 3, "two drafts, and DapQ's pseudo-tokens"
    found = [kvlab.replay(trace, policy).kept(0).tolist() for policy in policies]
    alone = kvlab.policy("snapkv_pp", budget=18, window=8, kernel=3)
    assert kvlab.replay(trace, alone).kept(0).tolist() not in found
    seen = [trace.prompt.pseudo(policy) for policy in policies]
    torch.testing.assert_close(seen[1][:, :, 0], trace.response_queries[:, :, 0], atol=1e-4, rtol=1e-3)
    assert not torch.allclose(seen[0][-1], seen[1][-1], atol=1e-4)


def test_left_padded_rows_keep_what_each_keeps_alone(tiny):
    lm, policy = tiny(), kvlab.policy("laq", **SETTINGS)
    rows = [prompt(n, seed=n)[0] for n in (44, 57)]
    ids, mask = left_padded(*rows)
    with kvlab.compress(lm.model, policy) as batch:
        generate(lm.model, ids, 3, attention_mask=mask)
    for row, alone in enumerate(rows):
        with kvlab.compress(lm.model, policy) as session:
            generate(lm.model, alone[None], 3)
        for layer in range(2):
            assert sets(batch.kept_after_prefill(layer, row)) == sets(session.kept_after_prefill(layer))


def test_a_trace_without_the_draft_and_a_small_draft_are_refused(tiny):
    trace = kvlab.capture(tiny(), prompt(40), 2)
    with pytest.raises(KvlabError, match="laq needs pseudo-queries"):
        kvlab.replay(trace, kvlab.policy("laq", budget=12))
    with pytest.raises(KvlabError, match="draft 32 must be above draft_window, which is 32"):
        kvlab.policy("laq", budget=12, draft=32)
