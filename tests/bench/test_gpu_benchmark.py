"""The prepared benchmark of a GPU: a whole small run, results that are gone on from, failures, and time limits."""

from __future__ import annotations

import itertools
import json
import os
import time
import warnings

import pytest
import torch
from support import pretend_gpu
from support.benchmarks import imported, invoked

import kvlab
from kvlab.bench import clock, timing
from kvlab.core import fused
from kvlab.core.geometry import Geometry

CPU = torch.device("cpu")
TINY = "random:tiny-llama-gqa"


@pytest.fixture
def benchmark(monkeypatch):
    """The modules gpu, gpu_journal, gpu_right and gpu_fast."""
    with imported(monkeypatch, "gpu", "gpu_journal", "gpu_right", "gpu_fast") as modules:
        yield modules


def command(gpu, out, *arguments):
    return invoked(gpu.main, "--device", "cpu", "--shape", "tiny", "--model", TINY, "--out", str(out), *arguments)


def records(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def refused(*_, **__):
    raise AssertionError("nothing may be measured again")


def test_a_small_run_and_a_second_one_that_measures_nothing(benchmark, monkeypatch, tmp_path):
    gpu, _, _, fast = benchmark
    first = command(gpu, tmp_path)
    assert first.exit_code == 0, first.output
    found = {(record["part"], record["item"]): record for record in records(tmp_path)}
    assert {part for part, _ in found} == {"right", "fast", "lab"} and not any(
        "error" in each for each in found.values()
    )
    for name in kvlab.policies():
        for kind in ("replay", "live"):
            (row,) = found["right", f"{kind} {name}"]["rows"]
            assert row["right"] is True and row["entries"] > 0 and row["other entries"] == 0
    assert not any("right" in row for row in found["right", "bfloat16"]["rows"])
    refused_too, stored = (found["right", f"storage {form}"]["rows"][0] for form in ("kivi-4", "int8"))
    assert refused_too["note"].startswith("the CPU refuses it, too: kivi-4 rounds") and stored["right"] is True
    assert found["right", "waits"]["rows"][0]["note"] == "only CUDA counts how often it is waited for"
    rows = found["fast", "decoding after 64 tokens"]["rows"]
    names = ["transformers", "full", "rocketkv", "rocketkv", "snapkv", "quest", "sparq"]
    assert [row["policy"] for row in rows] == names
    # 64 tokens of the prompt, the one that ends it and two steps: 2 layers of 2 KV heads of 16 in bfloat16.
    assert rows[0]["K and V, MiB"] == 67 * 2 * 2 * 2 * 16 * 2 / 2**20
    assert rows[0]["speed-up"] == 1 and all(row["ms a step"] > row["bound, ms"] > 0 for row in rows)
    assert [row["prompt, ratio"] > 0 and row["peak, MiB"] > 0 for row in rows] == [True] * 7
    assert found["fast", "Triton kernel"]["rows"][0]["note"] == "not measured: no CUDA"
    whole = found["lab", "replays"]["rows"][-1]
    assert whole["replays"] == 2 * len(fast.REPLAYED) and whole["seconds"] > 0
    for module, name in ((timing, "generate"), (clock, "seconds"), (kvlab, "replay"), (kvlab, "compress")):
        monkeypatch.setattr(module, name, refused)
    second = command(gpu, tmp_path)
    assert second.exit_code == 0, second.output
    assert len(records(tmp_path)) == len(found)
    summary = (tmp_path / "summary.md").read_text()
    assert summary in first.stdout and second.stdout.strip() == summary.strip()
    assert "| decoding after 128 tokens" in summary and "0 failed" in summary


def test_the_parts_of_a_pretended_gpu_are_right(benchmark):
    *_, right, _ = benchmark
    with pretend_gpu.present() as device:
        items = {item.name: item for item in right.items(TINY, device)}
        for name in ("capture", "replay rocketkv", "live h2o", "fidelity zsmerge", "storage int8", "bfloat16"):
            rows = []
            items[name].run(rows)
            assert rows and all(row.get("right", True) for row in rows), name


def test_a_pretended_gpu_is_timed_without_a_peak_that_torch_cannot_count(benchmark):
    *_, fast = benchmark
    with pretend_gpu.present() as device:
        model, given = fast.Model(device), fast.size("tiny")
        items = {item.name: item for item in fast.fast(model, given) + fast.lab(model, given)}
        for name in ("decoding after 64 tokens", "zsmerge, 2 x 64 tokens", "capture", "replays"):
            rows = []
            items[name].run(rows)
            assert rows and not any("note" in row or "peak, MiB" in row for row in rows), name
        assert model.of("tiny").device.type == device.type


@pytest.mark.parametrize("storage, budget", [("as_is", 40), ("kivi-4", None), ("kivi-4", 40)])
def test_the_kernel_is_compared_with_pytorch(benchmark, monkeypatch, storage, budget):
    *_, fast = benchmark
    shape, switches = Geometry(layers=1, heads=4, kv_heads=2, head_dim=32), []
    monkeypatch.setenv(fused.SWITCH, "0")
    monkeypatch.setattr(fused, "wanted", lambda _: switches.append(os.environ[fused.SWITCH]))
    row = fast.by_kernel(CPU, shape, 200, storage, budget, rounds=2, steps=3)
    assert switches == [*"01", *"000", *"111", *"111", *"000"] and os.environ[fused.SWITCH] == "0"
    assert row["right"] is True and row["largest difference"] == 0 and row["selected"] == budget
    assert row["PyTorch, µs"] > 0 and row["kernel, µs"] > 0 and row["speed-up"] > 0
    # What a kernel that is wrong would give.
    monkeypatch.setattr(fused, "wanted", lambda _: os.environ[fused.SWITCH] == "1")
    monkeypatch.setattr(fused, "_computed", lambda parts, queries, *_: torch.zeros_like(queries))
    assert fast.by_kernel(CPU, shape, 200, storage, budget, rounds=1, steps=1)["right"] is False


def test_a_device_that_computes_something_else_is_found(benchmark, monkeypatch, tmp_path):
    gpu, _, right, _ = benchmark
    plain = right.Pair.moved

    def wrong(pair, dtype):
        lm = plain(pair, dtype)
        with torch.no_grad():
            lm.model.model.layers[0].self_attn.k_proj.weight.mul_(1.3)
        return lm

    monkeypatch.setattr(right.Pair, "moved", wrong)
    monkeypatch.setattr(kvlab, "policies", lambda: ["h2o", "snapkv"])
    done = command(gpu, tmp_path, "--only", "right")
    assert done.exit_code == 1, done.output
    rows = {record["item"]: record["rows"] for record in records(tmp_path)}
    assert [row["right"] for row in rows["capture"]] == [False, False, False]
    (h2o,) = rows["replay h2o"]
    assert h2o["right"] is False and h2o["other entries"] > 0 and h2o["largest difference"] > 1e-3


def test_differences_by_hand(benchmark):
    *_, right, _ = benchmark
    sets = torch.tensor([[1, 2, 3, -1], [4, 5, 6, 7]]), torch.tensor([[3, 2, 1, -1], [4, 5, 9, 8]])
    assert right.entries_apart(iter([sets])) == (2, 7)
    assert right.apart(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -5.0])) == pytest.approx(0.2)
    # 300 differ by a hundredth of themselves, and 0.1 by two hundredths.
    assert right.furthest({"a": 303.0, "b": 0.12}, {"a": 300.0, "b": 0.1}) == (pytest.approx(0.02), "b")
    assert right.verdict("h2o", 1e-4, "recall", (1, 200))["right"]
    assert not right.verdict("h2o", 1e-4, "recall", (2, 200))["right"]
    assert not right.verdict("h2o", 2e-3, "recall", (0, 200))["right"]


