"""Calibrated transform coding: against a coder of plain loops, what a calibration promises, and who is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.commands import call
from support.live_runs import generate, prompt
from support.refusals import refusal
from support.tensors import exact, sets
from support.texts import FERRY

import kvlab
from kvlab.core.kvtc import GAINS, SINKS, STEPS, Calibration, allotted
from kvlab.core.rotation import Rotation
from kvlab.core.storage import keys_and_values, kvtc, stored_as
from kvlab.core.store import LayerStore
from kvlab.inputs.corpus import Document
from kvlab.traces import calibrating

TEXTS = [Document("ferry", FERRY), Document("again", FERRY[100:])]
LAYERS, HEADS, DIM = 2, 3, 16
TURN = Rotation(tuple(100.0 ** (-2 * pair / DIM) for pair in range(DIM // 2)), factor=1.1)


def vectors(n, seed, near=0):
    """Keys and values `[layers, heads, n, dim]` before RoPE, most of whose variance lies along a few directions."""
    shape = torch.randn(LAYERS, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(near))
    spread = shape * 0.6 ** torch.arange(DIM)[:, None]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYERS, HEADS, n, DIM, generator=generator) @ spread + shape[:, :, :1] for _ in range(2)]


def turned(keys, start=0):
    return torch.stack([TURN.turned(layer, torch.arange(start, start + keys.shape[2])) for layer in keys])


@pytest.fixture(scope="module")
def learnt():
    keys, values = vectors(500, 1)
    return Calibration.learn("a-model", turned(keys), values, torch.arange(500), [TURN] * LAYERS)


def store_of(keys, values, storage):
    store = LayerStore(keys.clone(), values.clone())
    store.layers = tuple(range(LAYERS))
    store.set_storage(storage)
    return store


def bits_by_loop(deviations, total):
    errors, bits = [deviation**2 for deviation in deviations], [0] * len(deviations)
    for _ in range(total):
        best = max((i for i in range(len(bits)) if bits[i] < 8), key=lambda i: (errors[i], -i))
        bits[best] += 1
        errors[best] /= 4
    return bits


def coded_by_loop(vector, mean, basis, deviations, bits):
    """One vector as it is read: of all gains the one with the smallest error."""
    away, found = basis.T @ (vector - mean), []
    for gain in GAINS:
        rounded = np.zeros(len(away))
        for i, number in enumerate(bits):
            if not number:
                continue
            step, half = STEPS[number] * deviations[i] * gain, 2**number // 2
            cell = min(max(np.floor(away[i] / step), -half), half - 1)
            rounded[i] = (cell + 0.5) * step
        found.append((((rounded - away) ** 2).sum(), rounded))
    return basis @ min(found, key=lambda each: each[0])[1] + mean


@pytest.mark.parametrize("bits", [1, 2.5, 4])
def test_what_is_read_is_what_the_plain_loop_codes(learnt, bits):
    keys, values = vectors(12, 2)
    keys[:, :, 7] *= 9  # far from all others
    store = store_of(turned(keys), values, kvtc(learnt, bits))
    parts = [("keys", keys, store.keys), ("values", values, store.values)]
    for name, given, found in parts:
        tables = exact(learnt.means[name], learnt.bases[name], learnt.deviations[name])
        for layer in range(LAYERS):
            for head in range(HEADS):
                mean, basis, deviations = (np.asarray(table)[layer, head] for table in tables)
                own = bits_by_loop(deviations, round(bits * DIM))
                assert sum(own) == round(bits * DIM) and own == allotted(torch.tensor(deviations), sum(own)).tolist()
                loop = [coded_by_loop(vector, mean, basis, deviations, own) for vector in exact(given[layer, head])]
                expected = torch.tensor(np.array(loop)).float()
                expected[:SINKS] = given[layer, head, :SINKS]
                if name == "keys":
                    expected = TURN.turned(expected, torch.arange(12))
                torch.testing.assert_close(found[layer, head], expected, atol=1e-4, rtol=1e-4)


def test_the_verbs_leave_each_entry_coded_by_itself(learnt):
    """Evicted, appended, reordered, one head fuller than another: every entry is as if it were coded alone."""
    keys, values = vectors(40, 3)
    after = turned(keys)
    every = store_of(after, values, kvtc(learnt, 3))
    whole = every.keys, every.values
    store = store_of(after[:, :, :30], values[:, :, :30], kvtc(learnt, 3))
    keep = torch.arange(0, 30, 3).repeat(LAYERS, HEADS, 1)
    keep[0, 1, 4:] = -1
    store.evict(keep)
    for position in range(30, 40):
        store.append(after[:, :, position : position + 1], values[:, :, position : position + 1])
    store.drop(1)
    store.reorder(torch.tensor([1, 0]))
    store.expand(2 * HEADS)
    positions, read = store.positions, (store.keys, store.values)
    for row in range(LAYERS):
        for head in range(2 * HEADS):
            where = positions[row, head][positions[row, head] >= 0]
            expected = [0, *range(6, 30, 3), *range(30, 40)]
            assert where.tolist() == ([0, 6, 9, *range(30, 40)] if (row, head // 2) == (1, 1) else expected)
            for found, all_of_them in zip(read, whole, strict=True):
                torch.testing.assert_close(found[row, head, : len(where)], all_of_them[1 - row, head // 2, where])
                assert not found[row, head, len(where) :].any(), "an empty slot holds zeros"
    newest = (positions >= 0).sum(-1, keepdim=True) - 1
    for found, all_of_them in zip(store.gather(newest), whole, strict=True):
        expected = all_of_them[:, :, 39:].flip(0).repeat_interleave(2, 1)
        torch.testing.assert_close(found, expected)


def test_a_merged_entry_is_coded_again_at_its_position(learnt):
    keys, values = vectors(6, 4)
    for into, other in ((5, 2), (1, 5)):
        store = store_of(turned(keys), values, kvtc(learnt, 4))
        before = store.keys
        slot = torch.full((LAYERS, HEADS), into)
        store.merge(torch.full((LAYERS, HEADS, 1), other), slot)
        mean = (before[:, :, into] + before[:, :, other])[:, :, None].repeat(1, 1, into + 1, 1) / 2
        again = store_of(mean, mean, kvtc(learnt, 4)).keys[:, :, into]
        torch.testing.assert_close(store.keys[:, :, into], again, atol=1e-4, rtol=1e-4)


def test_bytes_are_those_that_are_written_and_fewer_where_entries_repeat(learnt):
    keys, values = vectors(300, 5)
    store = store_of(turned(keys), values, kvtc(learnt, 2))
    sinks = LAYERS * HEADS * SINKS * 2 * DIM * 4
    packed = LAYERS * HEADS * (300 - SINKS) * 2 * (2 * DIM // 8 + 1)
    assert packed / 2 < store.kv_bytes - sinks <= packed and store.key_bytes < store.kv_bytes
    half = torch.arange(150).repeat(LAYERS, HEADS, 1)  # in proportion, whichever they are
    assert store.bytes_of(half) == round(store.kv_bytes / 2) and store.bytes_of(None) == store.kv_bytes
    same = store_of(keys, values[:, :, :1].expand_as(values), kvtc(learnt, 2))
    assert same.kv_bytes - same.key_bytes - sinks / 2 < packed / 50
    store.evict(torch.full((LAYERS, HEADS, 1), -1))
    assert store.kv_bytes == 0


def test_held_out_vectors_are_nearer_than_in_turbo_at_fewer_bytes(learnt):
    keys, values = vectors(400, 6)
    after = turned(keys)
    coded, other = store_of(after, values, kvtc(learnt, 2)), store_of(after, values, stored_as("turbo-2"))
    assert coded.kv_bytes < other.kv_bytes
    for truth, found, rival in ((after, coded.keys, other.keys), (values, coded.values, other.values)):
        assert (found - truth).square().sum() < (rival - truth).square().sum() / 3


def test_a_calibration_holds_the_principal_components(learnt):
    keys, values = vectors(500, 1)
    for name, given in (("keys", keys), ("values", values)):
        for layer in range(LAYERS):
            for head in range(HEADS):
                covariance = np.cov(given[layer, head].double().numpy().T, bias=True)
                basis, deviations = exact(learnt.bases[name][layer, head], learnt.deviations[name][layer, head])
                np.testing.assert_allclose(basis.T @ basis, np.eye(DIM), atol=5e-3)
                made = basis @ np.diag(deviations**2) @ basis.T
                np.testing.assert_allclose(made, covariance, atol=5e-3 * np.abs(covariance).max())
                assert (np.diff(deviations) <= 0).all()


def test_a_file_holds_all_of_it(learnt, tmp_path):
    path = learnt.save(tmp_path / "learnt.safetensors")
    again = Calibration.load(path)
    assert again.sha256 == learnt.sha256 and again.rotations == learnt.rotations and again.model == "a-model"
    named = stored_as(f"kvtc-2:{path}")
    assert named == kvtc(learnt, 2) and named != kvtc(learnt, 3) and str(named) == f"kvtc-2@{learnt.sha256[:8]}"
    path.write_bytes(path.read_bytes()[:200])
    assert "is no calibration" in refusal(stored_as, f"kvtc-2:{path}")


def test_what_does_not_fit_is_refused_in_one_sentence(learnt, tmp_path):
    cpu = torch.device("cpu")
    storage = kvtc(learnt, 2)
    storage.check(DIM, cpu, "a-model@1234")
    assert "was calibrated for a-model, and this model is other" in refusal(storage.check, DIM, cpu, "other")
    assert "heads of 16 channels, not of 32" in refusal(storage.check, 32, cpu, "a-model")
    assert "works on a CPU alone" in refusal(storage.check, DIM, torch.device("cuda"), "a-model")
    wide = torch.zeros(LAYERS, 2, 4, DIM)
    assert "3 KV heads of 16 channels" in refusal(store_of, wide, wide, storage)
    assert "names no calibration" in refusal(stored_as, "kvtc-2") and "kvtc-x" in refusal(stored_as, "kvtc-x:file")
    assert "cannot read" in refusal(stored_as, f"kvtc-2:{tmp_path / 'none'}")
    assert "no half of a pair" in refusal(keys_and_values, storage, "turbo-2")
    for bits in (0, 9, 0.3):
        assert "fill whole bytes of 16" in refusal(kvtc, learnt, bits)
    assert "more than 5 tokens" in refusal(calibrating.learn, [])


def test_a_calibrated_model_is_replayed_and_run_live(tiny):
    lm, ids = tiny("tiny-llama-gqa"), prompt(60, seed=3)
    traces = [kvlab.capture(lm, prompt(90, seed=seed), 1) for seed in (1, 2)]
    storage, policy = kvtc(calibrating.learn(traces), 4), kvlab.policy("snapkv", budget=30, window=6)
    trace = kvlab.capture(lm, ids, 4, policies=[policy])
    replay = kvlab.replay(trace, policy, storage=storage)
    assert 0 < kvlab.replay(trace, "full", storage=storage).output_error.mean() < 0.3
    with kvlab.compress(lm.model, policy, storage=storage) as session:
        generate(lm.model, ids, 5)
    live = session._cache
    assert live is not None
    for index in range(2):
        assert sets(session.kept_after_prefill(index)) == sets(replay.kept(index, 0))
        store = live.compressed[index].groups[0].store
        assert int(store.rounded_slots.sum()) == int((store.positions >= SINKS).sum()) >= 2 * 30
    # Each layer is written by itself live, and all together in a replay.
    assert abs(session.kv_bytes - replay.stored_bytes[-1]) < 0.1 * session.kv_bytes


def test_the_command_writes_what_measure_finds(capsys, monkeypatch, tmp_path, reader):
    monkeypatch.setattr("kvlab.inputs.models.load", lambda name: reader)
    monkeypatch.setattr("kvlab.inputs.corpus.documents_between", lambda *_, **__: iter(TEXTS))
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "calibrate", "any", "--tokens", "40")
    assert code == 0
    found = calibrating.measure(reader, 40, texts=TEXTS)
    assert Calibration.load(tmp_path / out.strip()).sha256 == found.sha256
