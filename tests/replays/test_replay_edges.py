"""Replay of lists, of traces that lack something, and of policies that are not kvlab's own."""

import gc
import json
import weakref
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from support import oracles
from support.replaying import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PROMPT,
    STEPS,
    from_table,
    key,
    oracle,
    replayed,
    tensors,
    trace,
)
from support.tensors import exact, layer, sets

import kvlab
from kvlab.errors import KvlabError
from kvlab.replays.reference import reference

# Budgets, lists


def test_a_fraction_is_of_the_prompt():
    quarter = kvlab.replay(trace(), kvlab.policy("streamingllm", budget=0.26))
    assert len(sets(quarter.stored(0, STEPS))[0]) == int(0.26 * PROMPT) == 12
    np.testing.assert_allclose(
        quarter.summary["mass_lost"], replayed(*key("streamingllm", dict(budget=12))).summary["mass_lost"]
    )


def test_policies_times_budgets():
    result = kvlab.replay(trace(), ["streamingllm", "zsmerge"], budgets=[12, 16])
    assert len(result.summary) == 4
    for name in ("streamingllm", "zsmerge"):
        for budget in (12, 16):
            alone = kvlab.replay(trace(), kvlab.policy(name, budget=budget))
            assert sets(result[name, budget].stored(1, STEPS)) == sets(alone.stored(1, STEPS))
            row = result.summary[(result.summary.policy == name) & (result.summary.budget == budget)]
            assert row.mass_lost.item() == pytest.approx(alone.summary["mass_lost"])
            assert row.output_error.item() == pytest.approx(alone.summary["output_error"])
    assert set(result.table.policy) == {"streamingllm", "zsmerge"} and set(result.table.budget) == {12, 16}


def test_every_table_has_the_budget_as_given_and_beside_it_what_it_came_to():
    result = kvlab.replay(trace(), ["full", "streamingllm"], budgets=[0.25, 16], probes=["bytes"])
    tables = {"table": result.table, "intervals": result.intervals, "summary": result.summary}
    tables |= {"probes": pd.concat([replayed.records.table for replayed in result])}
    for name, table in tables.items():
        of_policy = dict(list(table.groupby("policy", observed=True)))
        given = of_policy["streamingllm"][["budget", "entries"]].drop_duplicates()
        assert [tuple(row) for row in given.to_numpy().tolist()] == [(0.25, 12), (16, 16)], name
        assert of_policy["full"].budget.isna().all() and set(of_policy["full"].entries) == {48}, name
        if name != "summary":
            assert list(table.columns[:3]) == ["policy", "budget", "entries"], name


@pytest.mark.parametrize("name", ["full", "snapkv", "streamingllm", "morphkv", "zsmerge", "adakv"])
def test_of_a_prompt_within_the_budget_the_entries_are_the_prompts(name):
    result = kvlab.replay(trace(), [name], budgets=[PROMPT + 9])
    assert result.summary.entries.tolist() == [PROMPT] == [result[name].kept(0).shape[1]]


