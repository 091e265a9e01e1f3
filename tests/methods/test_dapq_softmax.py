"""DapQ's two softmaxes: over the prompt alone, and over the pseudo-tokens too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracles
from support.tensors import exact, sets

import kvlab
from kvlab.errors import KvlabError
from kvlab.traces.recording import encoder

OPTIONS = {"content": "first_last", "first": 2, "window": 6}


@pytest.fixture(scope="module")
def made(tiny):
    """A tiny model, a prompt, and the trace of its pseudo-tokens fed as if they were the response."""
    lm = tiny("tiny-llama-gqa")
    ids = torch.randint(5, 90, (70,), generator=torch.Generator().manual_seed(4))
    policy = kvlab.policy("dapq", budget=20, softmax="all", **OPTIONS)
    fed = policy.pseudo_tokens(ids, 0, encoder(lm) if lm.tokenizer else torch.as_tensor)
    trace = kvlab.capture(lm, ids, new_tokens=4, policies=[policy], pseudo=())
    return lm, ids, policy, trace, kvlab.capture(lm, ids, new_tokens=len(fed), response=fed, pseudo=())


def scores_by_hand(made):
    """[layers][kv_heads][prompt], from the queries and keys of the pseudo-tokens when they are the response."""
    _, ids, _, _, fed = made
    for layer in range(fed.n_layers):
        queries, keys = exact(fed.response_queries[layer]), exact(fed.keys[layer])
        prompt, own = keys[:, : len(ids)], keys[:, len(ids) :]
        rows = oracles.attention_with_each_other(queries, own, prompt)
        yield [oracles.summed_over_group(rows, group, len(keys)).sum(0) for group in range(len(keys))]


def test_scores_are_those_of_the_pass_itself(made):
    *_, policy, trace, _ = made
    expected = torch.as_tensor(np.array(list(scores_by_hand(made))), dtype=torch.float32)
    torch.testing.assert_close(policy.scores(trace.prompt), expected, atol=1e-4, rtol=1e-3)
    assert bool((expected.sum(-1) < policy.window * trace.heads / trace.kv_heads - 0.01).all()), "the rest is their own"


def test_a_replay_keeps_what_the_oracle_keeps(made):
    *_, policy, trace, fed = made
    result = kvlab.replay(trace, policy)
    for layer, scores in enumerate(scores_by_hand(made)):
        assert sets(result.kept(layer, 0)) == [sorted(oracles.top_positions(row, 20)) for row in scores]
    queries, keys, values = (exact(x[0]) for x in (fed.queries, fed.keys, fed.values))
    n = fed.prompt_length
    kept = oracles.oracle_dapq(queries, keys, values, n, 20, exact(fed.response_queries[0]), keys[:, n:])[0]["stored"]
    assert kept == sets(result.kept(0, 0))


def test_the_two_softmaxes_weigh_queries_differently(made):
    lm, ids, policy, trace, _ = made
    alone = kvlab.policy("dapq", budget=20, **OPTIONS)
    known = kvlab.capture(lm, ids, new_tokens=4, policies=[alone])
    prompt, everything = alone.scores(known.prompt), policy.scores(trace.prompt)
    assert bool((prompt.sum(-1) > everything.sum(-1)).all())
    assert not torch.allclose(prompt / prompt.sum(-1, keepdim=True), everything / everything.sum(-1, keepdim=True))


def test_a_live_run_keeps_the_same(made):
    lm, ids, policy, trace, _ = made
    with kvlab.compress(lm.model, policy) as session:
        lm.model.generate(ids[None], max_new_tokens=4, do_sample=False)
        live = [sets(session.kept_after_prefill(layer)) for layer in range(trace.n_layers)]
    assert live == [sets(kvlab.replay(trace, policy).kept(layer, 0)) for layer in range(trace.n_layers)]


def test_what_it_needs_is_said(made):
    *_, policy, _, fed = made
    with pytest.raises(KvlabError, match="capture with"):
        policy.scores(fed.prompt)
    with pytest.raises(KvlabError, match="not from the vocabulary"):
        kvlab.policy("dapq", budget=20, softmax="all", content="vocabulary")
