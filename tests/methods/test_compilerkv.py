"""CompilerKV against its oracle while its tables are neutral: utility, sets, and windows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracles
from support.cases import SHAPES
from support.decision_tables import SMALL, decided, flat, model, quietly, tables, trace_of
from support.layer_budgets import kept_sets
from support.tensors import exact, layer, sets

import kvlab
from kvlab.errors import KvlabError
from kvlab.methods import Prompt


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
@pytest.mark.parametrize(
    "length, parameters",
    [
        (40, dict(budget=10, **SMALL)),
        (90, dict(budget=30, **SMALL)),
        (90, dict(budget=30, kernel=1, **SMALL)),
        (90, dict(budget=20, kernel=7, **SMALL)),
        (90, dict(budget=20, kernel=3, **SMALL)),
        (40, dict(budget=20, window=64, utility_window=32)),
        (90, dict(budget=30, window=8, utility_window=8)),
        (90, dict(budget=30, recent=8, **SMALL)),
        (90, dict(budget=20, recent=12, kernel=7, **SMALL)),
        (90, dict(budget=30, norms="none", **SMALL)),
        (90, dict(budget=30, norms="none", recent=8, kernel=3, **SMALL)),
    ],
)
def test_neutral_tables_keep_what_the_oracle_keeps(heads, kv_heads, length, parameters):
    tensors = model(length + kv_heads, heads, kv_heads, length)
    assert quietly(trace_of(tensors, length), **parameters) == decided(tensors, length, **parameters)


def test_recent_tokens_stay_and_the_budget_leaves_room_for_others():
    trace = trace_of(model(24, prompt=80), 80)
    for kept in (heads[0] for heads in quietly(trace, budget=20, recent=12, **SMALL)):
        assert kept[-12:] == list(range(68, 80)) and len(kept) == 20
    with pytest.raises(KvlabError, match="13"):
        quietly(trace, budget=12, recent=12, **SMALL)


def test_without_norms_all_layers_keep_what_the_model_attends_to():
    found = quietly(trace_of(model(25, prompt=80), 80), budget=20, norms="none", **SMALL)
    assert found[0] == found[1] == found[2] != quietly(trace_of(model(25, prompt=80), 80), budget=20, **SMALL)[1]


def test_the_default_windows():
    tensors = model(2, 4, 2, 110, n=64)
    found = quietly(trace_of(tensors, 110), budget=40)
    assert found == decided(tensors, 110, budget=40, window=64, utility_window=32)


@pytest.mark.parametrize("length, budget", [(600, 100), (1500, 200)])
def test_a_long_prompt(length, budget):
    tensors = model(length, 4, 1, length, n=8, layers=2)
    parameters = dict(budget=budget, window=8, utility_window=4)
    assert quietly(trace_of(tensors, length), **parameters) == decided(tensors, length, **parameters)


def test_neutral_tables_say_so_once():
    trace = trace_of(model(3), 60)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kvlab.replay(trace, kvlab.policy("compilerkv", budget=20, **SMALL))
    said = [str(w.message) for w in found if "compilerkv" in str(w.message).lower()]
    assert len(said) == 1 and "tables" in said[0]


def test_a_table_file_is_no_reason_to_warn(tmp_path):
    path = tables(tmp_path, 3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kvlab.replay(trace_of(model(3), 60, 5.0), kvlab.policy("compilerkv", budget=20, tables=path, **SMALL))
    assert kept_sets(found) == quietly(trace_of(model(3), 60), budget=20, **SMALL)


def test_the_heads_of_a_layer_share_one_set():
    for heads in quietly(trace_of(model(4, 8, 4), 60), budget=20, **SMALL):
        assert all(kept == heads[0] for kept in heads)


def test_layers_differ_by_their_values_alone():
    """Attention is averaged over all layers (eq. 6), so that equal values give equal sets."""
    queries, keys, values = model(5)
    trace = trace_of((queries, keys, values[:1].expand_as(values)), 60)
    found = quietly(trace, budget=20, **SMALL)
    assert found[0] == found[1] == found[2] != quietly(trace_of((queries, keys, values), 60), budget=20, **SMALL)[1]


def test_every_generated_token_stays():
    tensors = model(6, new=4)
    with pytest.warns(UserWarning, match="neutral"):
        result = kvlab.replay(trace_of(tensors, 60), kvlab.policy("compilerkv", budget=20, **SMALL))
    assert kept_sets(result, 4) == [[[*kept, 60, 61, 62, 63] for kept in heads] for heads in kept_sets(result)]


def test_measures_of_a_replay(tmp_path):
    tensors, risk = model(19, new=6), [flat(1, t)[0] for t in (0.0, 0.7, 0.8)]
    trace, path = trace_of(tensors, 60, 5.0), tables(tmp_path, 3, 8, risk=risk)
    result = kvlab.replay(trace, kvlab.policy("compilerkv", budget=20, tables=path, **SMALL))
    kept = decided([t[:, :, :60] for t in tensors], 60, budget=20, risk=risk, perplexity=5.0, **SMALL)
    assert kept_sets(result) == kept and len({len(heads[0]) for heads in kept}) == 3
    expected = []
    for arrays, sets_of in zip(zip(*exact(*tensors)), kept):
        run = oracles.simulate(*arrays, 60, lambda g: oracles.taken(*arrays[1:], g, sets_of[g]))
        expected.append(oracles.replay_measures(*arrays, 60, run, 20))
    for measure in ("recall", "step_recall", "mass_lost", "output_error"):
        assert result.summary[measure] == pytest.approx(np.mean([e[measure] for e in expected]), abs=1e-5), measure
    entries = sum(2 * len(heads[0]) for heads in kept)
    assert result.stored_bytes.tolist() == [(entries + 6 * t) * 2 * 16 * 4 for t in range(1, 7)]


def test_sequences_of_a_batch_are_planned_for_apart(tmp_path):
    """As in a live run: surveys of one layer after the other, each of two sequences, then one plan."""
    sequences, perplexities = [model(seed) for seed in (20, 21)], (5.0, 50.0)
    risk = np.zeros((3, 20, 4))
    risk[..., 2:] = 0.8  # perplexity 50 is gated, 5 is not
    policy = kvlab.policy("compilerkv", budget=20, tables=tables(tmp_path, 3, 8, risk=risk.tolist()), **SMALL)
    prompts = [
        Prompt(
            *(torch.stack([one[part][index] for one in sequences]) for part in range(3)),
            (index, index),
            3,
            perplexity=torch.tensor(perplexities),
        )
        for index in range(3)
    ]
    plan = policy.plan(torch.stack([policy.survey(prompt) for prompt in prompts]), prompts[0])
    found = [policy.prefill(prompt.with_plan(plan[index])) for index, prompt in enumerate(prompts)]
    for row, tensors in enumerate(sequences):
        expected = decided(tensors, 60, budget=20, risk=risk.tolist(), perplexity=perplexities[row], **SMALL)
        assert [sets(kept[row]) for kept in found] == expected
        assert all((len(heads[0]) < 20) == (row == 1) for heads in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    tensors = [t.to(dtype) for t in model(22, prompt=70)]
    found = quietly(trace_of(tensors, 70), budget=20, **SMALL)
    assert found == decided([t.float() for t in tensors], 70, budget=20, **SMALL)


def test_a_short_prompt_has_a_shorter_window(tmp_path):
    """Of a prompt within the window all tokens but the first have a likelihood."""
    tensors = model(23, prompt=40)
    trace, path = trace_of(tensors, 40), tables(tmp_path, 3, 8, risk=flat(3, 0.7))
    trace.nll = torch.full((39,), 2.0)
    found = quietly(trace, budget=20, tables=path)
    assert found == decided(tensors, 40, budget=20, risk=flat(3, 0.7), perplexity=np.exp(2.0))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), budgets=st.lists(st.integers(1, 60), min_size=2, max_size=3, unique=True).map(sorted))
def test_sets_are_nested_as_the_budget_grows(seed, budgets):
    trace = trace_of(model(seed, 2, 2, n=16), 60)
    found = [quietly(trace, budget=b, **SMALL) for b in budgets]
    for smaller, larger in zip(found, found[1:]):
        assert all(set(a[0]) < set(b[0]) for a, b in zip(smaller, larger))


@pytest.mark.parametrize("length, budget", [(50, 50), (50, 1000), (50, 1.0), (6, 40), (1, 33)])
def test_a_budget_of_the_prompt_or_more_keeps_everything(length, budget):
    assert quietly(trace_of(model(7, prompt=length), length), budget=budget) == [[list(range(length))] * 2] * 3


def test_one_layer_alone_cannot_decide():
    queries, keys, values = layer(8, prompt=80, layers=1)
    with warnings.catch_warnings(), pytest.raises(KvlabError, match="replay"):
        warnings.simplefilter("ignore")
        kvlab.policy("compilerkv", budget=40).keep(queries, keys, values)
