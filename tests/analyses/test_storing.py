"""Evict or quantise: bytes as served, losses of policies and storages, and what is concluded from them."""

import pandas as pd
import pytest
import torch
from support.spread import students
from support.storing import FEW, MIB, losses

import kvlab
from kvlab.analyses.tasks import scores
from kvlab.analyses.tasks.examples import needle_grid
from kvlab.analyses.together import served, storing
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.live import passes
from kvlab.render.figures import storage as draw


def store(dtype, storage, n=300):
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, n, 64, generator=generator).to(dtype) for _ in range(2))
    made = LayerStore(keys, values)
    made.set_storage(storage)
    for _ in range(40):
        made.append(keys[:, :, :1], values[:, :, :1])
        made.quantise_pending()
    return made


@pytest.mark.parametrize("name", kvlab.storages())
def test_float32_served_takes_the_bytes_of_bfloat16_and_keeps_its_values(name):
    """By two ways: what a store in bfloat16 really takes, and values that are those of the plain storage."""
    ours, plain = store(torch.float32, served.as_served(name)), store(torch.float32, kvlab.core.storage.stored_as(name))
    assert ours.kv_bytes == store(torch.bfloat16, kvlab.core.storage.stored_as(name)).kv_bytes
    assert ours.kv_bytes == ours.bytes_of(torch.arange(340).expand(2, 3, -1))
    assert torch.equal(ours.keys, plain.keys) and torch.equal(ours.values, plain.values)
    in_model_precision = name == "as_is" or name.startswith("kivi")
    assert (ours.kv_bytes < plain.kv_bytes) == in_model_precision


def test_a_group_of_kivi_is_as_large_as_the_head_size_lets_it():
    assert [form.group for form in served.forms(["kivi-4", "int8"], 64).values()] == [32, 1]
    assert [form.group for form in served.forms(["kivi-4", "kivi-2"], 80).values()] == [16, 16]
    (apart,) = served.forms(["turbo-4/kivi-2"], 80).values()
    assert [half.group for half in apart.halves] == [2, 16]
    with pytest.raises(KvlabError, match="kivi-4"):
        served.forms(["kivi4"], 64)


@pytest.fixture(scope="module")
def measured(reader):
    documents = ["sotu/1962", "sotu/1975"]
    found = storing.systems(reader, ["snapkv", "h2o"], [0.2, 0.5], ["as_is", "kivi-4"], ["kivi-4"])
    ids = [reader.encode(kvlab.document(name).window(reader, 360).text, chat=False) for name in documents]
    traces = [kvlab.capture(reader, one, new_tokens=8, policies=["snapkv", "h2o"], window=64) for one in ids]
    items = needle_grid(reader, [360], [0.5], documents[0])
    return found, traces, items, storing.measure(reader, traces, found, items)


def test_every_system_has_every_loss(measured):
    found, traces, items, table = measured
    assert len(found) == 2 + 2 * 2 * 2 and (found[0].policy.name, found[0].form) == ("full", "as_is")
    assert len(table) == len(found) * (2 * len(traces) + len(items)) and not table["value"].isna().any()
    plain = table.query("policy == 'full' and storage == 'as_is'")
    assert plain.query("measure != 'needles_lost'")["value"].abs().max() < 1e-5
    assert (plain["stored_bytes"] == plain["full_bytes"]).all()
    rounded = table.query("policy == 'full' and storage == 'kivi-4'")
    assert (rounded["stored_bytes"] < plain["stored_bytes"].min()).all()
    assert (rounded.query("measure != 'needles_lost'")["value"] > 0).all()


def test_the_full_cache_takes_two_bytes_a_number_in_a_replay_and_inside_the_model(measured, reader):
    _, traces, _, table = measured
    trace, plain = traces[0], table.query("policy == 'full' and storage == 'as_is'")
    number = trace.n_layers * trace.kv_heads * trace.keys.shape[-1] * 2 * served.NUMBER
    of_replay = plain.query("measure == 'output_error'")["stored_bytes"].iloc[0]
    assert of_replay == pytest.approx(number * (trace.prompt_length + (trace.steps + 1) / 2))
    of_model = plain.query("measure == 'kl'")["stored_bytes"].iloc[0]
    assert of_model == number * (trace.prompt_length + trace.steps - 1)


def test_a_divergence_is_that_of_the_fidelity_of_one_policy(measured, reader):
    _, traces, _, table = measured
    ids, policy = traces[0].ids[: traces[0].prompt_length], kvlab.policy("snapkv", budget=0.2)
    for storage in ("as_is", "kivi-4"):
        form = served.forms([storage], reader.model.config.head_dim)[storage]
        alone = kvlab.fidelity(reader, policy, ids, new_tokens=8, storage=form).table
        steps = alone.loc[(alone["measure"] == "kl") & (alone["step"] > scores.SCORED_FROM)]
        ours = table.query("policy == 'snapkv' and budget == 0.2 and storage == @storage and measure == 'kl'")
        assert ours["value"].iloc[0] == pytest.approx(steps["value"].mean(), rel=1e-3, abs=1e-6)


