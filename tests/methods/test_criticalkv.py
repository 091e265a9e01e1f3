"""CriticalKV: half by another's scores, half weighed by projected values; and the output projections that it needs."""

from __future__ import annotations

import copy

import pytest
import torch
from support import oracles
from support.cases import SHAPES
from support.families import FAMILIES
from support.live_runs import generate, prompt
from support.tensors import exact, layer, sets, shaken
from torch import nn

import kvlab
from kvlab.core import hookable
from kvlab.errors import KvlabError

HIDDEN = 24


def projection(seed, heads, head_dim=16):
    """[HIDDEN, heads x head_dim], heads and channels of different size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(heads * head_dim, generator=generator) * 3
    return torch.randn(HIDDEN, heads * head_dim, generator=generator) * sizes


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "budget, parameters", [(13, {}), (30, {}), (40, dict(first=0.2)), (40, dict(first=0.0, epsilon=0.5))]
)
def test_around_snapkv_as_the_plain_loops(heads, kv_heads, budget, parameters):
    tensors, weight = layer(heads + 3 * kv_heads, heads, kv_heads, prompt=100), projection(heads, heads)
    inner = kvlab.policy("snapkv", budget=99, window=8, kernel=5)
    policy = kvlab.policy("criticalkv", budget=budget, scorer=inner, **parameters)

    def oracle(q, k, v, w):
        return oracles.oracle_criticalkv(oracles.snapkv_importance(q, k, 8, 5), v, w, heads, budget, **parameters)

    arrays = exact(*tensors, weight)
    expected = oracle(*arrays)
    assert oracle(*shaken(*arrays)) == expected, "the test's input has near-ties"
    kept = sets(policy.keep(*(t[None] for t in tensors), projection=weight)[0])
    assert kept == expected
    assert all(len(positions) == budget and set(range(92, 100)) <= set(positions) for positions in kept)
    if budget == 30:
        assert kept != sets(inner.replace(budget=budget).keep(*(t[None] for t in tensors))[0])


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "budget, parameters", [(30, {}), (40, dict(first=0.29, floor=0.0)), (25, dict(first=0.0, epsilon=0.5, floor=0.7))]
)
def test_with_heads_that_compete_as_the_plain_loops(heads, kv_heads, budget, parameters):
    tensors, weight = layer(heads + 5 * kv_heads, heads, kv_heads, prompt=100), projection(heads, heads)
    inner = kvlab.policy("snapkv", budget=99, window=8, kernel=5)
    policy = kvlab.policy("criticaladakv", budget=budget, scorer=inner, **parameters)

    def oracle(q, k, v, w):
        return oracles.oracle_criticaladakv(oracles.snapkv_importance(q, k, 8, 5), v, w, heads, budget, **parameters)

    arrays = exact(*tensors, weight)
    expected = oracle(*arrays)
    assert oracle(*shaken(*arrays)) == expected, "the test's input has near-ties"
    assert sets(policy.keep(*(t[None] for t in tensors), projection=weight)[0]) == expected
    assert sum(map(len, expected)) == kv_heads * budget and all(set(range(92, 100)) <= set(kept) for kept in expected)
    if kv_heads > 1:
        assert len({len(kept) for kept in expected}) > 1, "the heads share alike in this test's input"


def test_scores_below_zero_keep_their_order():
    """Of values equally large after the projection the higher score stays, whatever its sign."""
    queries, keys, _ = (t[None] for t in layer(4, 4, 2, prompt=60))
    same = torch.ones_like(keys)
    for scorer in ("keydiff", "knorm"):
        alone = kvlab.policy(scorer, budget=20).keep(queries, keys, same)
        around = kvlab.policy("criticalkv", budget=20, scorer=scorer)
        assert around.keep(queries, keys, same, projection=projection(1, 4)).equal(alone)


def test_around_it_the_heads_compete_for_the_weighed_rest():
    tensors, weight = [t[None] for t in layer(6, 8, 2, prompt=90)], projection(2, 8)
    inner = kvlab.policy("criticalkv", budget=40)
    kept = kvlab.policy("adakv", budget=40, scorer=inner).keep(*tensors, projection=weight)[0]
    assert sum(map(len, sets(kept))) == 80
    sure = sets(inner.replace(first=1.0).keep(*tensors, projection=weight)[0])
    half = sets(kvlab.policy("snapkv", budget=40).keep(*tensors)[0])
    assert sure == half, "with all of the budget by the scores it is the scorer itself"


# ------------------------------------------------------------------------------ where the projections come from


@pytest.mark.parametrize("family", FAMILIES)
def test_the_projection_is_what_turns_attention_outputs_into_hidden_states(tiny, family):
    model = tiny(family).model
    modules = hookable.layers_of(model)
    for module, weight in zip(modules, hookable.projections_of(modules), strict=True):
        output = next(getattr(module, name) for name in hookable.OUTPUTS if hasattr(module, name))
        given = torch.randn(3, weight.shape[1])
        bias = 0 if output.bias is None else output.bias
        torch.testing.assert_close(output(given), given @ weight.T + bias)
        assert weight.data_ptr() == output.weight.data_ptr(), "the model's own, no copy"


@pytest.mark.parametrize("family", ["tiny-llama-gqa", "tiny-phi3", "hybrid-gpt-oss"])
def test_replay_and_live_run_keep_the_same_in_every_family(tiny, family):
    lm, policy = tiny(family), kvlab.policy("criticalkv", budget=40)
    ids = prompt(70, seed=2)
    replay = kvlab.replay(kvlab.capture(lm, ids, 3), policy)
    with kvlab.compress(lm.model, policy) as session:
        generate(lm.model, ids, 4)
    for number in replay.trace.layers:
        assert sets(session.kept_after_prefill(number)) == sets(replay.kept(number))


def test_a_trace_borrows_the_models_weights_and_saves_them_where_asked(tiny, tmp_path):
    lm, ids = tiny("tiny-llama-gqa"), prompt(70)
    policy = kvlab.policy("criticalkv", budget=40)
    plain, asked = kvlab.capture(lm, ids, 2), kvlab.capture(lm, ids, 2, policies=["criticalkv"])
    own = hookable.projections_of(hookable.layers_of(lm.model))
    assert [w.data_ptr() for w in plain.model_projections] == [w.data_ptr() for w in own]
    assert plain.projections is None and asked.projections.equal(torch.stack(own))
    assert asked.nbytes - plain.nbytes == sum(w.numel() * w.element_size() for w in own)
    expected = kvlab.replay(plain, policy).kept(1)
    loaded = kvlab.Trace.load(asked.save(tmp_path / "asked.safetensors"))
    assert loaded.projections.equal(asked.projections) and loaded.model_projections is None
    assert kvlab.replay(loaded, policy).kept(1).equal(expected)
    without = kvlab.Trace.load(plain.save(tmp_path / "plain.safetensors"))
    told = r"criticalkv needs the output projection of its layer: capture with policies=\['criticalkv'\]"
    with pytest.raises(KvlabError, match=told):
        kvlab.replay(without, policy)
    # Nothing is asked where nothing is judged.
    assert kvlab.replay(without, policy.replace(budget=70)).kept(0).shape[-1] == 70


def test_given_projections_are_checked():
    tensors = [t[None] for t in layer(1, 4, 2, prompt=60)]
    policy = kvlab.policy("criticalkv", budget=40)
    with pytest.raises(KvlabError, match=r"criticalkv needs the output projection .* pass projection= to keep"):
        policy.keep(*tensors)
    with pytest.raises(KvlabError, match=r"projection must be \[hidden, heads x head_dim\] = \[hidden, 64\]"):
        policy.keep(*tensors, projection=torch.zeros(64, 24))
    trace = kvlab.Trace.from_tensors(*tensors, 50, projections=torch.ones(1, 24, 64))
    assert kvlab.replay(trace, policy).kept(0).shape == (2, 40)
    with pytest.raises(KvlabError, match=r"projections \(2, 24, 64\) are not \[1, hidden, 64\]"):
        kvlab.Trace.from_tensors(*tensors, 50, projections=torch.ones(2, 24, 64))


def test_projections_that_are_no_matrix_are_refused_before_anything_runs(tiny, monkeypatch):
    lm = copy.copy(tiny("tiny-llama-gqa"))
    lm.model = copy.deepcopy(lm.model)
    packed = nn.Module()
    packed.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    lm.model.model.layers[1].self_attn.o_proj = packed
    monkeypatch.setattr(lm.model, "forward", lambda *_a, **_k: pytest.fail("the model ran"))
    with pytest.raises(KvlabError, match="needs a linear output projection"):
        kvlab.capture(lm, prompt(50), 2, policies=["criticalkv"])
    for policy in (kvlab.policy("criticalkv", budget=40), kvlab.policy("kvzip", budget=20, plus=True)):
        with pytest.raises(KvlabError, match="needs a linear output projection"):
            kvlab.compress(lm.model, policy)
    assert kvlab.compress(lm.model, kvlab.policy("kvzip", budget=20)).policy.needs.projection is False
