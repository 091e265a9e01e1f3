"""Commands and what they call (heads, compilation, evaluation, benchmarks) find on a GPU what they find on the CPU."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from support import pretend_gpu
from support.both_devices import TINY, close, on_gpu_like
from support.commands import call
from support.compiling import DOCUMENTS, settings
from support.evaluating import POLICIES, Echo, wordy

import kvlab
from kvlab import compile, evaluation
from kvlab.bench import memory, meters, timing
from kvlab.inputs import models
from kvlab.traces import retrieval_heads
from kvlab.workbench import doctor


@pytest.fixture(scope="module")
def readers(reader):
    """A model that shares the default model's tokenizer, on the CPU and on the GPU."""
    with pretend_gpu.present():
        return reader, on_gpu_like(reader)


def test_heads(readers):
    asked = dict(context=64, needles=2, seed=1, hay=DOCUMENTS[:1], progress=False)
    expected, found = retrieval_heads.measure(readers[0], **asked), None
    with pretend_gpu.present():
        found = retrieval_heads.measure(readers[1], **asked)
    close(torch.tensor(found.scores), torch.tensor(expected.scores))


def test_compiling(readers):
    expected = compile.measure(readers[0], settings(), DOCUMENTS)
    with pretend_gpu.present():
        found = compile.measure(readers[1], settings(), DOCUMENTS)
    for budget in (12, 24):
        close(torch.tensor(found.effects(budget).heads), torch.tensor(expected.effects(budget).heads))


@pytest.mark.parametrize("compress_at", ["prompt", "context"])
def test_an_evaluation(compress_at, tmp_path):
    words = wordy()
    one = evaluation.plan(Echo(n=2, tokens=4), POLICIES, compress_at=compress_at)
    expected = evaluation.run(words, one, tmp_path / "here.jsonl")
    with pretend_gpu.present():
        found = evaluation.run(on_gpu_like(words), one, tmp_path / "there.jsonl")
    assert [answer.prediction for answer in found] == [answer.prediction for answer in expected]
    assert [(answer.kv_bytes, answer.aux_bytes) for answer in found] == [
        (answer.kv_bytes, answer.aux_bytes) for answer in expected
    ]


def test_eval_takes_the_gpu(readers, monkeypatch, capsys, tmp_path):
    asked = [
        "eval",
        "needle",
        "-p",
        "lengths=[144]",
        "-p",
        "depths=[0.5]",
        "--limit",
        "1",
        "--policies",
        "h2o",
        "--budgets",
        "48",
        "--no-log",
    ]
    lines = {}
    for name, lm in zip(("here", "there"), readers, strict=True):
        monkeypatch.setattr("kvlab.inputs.models.load", lambda *_, lm=lm: lm)
        with pretend_gpu.present():
            code, _, err = call(capsys, *asked, "--out", str(tmp_path / f"{name}.jsonl"))
        assert code == 0, err
        found = evaluation.read(tmp_path / f"{name}.jsonl")
        lines[name] = [(answer.policy, answer.prediction, answer.kv_bytes) for answer in found]
    assert lines["there"] == lines["here"] and len(lines["here"]) == 2


@pytest.mark.parametrize("task", timing.TASKS)
def test_bench_takes_the_gpu(task, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(meters, "bandwidth", lambda device: 1e9)
    asked = [
        "bench",
        task,
        "--shape",
        TINY["shape"],
        "--dtype",
        "float32",
        "--policies",
        "snapkv,dapq",
        "--budget",
        "40",
        "--contexts",
        "64",
        "--new-tokens",
        "2",
        "--repeats",
        "1",
        "--out",
        str(tmp_path / "bench.csv"),
    ]
    with pretend_gpu.present():
        code, out, err = call(capsys, *asked)
    assert code == 0, err
    table = pd.read_csv(tmp_path / "bench.csv")
    assert set(table["device"]) == {"pretend"} and set(table["policy"]) == {timing.FULL_CACHE, "snapkv", "dapq"}
    assert set(table["metric"]) == set(timing.METRICS[task]) - {"peak_bytes"} and table["value"].notna().all()
    assert ("Peak memory: torch does not count it on this device." in out) == ("peak_bytes" in timing.METRICS[task])
    if task == "memory":
        chosen = timing.contenders(["snapkv", "dapq"], [40])
        monkeypatch.setattr(timing, "peak_bytes", lambda *_: 0)
        on_cpu = timing.measure(task, timing.BenchmarkModel(device="cpu", **TINY), chosen, [64], 2, 1)
        sizes = on_cpu[on_cpu["metric"] != "peak_bytes"]["value"].tolist()
        assert table["value"].tolist() == sizes


def test_peak_memory_is_the_gpus_own_count(monkeypatch):
    with pretend_gpu.present() as device:
        module = torch.get_device_module(device)
        for name, value in dict(reset_peak_memory_stats=None, memory_allocated=100, max_memory_allocated=350).items():
            monkeypatch.setattr(module, name, lambda place, value=value: value, raising=False)
        with memory.Peak(device) as peak:
            pass
        assert peak.bytes == 250
        table = timing.measure(
            "memory", timing.BenchmarkModel(device="auto", **TINY), timing.contenders([]), [64], 2, 1
        )
        assert table.set_index("metric")["value"]["peak_bytes"] == 250


def test_auto_takes_whatever_gpu_there_is():
    assert models.random_lm(**TINY).device.type == "cpu"
    with pretend_gpu.present() as device:
        made = models.random_lm(**TINY)
        assert made.device == device and models.random_lm(device="cpu", **TINY).device.type == "cpu"
        assert kvlab.load("random:tiny-llama-gqa").device == device
        assert doctor.gpu().found == "pretend (device 'pretend')"
        for wrong in ("cuda", "pretend:1"):
            with pytest.raises(kvlab.KvlabError, match=f"{wrong!r} was asked for, but torch finds 'pretend' here"):
                kvlab.load("random:tiny-llama-gqa", device=wrong)
