"""KVCompose: the second pass over a prompt, and composite tokens, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracles
from support.live_runs import generate, prompt
from support.tensors import exact, sets

import kvlab
from kvlab.methods._base.repeating import Repetition

LENGTH = 50


def by_hand(lm, ids):
    """What the pass attends to [layers][kv_heads][length], and the values: the prompt is fed again as a response."""
    trace, found, values = kvlab.capture(lm, ids, len(ids), response=ids), [], []
    for layer in range(trace.n_layers):
        queries, keys, own = exact(trace.response_queries[layer], trace.keys[layer], trace.values[layer])
        rows = []
        for group in range(len(keys)):
            members = oracles.heads_of(group, len(queries), len(keys))
            largest = np.zeros((len(members), len(ids)))
            for number, head in enumerate(members):
                for step in range(len(ids)):
                    weights = oracles.attention_weights(queries[head, step], keys[group, : len(ids) + step + 1])
                    largest[number] = np.maximum(largest[number], weights[: len(ids)])
            rows.append(list(sum(largest) / len(members)))
        found.append(rows)
        values.append(own[:, : len(ids)])
    return found, values


@pytest.mark.parametrize("how", [{}, dict(shared=False), dict(value_norm=True)], ids=str)
@pytest.mark.parametrize("family", ["tiny-llama-gqa", "tiny-qwen3"])
def test_scores_and_sets_are_those_of_the_plain_loops(tiny, family, how):
    lm, ids = tiny(family), prompt(LENGTH, seed=4)[0]
    policy = kvlab.policy("kvcompose", budget=20, **how)
    trace = kvlab.capture(lm, ids, 2, policies=[policy])
    attended, values = by_hand(lm, ids)
    found = trace.prompt.repeated(policy, policy.repetition).double()
    torch.testing.assert_close(found, torch.tensor(attended), atol=1e-5, rtol=1e-3)
    kept = oracles.oracle_kvcompose(attended, values, 20, **how)
    replay = kvlab.replay(trace, policy)
    assert [sets(replay.kept(layer)) for layer in trace.layers] == kept
    assert sum(len(heads[0]) for heads in kept) == 20 * len(kept)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids[None], 3)
    assert [sets(session.kept_after_prefill(layer)) for layer in trace.layers] == kept


def test_heads_of_a_layer_keep_as_many_and_layers_do_not():
    scores = np.array([[[9, 1, 1, 1], [1, 9, 1, 1]], [[5, 4, 3, 0], [0, 3, 4, 5]], [[0, 0, 0, 1], [0, 0, 0, 1]]])
    kept = oracles.oracle_kvcompose(scores, scores[..., None], 2, shared=False)
    # worth 9 4 3 1 in the first layer, the most of any, and 5 4 3 0 in the second; each keeps one at least
    assert kept == [[[0, 1, 2], [0, 1, 2]], [[0, 1], [2, 3]], [[3], [3]]]


def test_its_pass_goes_without_an_instruction_and_under_a_name_of_its_own():
    own, kvzips = kvlab.policy("kvcompose", budget=9).repetition, Repetition(2000, 4, False)
    (part,) = own.parts(torch.arange(30), lambda text: torch.tensor([7]))
    assert part.ids.tolist() == list(range(30))
    assert kvzips.key == "chunk=2000, sinks=4, plus=False" and own.key.endswith("group=mean, asks=False")
