"""Replays of hybrid models: the model's layer numbers, budgets shared among the compressed layers, and sinks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.hybrids import hybrid
from support.live_runs import EVERYTHING, SMALL, prompt
from support.tensors import exact, layer, sets

import kvlab
from kvlab.core.layout import WHOLE, Layout
from kvlab.instruments.probes import QuerySimilarity
from kvlab.methods._base.lookup import HeadScores

STEPS = 5


@pytest.fixture(scope="module")
def mixed(tiny):
    """One capture of a model whose layers 2 and 4 of 5 are compressed, with everything that any policy asks for."""
    policies = [kvlab.policy(name, **SMALL[name]) for name in SMALL]
    return kvlab.capture(tiny("hybrid-gemma3"), prompt(60, seed=7), STEPS, policies=policies, pseudo=())


@pytest.mark.parametrize("name", SMALL)
def test_a_policy_sees_the_compressed_layers_as_if_there_were_no_others(mixed, name):
    alone = kvlab.Trace.from_tensors(
        mixed.queries,
        mixed.keys,
        mixed.values,
        60,
        pseudo=mixed.pseudo,
        accumulated=mixed.accumulated,
        scaling=mixed.scaling,
        projections=mixed.projections,
        rotations=mixed.rotations,
        pre_queries=mixed.pre_queries,
        hidden=mixed.hidden,
    )
    alone.nll, alone.repeated = mixed.nll, mixed.repeated
    one = kvlab.policy(name, **SMALL[name])
    found, expected = kvlab.replay(mixed, one), kvlab.replay(alone, one)
    for place, number in enumerate((2, 4)):
        for step in range(STEPS + 1):
            assert torch.equal(found.kept(number, step), expected.kept(place, step))
            assert torch.equal(found.stored(number, step), expected.stored(place, step))
    assert {**found.summary} == {**expected.summary}


def test_budgets_are_shared_over_the_compressed_layers(mixed):
    for name in ("pyramidkv", "zigzagkv", "dynamickv"):
        result = kvlab.replay(mixed, kvlab.policy(name, budget=20, window=6, kernel=3))
        sizes = [len(sets(result.kept(number))[0]) for number in (2, 4)]
        assert sum(sizes) == 2 * 20, name
    first, last = (
        len(sets(kvlab.replay(mixed, kvlab.policy("pyramidkv", budget=20, window=6, kernel=3)).kept(number))[0])
        for number in (2, 4)
    )
    assert first > last
    ladder = kvlab.replay(mixed, kvlab.policy("lacache", budget=14, span=0.5))
    assert ladder.kept(2)[0].sum() < ladder.kept(4)[0].sum()  # the later layer keeps the later run


def test_measured_heads_are_those_of_the_compressed_layers(mixed, tmp_path):
    scores = HeadScores(
        model="m",
        sha256="0" * 64,
        n_layers=2,
        heads=4,
        kv_heads=2,
        contexts=[60],
        depths=[0.5],
        seed=0,
        kvlab="0",
        layers=[2, 4],
        scores=[[0.0] * 4, [0.0, 0.0, 0.9, 0.1]],
    )
    assert scores.best(2) == [(4, 2, 0.9), (4, 3, 0.1)]
    path = scores.save(tmp_path / "heads.json")
    assert HeadScores.load(path) == scores
    policy = kvlab.policy("duoattention", budget=30, sinks=4, recent=8, heads=str(path))
    result = kvlab.replay(mixed, policy)
    # 4 heads x 30 entries pay for one that keeps all 60: the second KV head of the second of these layers.
    sizes = [[len(kept) for kept in sets(result.kept(number))] for number in (2, 4)]
    assert sizes == [[12, 12], [12, 60]]


def test_tables_and_maps_have_the_models_numbers(mixed):
    result = kvlab.replay(mixed, kvlab.policy("h2o", budget=12), probes=["mass_lost", "positions", "bytes"])
    assert set(result.table.layer.dropna()) == {2, 4}
    ours = result.table[(result.table.measure == "mass_lost") & (result.table.layer == 4)].value
    assert ours.tolist() == pytest.approx(result.mass_lost[1].flatten().tolist())
    assert set(result.records.table.layer.dropna()) == {2, 4}
    assert torch.equal(result.records.positions(4, 2), result.kept(4, 2))
    assert result.layers.compressed.tolist() == [False, False, True, False, True]
    table = kvlab.replay(mixed, ["h2o", "snapkv"], budgets=[40]).summary
    assert (table.uncompressed_bytes == mixed.uncompressed_bytes).all() and "sink_share" not in table


def test_a_trace_is_compared_with_by_the_layers_of_the_model(tiny, mixed):
    lm = tiny("hybrid-gemma3")
    with kvlab.compress(lm.model, "full", probes=[QuerySimilarity(mixed)]) as session, torch.inference_mode():
        past = lm.model(mixed.ids[None, :60]).past_key_values
        for token in mixed.ids[60:]:
            lm.model(token.view(1, 1), past_key_values=past)
    assert set(session.table.layer) == {2, 4} and session.table.value.min() > 0.9999


# --- sinks and soft caps, by the definitions ---


def by_hand(queries, keys, values, kept, scaling, softcap, sinks, prompt_length):
    """Of one layer: mass lost, output error and the sink's share `[heads, steps]`, by plain loops over float64."""
    heads, steps, _ = queries.shape
    group = heads // len(keys)
    lost, error, share = (np.zeros((heads, steps)) for _ in range(3))
    for head in range(heads):
        for step in range(steps):
            seen = prompt_length + step + 1
            logits = [scaling * float(queries[head, step] @ key) for key in keys[head // group][:seen]]
            logits = [softcap * math.tanh(logit / softcap) if softcap else logit for logit in logits]
            powers = [math.exp(logit) for logit in logits]
            sink = math.exp(float(sinks[head])) if sinks is not None else 0.0
            total = math.fsum(powers) + sink
            read = set(kept[head // group]) | set(range(prompt_length, seen))
            rest = math.fsum(powers[i] for i in read) + sink
            full = sum(powers[i] / total * values[head // group][i] for i in range(seen))
            mine = sum(powers[i] / rest * values[head // group][i] for i in read)
            lost[head, step] = math.fsum(powers[i] for i in range(seen) if i not in read) / total
            share[head, step] = sink / total
            error[head, step] = np.linalg.norm(full - mine) / np.linalg.norm(full)
    return lost, error, share


# What keeps the response is followed all at once; what evicts goes step by step, and is looked at until it evicts.
PATHS = {"snapkv": (dict(window=4), 4), "streamingllm": ({}, 1)}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_what_is_lost_is_counted_over_keys_beside_what_sinks_take(softcap, with_sinks, name):
    queries, keys, values = layer(11, 4, 2, 8, prompt=30, new=4, layers=2)
    sinks = torch.tensor([[3.0, -1.0, 2.0, 4.0], [0.0, 5.0, 1.0, 2.0]]) if with_sinks else None
    trace = kvlab.Trace.from_tensors(queries, keys, values, 30, scaling=0.4, softcap=softcap, sinks=sinks)
    trace.layout = Layout(("a convolution", WHOLE, WHOLE), (1, 2))
    parameters, n = PATHS[name]
    result = kvlab.replay(trace, kvlab.policy(name, budget=9, **parameters))
    for place, number in enumerate((1, 2)):
        rows = exact(trace.response_queries[place, :, :n], keys[place], values[place])
        own = None if sinks is None else sinks[place]
        lost, error, share = by_hand(*rows, sets(result.kept(number)), 0.4, softcap, own, 30)
        np.testing.assert_allclose(result.mass_lost[place, :, :n], lost, atol=1e-5)
        np.testing.assert_allclose(result.output_error[place, :, :n], error, atol=1e-4)
        if with_sinks:
            np.testing.assert_allclose(result.sink_share[place, :, :n], share, atol=1e-5)
    assert ("sink_share" in result.summary) == with_sinks == (result.sink_share is not None)


def test_the_share_of_sinks_is_in_tables_summaries_and_intervals(tiny):
    lm = hybrid(tiny, "hybrid-gpt-oss")
    traces = [kvlab.capture(lm, prompt(50, seed), 4, pseudo=()) for seed in (1, 2)]
    results = kvlab.replay(traces, ["full", "snapkv"], budgets=[40])
    assert results.summary.sink_share.between(0.05, 0.9).all()
    assert (results.summary[results.summary.policy == "full"].mass_lost < 1e-6).all()
    assert set(results.intervals.measure) >= {"sink_share", "mass_lost"}
    shares = results[0].table[results[0].table.measure == "sink_share"]
    assert set(shares.layer) == {1, 3} and shares.value.mean() == pytest.approx(
        results[0].summary["sink_share"], abs=1e-6
    )


@pytest.mark.parametrize("family", ["hybrid-gpt-oss", "hybrid-gemma2"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_at_a_budget_of_everything_nothing_is_lost(tiny, family, name):
    one = kvlab.policy(name, **EVERYTHING[name])
    trace = kvlab.capture(hybrid(tiny, family), prompt(50), 4, policies=[one], pseudo=())
    summary = kvlab.replay(trace, one).summary
    assert summary["mass_lost"] < 1e-5 and summary["output_error"] < 1e-4 and summary["step_recall"] == 1
