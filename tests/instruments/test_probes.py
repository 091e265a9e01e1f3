"""Probes of live runs against plain computations from what the steps were given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import oracles
from support.live_runs import EVERYTHING, SMALL, Witness, everything, generate, left_padded, prompt, small
from support.tensors import exact, sets

import kvlab
from kvlab.errors import KvlabError
from kvlab.instruments.probes import PROBES, Probe, QuerySimilarity, probe

STEPS, LENGTH = 40, 60
ALL = ["mass_lost", "step_recall", "output_error", "entropy", "positions", "bytes", "time"]
ENTRY = 2 * 16 * 4


@pytest.fixture(scope="module")
def run(tiny):
    """A live run at a small budget with all probes, and the full cache's tensors `[layers, ...]` of the same past."""
    found = {}

    def make(name):
        if name not in found:
            lm, witness, sizes = tiny("tiny-llama-gqa"), Witness(), []
            with kvlab.compress(lm.model, small(name), probes=[*ALL, witness]) as session:
                with torch.inference_mode():
                    out = lm.model(prompt(LENGTH, seed=3))
                    for _ in range(STEPS):
                        past = out.past_key_values
                        out = lm.model(out.logits[:, -1:].argmax(-1), past_key_values=past)
                        sizes.append((session.kv_bytes + session.aux_bytes, session.read_bytes))
            trace = kvlab.capture(lm, prompt(LENGTH, seed=3), new_tokens=0, window=1, pseudo=())
            layers = []
            for layer in range(2):
                seen = [witness.steps[layer, t] for t in range(1, STEPS + 1)]
                queries = torch.stack([s["queries"][0] for s in seen], 1)
                keys, values = (
                    torch.cat([old[layer], torch.stack([s[part][0] for s in seen], 1)], 1)
                    for old, part in ((trace.keys, "key"), (trace.values, "value"))
                )
                steps = [None] + [dict(read=sets(s["read"][0]), output=exact(s["output"][0])) for s in seen]
                layers.append((*exact(queries, keys, values), steps))
            found[name] = session, layers, sizes
        return found[name]

    return make


def numbers(session, measure, layer, axis):
    """`[steps, heads]` of one measure of the only sequence."""
    table = session.table
    rows = table[(table.measure == measure) & (table.layer == layer)]
    assert set(rows.sequence) == {0} and set(rows.prompt) == {1}
    return rows.pivot(index="step", columns=axis, values="value").to_numpy(dtype=float)