def test_a_measure_that_is_no_number_is_not_right(benchmark):
    *_, right, _ = benchmark
    gap, worst = right.furthest({"a": float("nan"), "b": 1.0}, {"a": 0.5, "b": 1.0})
    assert worst == "a" and not right.verdict("h2o", gap, worst)["right"]
    assert right.furthest({"a": float("nan")}, {"a": float("nan")})[0] == 0


@pytest.fixture
def run(benchmark, tmp_path):
    """Run functions by their names as the items of a part; the records by item, and what there was no time for."""
    _, journal, *_ = benchmark

    def run(functions, seconds=60.0, retry=False):
        items = [journal.Item("fast", "tiny", name, function) for name, function in functions.items()]
        book = journal.Journal(tmp_path / "results.jsonl", "a device", retry)
        missing = journal.run_part(book, items, seconds, CPU, lambda _: None)
        read_again = journal.Journal(tmp_path / "results.jsonl", "a device")
        assert read_again.records == book.records
        return {record["item"]: record for record in read_again.records.values()}, missing

    return run


def failing(error):
    def run(rows):
        raise error

    return run


def test_a_failing_item_ends_nothing_else_and_runs_again_when_asked(run):
    ran = []
    functions = {
        "breaks": failing(ValueError("the first line\nand more")),
        "refuses": failing(kvlab.KvlabError("snapkv cannot do that")),
        "works": lambda rows: rows.append({"policy": "full", "tokens/s": 2.5}),
    }
    found, missing = run(functions)
    assert [found[name].get("error") for name in functions] == [
        "ValueError: the first line",
        "snapkv cannot do that",
        None,
    ]
    assert found["works"]["rows"] == [{"policy": "full", "tokens/s": 2.5}] and not missing
    mended = dict.fromkeys(functions, lambda rows: ran.append(1))
    assert run(mended)[0] == found and not ran
    found, _ = run(mended, retry=True)
    assert len(ran) == 2 and not any("error" in record for record in found.values())


