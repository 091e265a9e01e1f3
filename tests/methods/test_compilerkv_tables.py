"""CompilerKV against its oracle with tables that decide: head weights, risk thresholds, and files that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import oracles
from support.cases import SHAPES
from support.decision_tables import SMALL, decided, flat, model, quietly, tables, trace_of
from support.refusals import refusal
from support.tensors import exact

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import DecisionTables


def random_weights(layers, heads, seed=0):
    return np.round(np.random.default_rng(seed).uniform(0.2, 2, (layers, heads)), 3).tolist()


# The head table


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_head_weights_change_what_is_kept(tmp_path, heads, kv_heads):
    tensors, weights = model(9, heads, kv_heads, 70), random_weights(3, heads)
    weights[1][heads - 1] = 20.0  # one head of the second layer rules
    parameters = dict(budget=25, **SMALL)
    found = quietly(trace_of(tensors, 70), tables=tables(tmp_path, 3, heads, weights), **parameters)
    assert found == decided(tensors, 70, heads=weights, **parameters)
    neutral = quietly(trace_of(tensors, 70), **parameters)
    if kv_heads > 1:
        assert found != neutral
    else:
        assert found == neutral  # one KV head has one utility: weights scale it


def test_head_weights_with_pooling(tmp_path):
    tensors, weights = model(10, prompt=80), random_weights(3, 8, seed=1)
    found = quietly(trace_of(tensors, 80), budget=25, kernel=7, tables=tables(tmp_path, 3, 8, weights), **SMALL)
    assert found == decided(tensors, 80, budget=25, kernel=7, heads=weights, **SMALL)


# The risk table


@pytest.mark.parametrize("threshold", [0.02, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("pad", ["none", "budget"])
def test_a_threshold_keeps_its_candidates_or_pads_up(tmp_path, threshold, pad):
    tensors = model(11, prompt=80)
    path = tables(tmp_path, 3, 8, risk=flat(3, threshold))
    found = quietly(trace_of(tensors, 80, 5.0), budget=30, pad=pad, tables=path, **SMALL)
    assert found == decided(tensors, 80, budget=30, pad=pad, risk=flat(3, threshold), perplexity=5.0, **SMALL)
    sizes = [len(heads[0]) for heads in found]
    if pad == "budget":
        assert sizes == [30] * 3 and found == quietly(trace_of(tensors, 80), budget=30, **SMALL)
    elif threshold >= 0.7:
        assert max(sizes) < 30 and min(sizes) >= 1  # eq. 16: fewer candidates than the budget are kept
    if pad == "none" and threshold == 1.0:
        assert sizes == [1] * 3  # the scores are divided by their maximum


@pytest.mark.parametrize("threshold", [0.6, 0.9, 1.0])
@pytest.mark.parametrize("recent", [0, 8])
def test_a_threshold_of_the_mean(tmp_path, threshold, recent):
    """Scores of random tensors lie near their mean, so that thresholds near 1 part them."""
    tensors, path = model(11, prompt=80), tables(tmp_path, 3, 8, risk=flat(3, threshold))
    how = dict(budget=78, scale="mean", recent=recent, **SMALL)
    found = quietly(trace_of(tensors, 80, 5.0), tables=path, **how)
    assert found == decided(tensors, 80, risk=flat(3, threshold), perplexity=5.0, **how)
    sizes = [len(heads[0]) for heads in found]
    assert recent < min(sizes) and (max(sizes) < 78 or threshold == 0.6)
    largest = quietly(trace_of(tensors, 80, 5.0), tables=path, **how | {"scale": "largest"})
    assert sum(sizes) > sum(len(heads[0]) for heads in largest)


@pytest.mark.parametrize("recent", [0, 8])
def test_a_threshold_with_pooling_and_recent_tokens(tmp_path, recent):
    tensors, weights = model(13, prompt=80), random_weights(3, 8, seed=2)
    path = tables(tmp_path, 3, 8, weights, risk=flat(3, 0.7))
    how = dict(budget=40, kernel=3, recent=recent, **SMALL)
    found = quietly(trace_of(tensors, 80, 5.0), tables=path, **how)
    assert found == decided(tensors, 80, heads=weights, risk=flat(3, 0.7), perplexity=5.0, **how)


def test_layers_may_keep_different_numbers(tmp_path):
    tensors, risk = model(12, prompt=80), [flat(1, t)[0] for t in (0.0, 0.6, 0.8)]
    path = tables(tmp_path, 3, 8, risk=risk)
    found = quietly(trace_of(tensors, 80, 5.0), budget=30, tables=path, **SMALL)
    assert found == decided(tensors, 80, budget=30, risk=risk, perplexity=5.0, **SMALL)
    sizes = [len(heads[0]) for heads in found]
    assert sizes[0] == 30 > sizes[1] > sizes[2]


@pytest.mark.parametrize(
    "perplexity, expected",
    [
        (0.5, 0),
        (1.0, 0),
        (3.1, 0),
        (3.2, 1),
        (9.9, 1),
        (10.1, 2),
        (31.6, 2),
        (31.7, 3),
        (99.0, 3),
        (100.0, 3),
        (5000.0, 3),
    ],
)
def test_perplexity_bins_are_logarithmic_and_the_last_is_reached(tmp_path, perplexity, expected):
    tensors = model(13, 2, 1, prompt=50, layers=2)
    for column in range(4):
        risk = np.zeros((2, 20, 4))
        risk[:, :, column] = 1.0
        path = tables(tmp_path, 2, 2, risk=risk.tolist())
        found = quietly(trace_of(tensors, 50, perplexity), budget=20, tables=path, **SMALL)
        assert [len(heads[0]) for heads in found] == [1 if column == expected else 20] * 2


@pytest.mark.parametrize("part", [0.01, 0.049, 0.051, 0.5001, 0.949, 0.951, 0.999])
def test_entropy_bins_are_linear_and_the_last_is_reached_before_the_maximum(tmp_path, part):
    """The table's range is laid so that the prompt's entropy stands at `part` of it."""
    tensors = model(14, 2, 1, prompt=50, layers=2)
    entropy = oracles.compilerkv_entropy(*exact(*tensors[:2]), 50, 16)
    low, high = entropy - part, entropy + 1 - part
    expected = oracles.bin_of(entropy, low, high, 20)
    assert expected == int(part * 20)
    for row in range(20):
        risk = np.zeros((2, 20, 4))
        risk[:, row] = 1.0
        path = tables(tmp_path, 2, 2, risk=risk.tolist(), entropy=[low, high])
        found = quietly(trace_of(tensors, 50, 5.0), budget=20, tables=path, **SMALL)
        assert [len(heads[0]) for heads in found] == [1 if row == expected else 20] * 2


def test_entropy_is_that_of_the_whole_window_over_all_layers_in_nats(tmp_path):
    tensors = model(15, prompt=70)
    entropy = oracles.compilerkv_entropy(*exact(*tensors[:2]), 70, 16)
    assert 2 < entropy < np.log(70)
    risk = np.zeros((3, 20, 4))
    risk[:, int((entropy - 2) / 8 * 20)] = 0.7
    found = quietly(trace_of(tensors, 70, 5.0), budget=30, tables=tables(tmp_path, 3, 8, risk=risk.tolist()), **SMALL)
    assert found == decided(tensors, 70, budget=30, risk=risk.tolist(), perplexity=5.0, **SMALL)
    assert all(len(heads[0]) < 30 for heads in found)


def test_thresholds_need_the_perplexity_and_neutral_ones_do_not(tmp_path):
    trace = trace_of(model(16), 60)
    path = tables(tmp_path, 3, 8, risk=flat(3, 0.2))
    with pytest.raises(KvlabError, match="perplexity"):
        kvlab.replay(trace, kvlab.policy("compilerkv", budget=20, tables=path, **SMALL))
    neutral = quietly(trace, budget=20, tables=tables(tmp_path, 3, 8), **SMALL)
    assert neutral == quietly(trace, budget=20, **SMALL)


def test_a_table_may_be_null(tmp_path):
    tensors, weights, risk = model(24), random_weights(3, 8, seed=2), flat(3, 0.7)
    path = tables(tmp_path, 3, 8, weights, risk=risk)
    content = json.loads((tmp_path / "tables.json").read_text())
    for nothing in ("heads", "risk"):
        (tmp_path / "tables.json").write_text(json.dumps(content | {nothing: None}))
        given_tables = {"heads": weights, "risk": risk, nothing: None}
        found = quietly(trace_of(tensors, 60, 5.0), budget=20, tables=path, **SMALL)
        assert found == decided(tensors, 60, budget=20, perplexity=5.0, **given_tables, **SMALL)


# What cannot be done


def sentence_of(trace, **parameters):
    return refusal(lambda: kvlab.replay(trace, kvlab.policy("compilerkv", **{"budget": 20, **SMALL, **parameters})))


GOOD = dict(model="tensors", heads=np.ones((3, 8)).tolist(), risk=flat(3, 0.1), entropy=[2, 10], perplexity=[1, 100])


def without(key):
    return json.dumps({k: v for k, v in GOOD.items() if k != key})


def having(**more):
    return json.dumps(GOOD | more)


@pytest.mark.parametrize(
    "text, said",
    [
        ("not json {", "tables.json"),
        ("[1, 2]", "tables.json"),
        ("", "tables.json"),
        (without("heads"), "heads"),
        (without("risk"), "risk"),
        (having(heads=np.ones((2, 8)).tolist()), "layers"),
        (having(heads=np.ones((3, 7)).tolist()), "heads"),
        (having(heads=[[1.0] * 8, [1.0] * 8, [1.0] * 7]), "heads"),
        (having(heads=[1.0] * 8), "heads"),
        (having(heads=[["a"] * 8] * 3), "heads"),
        (having(heads=[[float("nan")] * 8] * 3), "heads"),
        (having(heads=[[float("inf")] * 8] * 3), "heads"),
        (having(risk=flat(2, 0.1)), "layers"),
        (having(risk=flat(3, float("nan"))), "risk"),
        (having(risk=[[0.1] * 4] * 3), "risk"),
        (having(risk=[]), "risk"),
        (having(entropy=[10, 2]), "entropy"),
        (having(entropy=[2]), "entropy"),
        (having(perplexity=[0, 100]), "perplexity"),
        (having(perplexity=[100, 1]), "perplexity"),
    ],
)
def test_a_damaged_table_file(tmp_path, text, said):
    (tmp_path / "tables.json").write_text(text)
    assert said in sentence_of(trace_of(model(17), 60, 5.0), tables=str(tmp_path / "tables.json"))


def test_no_table_file():
    assert "nowhere.json" in sentence_of(trace_of(model(17), 60), tables="nowhere.json")


@pytest.mark.parametrize(
    "parameters, said",
    [
        (dict(budget=0), "budget"),
        (dict(window=0), "window"),
        (dict(utility_window=0), "utility_window"),
        (dict(window=8, utility_window=16), "utility_window"),
        (dict(kernel=4), "kernel"),
        (dict(pad="zeros"), "pad"),
        (dict(windw=8), "window"),
    ],
)
def test_bad_parameters_are_named(parameters, said):
    assert said in sentence_of(trace_of(model(17), 60), **parameters)


def test_too_few_prompt_queries():
    assert "64" in sentence_of(trace_of(model(18, prompt=90, n=20), 90), window=64, utility_window=32)


def test_a_copy_keeps_tables_from_memory_unless_others_are_given():
    learnt = DecisionTables(heads=[[1.0, 2.0]], risk=None)
    policy = kvlab.policy("compilerkv", budget=64).using(learnt)
    assert policy.replace(budget=32).tables_in_use == learnt
    assert policy.replace(tables=None).tables_in_use.neutral
    named = policy.replace(tables="smollm2-135m")
    assert named.replace(budget=32).tables_in_use == named.tables_in_use != learnt