@pytest.mark.parametrize("name", SMALL)
def test_losses_are_those_of_the_full_cache_on_the_same_queries(run, name):
    session, layers, _ = run(name)
    for layer, (queries, keys, values, steps) in enumerate(layers):
        lost, error, found = [], [], []
        for t in range(1, STEPS + 1):
            weights = oracles.decoding_weights(queries, keys, LENGTH, t)
            full = [oracles.attention_output(weights[h], values[h // 2, : LENGTH + t]) for h in range(4)]
            own = [
                oracles.top_positions(oracles.summed_over_group(weights, g, 2), SMALL[name]["budget"]) for g in range(2)
            ]
            lost.append(oracles.mass_lost(weights, steps[t]["read"]))
            error.append(oracles.output_error(full, steps[t]["output"]))
            found.append(oracles.recall(steps[t]["read"], own))
        np.testing.assert_allclose(numbers(session, "mass_lost", layer, "head"), lost, atol=1e-5)
        np.testing.assert_allclose(numbers(session, "output_error", layer, "head"), error, atol=1e-4, rtol=1e-3)
        np.testing.assert_allclose(numbers(session, "step_recall", layer, "kv_head"), found, atol=1e-6)
        assert np.max(lost) > 0.05 and np.max(error) > 0.05


@pytest.mark.parametrize("name", ["snapkv", "streamingllm", "exact_topk"])
def test_entropy_is_that_of_the_attention_over_what_was_read(run, name):
    session, layers, _ = run(name)
    for layer, (queries, keys, _, steps) in enumerate(layers):
        expected = [
            [
                oracles.entropy(oracles.attention_weights(queries[h, t - 1], keys[h // 2, steps[t]["read"][h // 2]]))
                for h in range(4)
            ]
            for t in range(1, STEPS + 1)
        ]
        np.testing.assert_allclose(numbers(session, "entropy", layer, "head"), expected, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_bytes_are_the_sessions_and_positions_those_read(run, name):
    session, layers, sizes = run(name)
    by_step = session.table[session.table.measure == "stored_bytes"].groupby("step").value.sum()
    assert by_step.tolist() == [stored for stored, _ in sizes]
    by_step = session.table[session.table.measure == "read_bytes"].groupby("step").value.sum()
    assert by_step.tolist() == [read for _, read in sizes]
    for layer in range(2):
        for t in range(1, STEPS + 1):
            assert sets(session.records.positions(layer, t)) == layers[layer][3][t]["read"]


def test_read_bytes_by_hand(run):
    """A budget and the own entry, with MorphKV's profiles of 6 weights in each slot; exact top-k its budget alone."""
    read = {}
    for name in ("streamingllm", "exact_topk", "morphkv"):
        session = run(name)[0]
        rows = session.table[session.table.measure == "read_bytes"]
        read[name] = rows[rows.step > 1].groupby("step").value.sum().unique().tolist()
    profiles = 15 * 6 * 4
    assert read == {
        "streamingllm": [13 * ENTRY * 4],
        "exact_topk": [8 * ENTRY * 4],
        "morphkv": [4 * (15 * ENTRY + profiles)],
    }


@pytest.mark.parametrize("name", SMALL)
def test_the_running_means_are_the_tables(run, name):
    session = run(name)[0]
    means = session.table.groupby("measure").value.mean().to_dict()
    assert session.means == pytest.approx(means, rel=1e-5)
    assert set(means) == {
        "mass_lost",
        "step_recall",
        "output_error",
        "entropy",
        "stored_bytes",
        "read_bytes",
        "seconds",
    }
    seconds = session.table[session.table.measure == "seconds"]
    assert len(seconds) == STEPS and (seconds.value > 0).all() and seconds.layer.isna().all()


@pytest.mark.parametrize("name", EVERYTHING)
def test_nothing_is_lost_at_full_budget(tiny, name):
    lm, ids = tiny("tiny-llama-gqa"), prompt(50)
    reference = kvlab.capture(lm, ids, new_tokens=16, pseudo=())
    probes = ["mass_lost", "step_recall", "output_error", QuerySimilarity(reference)]
    with kvlab.compress(lm.model, everything(name), probes=probes) as session:
        generate(lm.model, ids, 17)
    extremes = session.table.groupby("measure").value.agg(["min", "max"])
    assert extremes.loc["mass_lost", "max"] < 1e-5
    assert extremes.loc["output_error", "max"] < 1e-4
    assert extremes.loc["step_recall"].tolist() == [1, 1]
    for measure in ("query_similarity", "query_similarity_pre"):
        assert extremes.loc[measure, "min"] > 1 - 1e-5
        assert (session.table.measure == measure).sum() == 16 * 2 * 4


def test_queries_drift_from_the_reference_after_eviction(tiny):
    lm, ids = tiny("tiny-qwen3"), prompt(60)
    reference = kvlab.capture(lm, ids, new_tokens=10, pseudo=())
    policy = kvlab.policy("streamingllm", budget=12)
    with kvlab.compress(lm.model, policy, probes=[QuerySimilarity(reference), Witness()]) as session:
        generate(lm.model, ids, 20)
    witness = session.probes[1]
    rows = session.table[(session.table.measure == "query_similarity") & (session.table.layer == 1)]
    assert rows.step.max() == 10, "the reference ends there"
    for step, head in ((1, 0), (7, 3)):
        a, b = witness.steps[1, step]["queries"][0, head], reference.response_queries[1, head, step - 1]
        expected = oracles.query_similarity(*exact(a[None], b[None]))
        found = rows[(rows.step == step) & (rows["head"] == head)].value.item()
        assert found == pytest.approx(expected, abs=1e-5)
    assert rows.value.min() < 0.99


def test_similarity_in_a_padded_batch_is_each_rows_own(tiny):
    lm, ids = tiny("tiny-llama-gqa"), prompt(50)
    reference = kvlab.capture(lm, ids, new_tokens=8, pseudo=())
    padded, mask = left_padded(prompt(60, seed=9)[0], ids[0])
    with kvlab.compress(lm.model, "full", probes=[QuerySimilarity(reference)]) as session:
        generate(lm.model, padded, 9, attention_mask=mask)
    by_row = session.table.groupby(["measure", "sequence"]).value.mean()
    for measure in ("query_similarity", "query_similarity_pre"):
        assert by_row[measure, 1] > 1 - 1e-5 and by_row[measure, 0] < 0.99


# --- the shadow ---


def test_a_shadow_that_does_not_fit_is_refused_before_the_first_step(tiny):
    lm, ids = tiny("tiny-llama-gqa"), prompt(50)
    whole = 50 * 4 * ENTRY
    for limit, steps in ((whole - 1, 0), (whole + 3 * 4 * ENTRY, 3)):
        policy = kvlab.policy("streamingllm", budget=12)
        with kvlab.compress(lm.model, policy, probes=["mass_lost"], shadow_bytes=limit) as session:
            with pytest.raises(KvlabError, match="more than shadow_bytes allows"):
                generate(lm.model, ids, 12)
        assert len(session.table) == steps * 2 * 4
        if not steps:
            assert session.kept(0).shape[1] == 50, "nothing was evicted yet"
    with kvlab.compress(lm.model, policy, probes=["mass_lost"], shadow_bytes=whole + 11 * 4 * ENTRY):
        generate(lm.model, ids, 12)


def test_the_shadow_limit_counts_the_whole_batch(tiny):
    model = tiny("tiny-llama-gqa").model
    ids, mask = left_padded(prompt(50)[0], prompt(50, seed=2)[0], prompt(40)[0])
    with kvlab.compress(model, "full", probes=["mass_lost"], shadow_bytes=2 * 60 * 4 * ENTRY):
        with pytest.raises(KvlabError, match="shadow_bytes"):
            generate(model, ids, 12, attention_mask=mask)


@pytest.mark.parametrize("wanted, shadowed", [(ALL[3:], False), (["step_recall"], True)])
def test_a_shadow_is_kept_only_for_probes_that_ask(tiny, wanted, shadowed):
    model = tiny("tiny-llama-gqa").model
    with kvlab.compress(model, kvlab.policy("streamingllm", budget=12), probes=wanted):
        out = generate(model, prompt(50))
    groups = [g for layer in out.past_key_values.layers for g in layer.groups]
    assert [g.shadow is not None for g in groups] == [shadowed] * 2
    assert all(g.shadow is None or g.shadow.store.length == 61 for g in groups)


@pytest.mark.parametrize("turns", ["recompress", "leave"])
def test_the_shadow_goes_on_in_the_next_turn(tiny, turns):
    """What was evicted in the first turn counts as lost in the second."""
    lm, witness = tiny("tiny-llama-gqa"), Witness()
    policy = kvlab.policy("snapkv", **SMALL["snapkv"])
    with kvlab.compress(lm.model, policy, turns=turns, probes=["mass_lost", witness]) as session:
        first = generate(lm.model, prompt(50), 10)
        longer = torch.cat([first.sequences, prompt(15, seed=6)], 1)
        out = generate(lm.model, longer, 8, past_key_values=first.past_key_values)
    for layer, index in ((0, 3), (1, 0)):
        store = out.past_key_values.layers[layer].groups[0].shadow.store
        assert store.positions[0, 0].tolist() == list(range(50 + 10 + 15 + 7))
        for step in (10, 16):
            query = exact(witness.steps[layer, step]["queries"][0, index])
            length = 75 + step - 9
            weights = oracles.attention_weights(query, exact(store.keys[0, index // 2, :length]))
            lost = 1 - sum(weights[p] for p in sets(witness.steps[layer, step]["read"][0])[index // 2])
            assert numbers(session, "mass_lost", layer, "head")[step - 1, index] == pytest.approx(lost, abs=1e-5)
    # The first layer's keys depend on tokens and positions alone.
    trace = kvlab.capture(lm, out.sequences[0, :-1], new_tokens=0, pseudo=())
    torch.testing.assert_close(out.past_key_values.layers[0].groups[0].shadow.store.keys[0], trace.keys[0])


# --- one's own, and names ---


class Norms(Probe):
    """Norm of each head's output."""

    name = "norms"

    def look(self, seen, records, where):
        records.add("norm", seen.step.output[:, :, 0].norm(dim=-1), axis="head", **where)


def test_a_probe_of_ones_own(tiny):
    model = tiny("tiny-llama-gqa").model
    witness = Witness()
    with kvlab.compress(model, "full", probes=[Norms(), witness]) as session:
        generate(model, prompt(30, rows=2), 6)
    assert session.table.columns.tolist() == [
        "policy",
        "budget",
        "entries",
        "storage",
        "prompt",
        "sequence",
        "layer",
        "kv_head",
        "head",
        "step",
        "measure",
        "value",
    ]
    assert len(session.table) == 5 * 2 * 2 * 4 and set(session.table.measure) == {"norm"}
    row = session.table.query("sequence == 1 and layer == 1 and step == 4 and head == 2").iloc[0]
    assert row.value == pytest.approx(float(witness.steps[1, 4]["output"][1, 2].norm()))
    assert kvlab.compress(model, "full").table.empty


def test_every_name_makes_a_probe():
    for name, cls in PROBES.items():
        assert cls.name == name and cls.summary
        if name != "query_similarity":
            assert isinstance(probe(name), cls)
    with pytest.raises(KvlabError, match="reference run: pass kvlab.instruments.probes.QuerySimilarity"):
        probe("query_similarity")
    with pytest.raises(KvlabError, match="unknown probe 'entropi'; did you mean 'entropy'"):
        probe("entropi")
    with pytest.raises(KvlabError, match="unknown probe 'recall'; did you mean 'step_recall'"):
        probe("recall")


def test_a_probe_of_one_measure_bears_its_name(run):
    """Whoever asks for a probe finds its numbers under that name."""
    assert {"mass_lost", "step_recall", "output_error", "entropy"} <= set(run("snapkv")[0].table.measure)


def test_the_budget_is_what_was_asked_for_and_entries_what_it_came_to(tiny):
    """Two prompts of different lengths in one batch: a fraction comes to other entries for each."""
    lm = tiny("tiny-llama-gqa")
    ids, mask = left_padded(prompt(60, seed=1)[0], prompt(40, seed=2)[0])
    policy = kvlab.policy("snapkv", budget=0.5, window=4)
    with kvlab.compress(lm, policy, probes=["bytes"]) as session:
        generate(lm.model, ids, 3, attention_mask=mask)
        generate(lm.model, prompt(80), 3)
    table = session.table
    assert set(table.budget) == {0.5}
    found = {place: set(rows.entries) for place, rows in table.groupby(["prompt", "sequence"])}
    assert found == {(1, 0): {30}, (1, 1): {20}, (2, 0): {40}}


def test_the_table_is_written_as_parquet(run, tmp_path):
    import pandas

    records = run("snapkv")[0].records
    assert records.save(tmp_path / "new" / "probes.parquet").exists()
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "new" / "probes.parquet"), records.table)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["probes.parquet"]


def test_positions_of_every_prompt_and_every_sequence_stay_apart(tiny):
    lm = tiny("tiny-llama-gqa")
    ids, mask = left_padded(prompt(50, seed=1)[0], prompt(30, seed=2)[0])
    with kvlab.compress(lm.model, kvlab.policy("streamingllm", budget=8), probes=["positions"]) as session:
        generate(lm.model, ids, 5, attention_mask=mask)
        generate(lm.model, prompt(20, seed=3), 5)
    found = session.records.positions
    assert sets(found(1, 2, sequence=0, prompt=1))[0] == [0, 1, 2, 3, 47, 48, 49, 50, 51]
    assert sets(found(1, 2, sequence=1, prompt=1))[0] == [0, 1, 2, 3, 27, 28, 29, 30, 31]
    assert sets(found(1, 2))[0] == sets(found(1, 2, prompt=2))[0] == [0, 1, 2, 3, 17, 18, 19, 20, 21]
    with pytest.raises(KvlabError, match="step 9.*positions"):
        found(0, 9)


def test_what_every_step_read_is_one_table(tiny):
    """The same as by layer and step; in a replay of the same prompt the same again."""
    lm, policy = tiny("tiny-llama-gqa"), kvlab.policy("streamingllm", budget=8)
    with kvlab.compress(lm.model, policy, probes=["positions"]) as session:
        generate(lm.model, prompt(30, seed=2), 4)
        generate(lm.model, prompt(20, seed=3), 4)
    reads = session.records.reads
    columns = ["policy", "budget", "storage", "prompt", "sequence", "layer", "kv_head", "step", "position"]
    assert reads.columns.tolist() == columns and set(reads.policy) == {"streamingllm"} and set(reads.budget) == {8}
    for keys, rows in reads.groupby(["prompt", "sequence", "layer", "step"]):
        number, sequence, layer, step = (int(key) for key in keys)
        by_head = [part.position.tolist() for _, part in rows.groupby("kv_head")]
        assert by_head == sets(session.records.positions(layer, step, sequence, number))
    assert len(reads) == 2 * 3 * 2 * 2 * 9, (
        "prompts, decoding steps, layers, KV heads, and the budget with the own entry"
    )
    trace = kvlab.capture(lm, prompt(20, seed=3), new_tokens=3, pseudo=())
    replayed = kvlab.replay(trace, policy, probes=["positions"]).records.reads
    last = reads[reads.prompt == 2].assign(prompt=replayed.prompt.iloc[0])
    order = ["layer", "step", "kv_head", "position"]
    assert last.sort_values(order)[order].values.tolist() == replayed.sort_values(order)[order].values.tolist()


def test_without_the_probe_there_is_an_empty_table(tiny):
    lm = tiny("tiny-llama-gqa")
    with kvlab.compress(lm.model, kvlab.policy("streamingllm", budget=8), probes=["time"]) as session:
        generate(lm.model, prompt(20, seed=3), 4)
    assert session.records.reads.empty and "position" in session.records.reads