def test_summaries_read_well_in_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = kvlab.replay(trace(), ["streamingllm", "scissorhands", "full"], budgets=[12, 0.5, 16]).summary
    assert isinstance(table, pd.DataFrame) and table.columns[-1] == "signature" and table.budget.dtype == float
    header, *rows, rest = repr(table).splitlines()
    first = ["policy", "budget", "entries", "recall", "mass_lost", "output_error"]
    assert header.split()[:6] == list(table.columns[:6]) == first
    assert max(map(len, [header, *rows])) <= 80 and len(rows) == len(table) == 7
    assert [row.split()[2] for row in rows] == ["12", "0.5", "16", "12", "0.5", "16", "NaN"]
    assert rows[0].split()[3] == str(table.entries[0]) and rows[0].split()[4] == f"{table.recall[0]:.3f}"
    assert rest.startswith("[also: ") and rest.endswith("trace, signature]")
    assert repr(table[table.budget == 12]).splitlines()[1] == rows[0]
    signatures = repr(table[["policy", "signature"]])
    assert "also" not in signatures and "streamingllm" in signatures and max(map(len, signatures.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "400")
    assert "also" not in repr(table) and "signature" in repr(table)
    summary = kvlab.replay(trace(), kvlab.policy("streamingllm", budget=12)).summary
    lines = str(summary).splitlines()
    assert lines[0].split() == ["entries", "12"] and len(lines) == 8
    assert lines[1].split() == ["recall", f"{summary['recall']:.3f}"]
    assert summary == dict(summary) and json.loads(json.dumps(summary)) == summary


def test_a_summary_of_several_documents_says_which_row_is_of_which_and_where_their_means_are(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["sotu/1962[0:48]", "squad/Rhine[0:48]"]
    traces = [replace(trace(), meta={"document": f"{name}@0"}) for name in names]
    replays = kvlab.replay(traces, ["streamingllm"], budgets=[12, 16])
    table = replays.summary
    header, *rows, rest, last = repr(table).splitlines()
    assert header.split()[:3] == ["document", "policy", "budget"] and max(map(len, [header, *rows])) <= 80
    assert [(row.split()[1], row.split()[3]) for row in rows] == [
        (name, size) for name in names for size in ("12", "16")
    ]
    assert rest.startswith("[also: ") and "document" not in rest and table.columns[0] == "policy"
    assert last == "[means and intervals over the documents: .intervals of the replays]"
    assert set(replays.intervals.traces) == {2}
    chosen = repr(table[["policy", "document", "recall"]]).splitlines()
    assert chosen[0].split() == ["policy", "document", "recall"] and chosen[-1] == last
    one = repr(table[table.document == names[0]]).splitlines()
    assert one[0].split()[0] == "policy" and "document" in one[-1] and one[-1].startswith("[also: ")


def test_policy_objects_with_their_parameters_times_budgets():
    result = kvlab.replay(trace(), [kvlab.policy("snapkv", budget=20, window=8, kernel=5)], budgets=[20, 30])
    assert len(result.summary) == 2
    expected = oracle(*key("snapkv", dict(budget=20, window=8, kernel=5)))[0][0]["read"]
    assert sets(result["snapkv", 20].kept(0, 0)) == expected
    assert len(sets(result["snapkv", 30].kept(0, 0))[0]) == 30


def test_a_full_cache_stands_beside_policies_with_budgets_and_fractions_are_budgets():
    result = kvlab.replay(trace(), ["full", "streamingllm"], budgets=[0.25, 20])
    assert len(result.summary) == 3
    assert result["full"].summary["mass_lost"] == pytest.approx(0, abs=1e-6)
    assert result["streamingllm", 0.25].budget == 12
    # a fraction below sinks + 1 is raised, and that is recorded
    raised = kvlab.replay(trace(), ["streamingllm"], budgets=[0.02, 0.5]).summary
    assert raised.raised.tolist() == [True, False] and raised.entries.tolist() == [5, 24]


def test_a_name_without_a_budget_is_refused():
    with pytest.raises(KvlabError, match="budget"):
        kvlab.replay(trace(), "snapkv")
    with pytest.raises(KvlabError, match="snapkv"):
        kvlab.replay(trace(), ["snapk"], budgets=[40])


def test_a_list_of_traces_gives_one_row_each():
    policy = kvlab.policy("zsmerge", budget=16)
    result = kvlab.replay([trace(21), trace(31)], policy)
    assert len(result.summary) == 2
    alone = [kvlab.replay(t, policy).summary["output_error"] for t in (trace(21), trace(31))]
    assert result.summary.output_error.tolist() == pytest.approx(alone) and alone[0] != alone[1]


# What is missing


@pytest.mark.parametrize(
    "damage",
    [
        dict(pseudo=torch.zeros(LAYERS, HEADS + 1, 3, HEAD_DIM)),
        dict(pseudo=torch.zeros(LAYERS, HEADS, HEAD_DIM)),
        dict(accumulated=torch.zeros(LAYERS, HEADS, PROMPT - 1)),
    ],
)
def test_what_comes_beside_the_tensors_must_fit_them(damage):
    with pytest.raises(KvlabError, match=next(iter(damage))):
        kvlab.Trace.from_tensors(*tensors()[:3], PROMPT, **damage)


def test_a_trace_without_pseudo_queries_says_how_to_capture_them():
    queries, keys, values, _ = tensors()
    bare = kvlab.Trace.from_tensors(queries, keys, values, PROMPT)
    with pytest.raises(KvlabError, match=r"(?s)pseudo.*capture|capture.*pseudo"):
        kvlab.replay(bare, kvlab.policy("dapq", budget=16))


@pytest.mark.parametrize(
    "name, parameters, needed",
    [("snapkv", dict(budget=40), 32), ("zsmerge", dict(budget=16), 8), ("morphkv", dict(budget=30, window=20), 19)],
)
def test_queries_of_the_window_are_enough_and_fewer_are_refused(name, parameters, needed):
    queries, keys, values, _ = tensors()
    policy = kvlab.policy(name, **parameters)
    enough = kvlab.Trace.from_tensors(queries[:, :, -(STEPS + needed + 1) :], keys, values, PROMPT)
    whole = kvlab.replay(trace(), policy)
    part = kvlab.replay(enough, policy)
    for t in (0, 1, STEPS):
        assert part.stored(1, t).equal(whole.stored(1, t))
    with pytest.raises(KvlabError):
        kvlab.replay(kvlab.Trace.from_tensors(queries[:, :, -(STEPS + needed - 1) :], keys, values, PROMPT), policy)


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda q, k, v: (q[:, :5], k, v, PROMPT), "head"),
        (lambda q, k, v: (q, k, v[:, :, :-1], PROMPT), "values"),
        (lambda q, k, v: (q, k, v, PROMPT + STEPS + 1), "prompt"),
        (lambda q, k, v: (q[0], k[0], v[0], PROMPT), "layers"),
        (lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0], PROMPT), "layers"),
        (lambda q, k, v: (q, k, v, 0), "prompt"),
        (lambda q, k, v: (q[:, :, -3:], k, v, PROMPT), "quer"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(damage, said):
    with pytest.raises((KvlabError, ValueError), match=said):
        kvlab.Trace.from_tensors(*damage(*tensors()[:3]))


def test_a_trace_without_response_has_no_gold_to_recall():
    queries, keys, values, _ = (t[:, :, :PROMPT] for t in tensors())
    result = kvlab.replay(kvlab.Trace.from_tensors(queries, keys, values, PROMPT), kvlab.policy("snapkv", budget=40))
    assert sets(result.kept(0, 0)) == sets(replayed(*key("snapkv", dict(budget=40))).kept(0, 0))
    for measure in ("recall", "window_recall", "step_recall", "mass_lost", "output_error"):
        assert np.isnan(result.summary[measure]), measure


# A policy of the user's own


class Uneven(kvlab.Policy):
    """Keeps the first 9 positions of the first KV head and 4 in the second."""

    name = "uneven"

    def choose(self, prompt, budget):
        kept = torch.arange(9).expand(prompt.rows, prompt.kv_heads, 9).clone()
        kept[:, 1, 4:] = -1
        return kept

    def entries(self, prompt_length):
        return 9


class UnevenStep(Uneven):
    def step(self, store, weights):
        return None


class LastFive(kvlab.Policy):
    """Keeps everything and reads the last five."""

    name = "last_five"

    def entries(self, prompt_length):
        return 5

    def select(self, store, queries, scaling):
        return torch.arange(store.length - 5, store.length).expand(*store.positions.shape[:2], 5)

    def choose(self, prompt, budget):
        return super().choose(prompt, prompt.length)


both_ways = pytest.mark.parametrize("policy", [Uneven(), UnevenStep()], ids=["at once", "step by step"])


@both_ways
def test_heads_that_keep_different_numbers(policy):
    result = kvlab.replay(trace(), policy)
    for index, (queries, keys, values, _) in enumerate(zip(*exact(*tensors()))):
        steps = oracles.simulate(
            queries, keys, values, PROMPT, lambda g: oracles.taken(keys, values, g, range((9, 4)[g]))
        )
        for t in (0, 1, 2, STEPS):
            assert sets(result.kept(index, t)) == steps[t]["read"]
            assert sets(result.stored(index, t)) == steps[t]["stored"]
        expected = oracles.replay_measures(queries, keys, values, PROMPT, steps, 9)
        for measure in ("mass_lost", "output_error"):
            np.testing.assert_allclose(from_table(result, measure, index, "head"), expected[measure], atol=1e-5)
        np.testing.assert_allclose(from_table(result, "step_recall", index, "kv_head"), expected["step_recall"])
    entry = 2 * HEAD_DIM * 4 * LAYERS
    assert result.summary["stored_bytes"] == pytest.approx(entry * (9 + 4 + KV_HEADS * (STEPS + 1) / 2))


@both_ways
def test_a_retained_set_without_any_mass_still_has_an_output(policy):
    """With logits hundreds apart all that is read can weigh nothing in the full softmax; among itself it weighs one."""
    queries, keys, values = layer(43, 4, 2, HEAD_DIM, PROMPT, 20, layers=1, spread=100)
    arrays = exact(queries[0], keys[0], values[0])
    result = kvlab.replay(kvlab.Trace.from_tensors(queries, keys, values, PROMPT), policy)
    steps = oracles.simulate(*arrays, PROMPT, lambda g: oracles.taken(*arrays[1:], g, range((9, 4)[g])))
    expected = oracles.replay_measures(*arrays, PROMPT, steps, 9)
    assert (expected["mass_lost"] == 1).any(), "the input shows the case"
    np.testing.assert_allclose(result.mass_lost[0].T, expected["mass_lost"], atol=1e-5)
    np.testing.assert_allclose(result.output_error[0].T, expected["output_error"], rtol=1e-3, atol=1e-4)


def test_empty_slots_never_reach_the_output():
    """Memory that was never written is NaN here, as it may be anywhere; heads with fewer entries have such slots."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned = kvlab.replay(trace(), UnevenStep())
    finally:
        torch.use_deterministic_algorithms(False)
    assert poisoned.output_error.equal(kvlab.replay(trace(), UnevenStep()).output_error)
    np.testing.assert_allclose(poisoned.output_error, kvlab.replay(trace(), Uneven()).output_error, atol=1e-5)


def test_selection_stores_all_and_reads_its_choice():
    result = kvlab.replay(trace(), LastFive())
    entry = 2 * HEAD_DIM * 4 * LAYERS * KV_HEADS
    for t in (1, STEPS):
        read = list(range(PROMPT + t - 5, PROMPT + t))
        assert sets(result.kept(0, t)) == [read] * 2
        assert sets(result.stored(0, t)) == [list(range(PROMPT + t))] * 2
    weights = oracles.decoding_weights(*[a[1] for a in exact(*tensors())[:2]], PROMPT, STEPS)
    np.testing.assert_allclose(result.mass_lost[1, :, -1], 1 - weights[:, -5:].sum(axis=-1), atol=1e-5)
    assert result.summary["read_bytes"] == pytest.approx(5 * entry)
    assert result.summary["stored_bytes"] == pytest.approx(entry * (PROMPT + (STEPS + 1) / 2))


@pytest.mark.parametrize("name", ["adakv", "dapq", "hybrid", "morphkv", "quest", "rkv", "snapkv", "zsmerge"])
def test_a_trace_and_what_is_computed_for_it_go_when_nobody_holds_them(name):
    """And not when Python next looks for circles: twenty documents of a notebook would be in memory at once."""
    own = replace(trace())
    gc.collect()
    gc.disable()
    try:
        result = kvlab.replay(own, name, budgets=[40])
        assert not result.table.empty
        assert reference(own) is reference(own) and reference(replace(own)) is not reference(own)
        watched = [weakref.ref(own), weakref.ref(reference(own))]
        del own, result
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()