def test_a_time_limit_is_kept_and_what_was_found_stays(run):
    def slow(rows):
        rows.append({"policy": "full"})
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)

    functions = {
        "slow": slow,
        "slower": lambda rows: time.sleep(60),
        "quick": lambda rows: rows.append({"policy": "a"}),
    }
    start = time.monotonic()
    found, missing = run(functions, seconds=1.5)
    assert time.monotonic() - start < 20
    assert found["slow"]["rows"] == [{"policy": "full"}] and "time limit" in found["slow"]["cut"]
    assert missing == ["fast, tiny, slower"] and found["quick"]["rows"] == [{"policy": "a"}]
    found, missing = run(functions | {"slower": lambda rows: rows.append({"policy": "b"})})
    assert not missing and found["slower"]["rows"] == [{"policy": "b"}]


def test_a_line_that_was_cut_off_is_written_again(run, benchmark, tmp_path):
    _, journal, *_ = benchmark
    works = {"one": lambda rows: rows.append({"n": 1}), "two": lambda rows: rows.append({"n": 2})}
    run(works)
    path = tmp_path / "results.jsonl"
    path.write_text(path.read_text()[:-20])
    found, _ = run({name: lambda rows: rows.append({"n": 3}) for name in works})
    assert [found[name]["rows"] for name in works] == [[{"n": 1}], [{"n": 3}]]
    path.write_text("no result\n" + path.read_text())
    with pytest.raises(kvlab.KvlabError, match=r"line 1 of .* is no result; give another folder with --out"):
        journal.Journal(path, "a device")


def test_a_policy_that_fails_leaves_the_others_their_rows(benchmark, monkeypatch):
    *_, fast = benchmark
    plain = timing.generate

    def generate(lm, ids, steps, each):
        if each.name == "snapkv":
            raise torch.OutOfMemoryError("no memory is left")
        return plain(lm, ids, steps, each)

    monkeypatch.setattr(timing, "generate", generate)
    rows = []
    lm = fast.Model(CPU).of("tiny")
    fast.in_turns(lm, 1e9, timing.contenders(["snapkv", "streamingllm"], [40]), 64, 1, 2, 2, rows)
    assert [row["policy"] for row in rows] == ["transformers", "snapkv", "streamingllm"]
    assert rows[1]["note"] == "OutOfMemoryError: no memory is left" and "tokens/s" not in rows[1]
    assert [rows[i]["rounds"] for i in (0, 2)] == [2, 2]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--shape", "tinny", "tiny"),
        ("--only", "right,wrong", "parts are some of right,fast,lab, and not 'right,wrong'"),
        ("--model", "nothing.gguf", "nothing.gguf is no file and no model of kvlab's"),
        ("--device", "cuda:x", "unknown device 'cuda:x'"),
    ],
)
def test_bad_input_is_one_sentence(benchmark, tmp_path, option, value, said):
    done = command(benchmark[0], tmp_path, option, value)
    assert done.exit_code == 1 and len(done.stderr.strip().splitlines()) == 1 and said in done.stderr
    assert done.stderr.startswith("benchmark: ") and not list(tmp_path.iterdir())


def test_a_model_that_is_not_there_has_a_stand_in(benchmark, own_home):
    *_, right, _ = benchmark
    assert right.subject("smollm2-135m") == "tiny-llama-gqa, random weights (smollm2-135m is not there)"
    assert right.subject(TINY) == TINY


def test_waits_are_counted_from_the_warnings_of_cuda(benchmark, monkeypatch):
    """A model on the CPU that passes for one of CUDA's, and a policy whose steps in two layers warn as CUDA does."""
    *_, right, _ = benchmark
    modes, rows, h2o = [], [], right.chosen("h2o")

    class Waiting(type(h2o)):
        def step(self, store, weights):
            if modes[-1:] == ["warn"]:
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
                warnings.warn("something else", stacklevel=1)
            super().step(store, weights)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(kvlab, "policies", lambda: ["h2o", "oracle_attention", "snapkv"])
    monkeypatch.setattr(
        right, "chosen", lambda name: Waiting(budget=64) if name == "h2o" else kvlab.policy(name, budget=64)
    )
    pair = right.Pair(TINY, torch.device("cuda"))
    pair.there = pair.cpu
    right.waits(pair, rows)
    assert rows == [{"policy": "h2o", "waits a step": 2.0}, {"policy": "snapkv", "waits a step": 0.0}]
    assert modes == ["warn", "default"] * 2


def test_marks_of_cuda_wait_once_for_the_device(monkeypatch):
    times, waits = itertools.count(10), []

    class Event:
        """An event at a square number of milliseconds."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(times) ** 2

        def synchronize(self):
            waits.append(self.at)

        def elapsed_time(self, other):
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    marks = clock.Marks(torch.device("cuda"))
    for _ in range(3):
        marks.mark()
    assert not waits and marks.gaps() == [0.021, 0.023] and waits == [144]