def test_a_divergence_takes_from_its_trace_what_the_model_repeated(reader, monkeypatch):
    ids = reader.encode(kvlab.document("sotu/1962").window(reader, 360).text, chat=False)
    trace = kvlab.capture(reader, ids, new_tokens=8, policies=["kvzip"])
    found, ran, run = storing.systems(reader, ["kvzip"], [0.2, 0.5], ["as_is"], []), [], passes.run
    monkeypatch.setattr(passes, "run", lambda *given: ran.append(1) or run(*given))
    known = [value for _, _, value, _ in storing._divergences(reader, trace, found)]
    assert not ran
    monkeypatch.setattr(trace, "repeated", {})
    anew = [value for _, _, value, _ in storing._divergences(reader, trace, found)]
    assert len(ran) == 1, "both budgets share one pass"
    assert known == pytest.approx(anew, rel=1e-3, abs=1e-6) and known[1] > known[2] > 0


def test_what_cannot_be_scored_is_refused(reader):
    with pytest.raises(KvlabError, match="2 tokens cannot be scored: 3 are needed"):
        next(
            storing.logits_of_systems(
                reader, torch.ones(1, 40, dtype=torch.int64), torch.ones(2, dtype=torch.int64), []
            )
        )


def test_a_system_is_read_off_at_the_bytes_of_each_document():
    at = pd.Series({"a": 20 * MIB, "b": 40 * MIB})
    # 20 MiB lie half way between 10 and 40 on a logarithmic axis.
    assert storing.read_off(FEW, "one", "as_is", "kl", at).to_dict() == pytest.approx({"a": 0.7, "b": 0.5})
    assert storing.read_off(FEW, "small", "as_is", "kl", at) is None
    assert storing.read_off(FEW, "one", "rounded", "kl", at) is None


def test_differences_are_paired_at_equal_bytes():
    found = storing.findings(FEW, [0.2, 0.9])
    row = found.row(storing.EVICT, storage="rounded", policy="one", measure="kl")
    assert (row.value, row.low, row.high) == pytest.approx(((0.6 + 0.3) / 2, *students((0.3, 0.6))), rel=1e-4)
    assert found.row(storing.SIZE, storage="rounded").value == pytest.approx(0.3)
    # two, rounded: 0.2 at 20 MiB and 0.1 at 40, the full cache rounded: 0.1 and 0.2.
    both = found.row(storing.BOTH, storage="rounded", policy="two", other="rounded", measure="kl")
    assert (both.value, both.low, both.high) == pytest.approx((0.0, *students((-0.1, 0.1))), rel=1e-4, abs=1e-9)
    alone = found.row(storing.BOTH_OR_EVICT, share=0.2, policy="two", other="rounded", measure="kl")
    assert alone.value == pytest.approx(0.5 - 0.2)
    assert not any("small" in name or "/0.9/" in name for name in found.metrics)


def test_two_storages_of_one_policy_meet_at_equal_bytes():
    curves = {"one__first": [(10, 0.5), (40, 0.1)], "one__second": [(20, 0.1), (60, 0.0)]}
    made = losses(
        full__as_is={"a": [(100, 0.0)], "b": [(100, 0.0)]},
        one__as_is={"a": [(10, 0.9)], "b": [(10, 0.9)]},
        **{name: {"a": points, "b": [(size, loss / 2) for size, loss in points]} for name, points in curves.items()},
    )
    found = storing.findings(made, [0.2, 0.5])
    row = found.row(storing.STORED, share=0.2, policy="one", storage="first", other="second", measure="kl")
    # 20 MiB lie half way between 10 and 40 on a logarithmic axis: 0.3 against 0.1, and half of both.
    assert (row.value, row.low, row.high) == pytest.approx((0.15, *students((0.2, 0.1))), rel=1e-4)
    assert not any(name.startswith("stored/0.5/") for name in found.metrics), "the first ends at 40 MiB"
    (panel,) = (ax for ax in draw.differences(found, "kl").axes if ax.get_title() == "Which storage?")
    assert [label.get_text() for label in panel.get_yticklabels()] == ["first, or second, 20%"]


def test_points_are_means_over_documents_and_know_their_front():
    points = storing.points(FEW, "kl").set_index(["policy", "storage", "budget"])
    assert points.sort_index().loc[("full", "rounded")].iloc[0][["share", "value"]].tolist() == pytest.approx(
        [0.3, 0.15]
    )
    front = {key[:2] for key, there in points["front"].items() if there}
    assert ("two", "rounded") in front and ("full", "rounded") in front and ("full", "as_is") not in front
    assert ("one", "as_is") not in front


def test_what_was_measured_is_said_in_words():
    assert storing.in_words(FEW) == "11 systems, 2 documents; the full cache in bfloat16: 100.0 MiB"
