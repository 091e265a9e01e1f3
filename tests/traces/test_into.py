"""A trace that is written into its file while it is captured: the same as one in memory, and nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import safetensors
import torch
from support.eager import sequence
from support.hybrids import hybrid
from support.refusals import one_sentence

import kvlab
from kvlab.bench import memory
from kvlab.errors import KvlabError
from kvlab.inputs import models
from kvlab.traces import file_draft, passes, shared

PROMPT, STEPS, WINDOW = 45, 5, 9
ASKED = dict(accumulate=True, policies=["dapq", "kvzip", "criticalkv"])


def same(found, expected):
    ours, theirs = found._tensors(), expected._tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert (found.meta, found.rotations, found.layout) == (expected.meta, expected.rotations, expected.layout)
    assert (found.prompt_length, found.scaling, found.softcap) == (
        expected.prompt_length,
        expected.scaling,
        expected.softcap,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["tiny-llama-gqa", "tiny-qwen3", "hybrid-gpt-oss", "hybrid-gemma2"])
def test_a_trace_in_a_file_is_the_one_in_memory(tiny, tmp_path, family, dtype):
    lm = hybrid(tiny, family) if dtype == "float32" else models.random_lm(family, device="cpu", dtype=dtype)
    path = tmp_path / "new folder" / "a.trace"
    found = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, into=path, **ASKED)
    expected = kvlab.capture(lm, sequence(PROMPT), STEPS, WINDOW, **ASKED)
    assert found.keys.dtype == getattr(torch, dtype)
    assert {"accumulated", "projections", "nll", "ids"} < found._tensors().keys() and found.repeated and found.pseudo
    same(found, expected)
    same(kvlab.Trace.load(path), expected)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(found.model_projections, expected.model_projections, strict=True)
    )
    assert [each.name for each in path.parent.iterdir()] == ["a.trace"]
    # Other programs read it, too, and it is no larger than it has to be.
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(expected._tensors()) and json.loads(file.metadata()["kvlab"])
    assert path.stat().st_size - found.nbytes < 40_000
    same(kvlab.Trace.load(found.save(tmp_path / "again")), expected)


def test_a_file_takes_the_place_of_an_older_one_while_a_trace_is_mapped_from_that(tiny, tmp_path):
    path = tmp_path / "a.trace"
    first = kvlab.capture(tiny(), sequence(PROMPT), STEPS, into=path)
    before = first.keys.clone()
    second = kvlab.capture(tiny(), sequence(PROMPT + 1), STEPS, into=path)
    assert torch.equal(first.keys, before) and second.prompt_length == PROMPT + 1


def test_a_trace_that_is_changed_leaves_its_file_as_it_is(tiny, tmp_path):
    path = tmp_path / "a.trace"
    with torch.inference_mode():
        kvlab.capture(tiny(), sequence(PROMPT), STEPS, into=path).keys.zero_()
    assert kvlab.Trace.load(path).keys.abs().sum() > 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_capture_that_fails_leaves_nothing_and_what_was_there_before(tiny, tmp_path, monkeypatch, error):
    forward, path = passes.forward, tmp_path / "a.trace"
    kvlab.capture(tiny(), sequence(PROMPT), STEPS, into=path)
    before, calls = path.read_bytes(), []

    def failing(*given, **more):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return forward(*given, **more)

    monkeypatch.setattr(passes, "forward", failing)
    for place in (path, tmp_path / "new" / "b.trace"):
        calls.clear()
        with pytest.raises(error):
            kvlab.capture(tiny(), sequence(PROMPT), STEPS, chunk=10, into=place)
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["a.trace"] and path.read_bytes() == before
    assert list((tmp_path / "new").iterdir()) == []


def no_run(*_given, **_more):
    raise AssertionError("nothing may run")


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "forward", no_run)
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "a.trace",):
        with one_sentence("cannot write"):
            kvlab.capture(tiny(), sequence(PROMPT), into=place)
    with one_sentence("takes one trace, and not several"):
        kvlab.capture(tiny(), [sequence(9), sequence(8)], into=tmp_path / "a.trace")
    with one_sentence("shared traces have their files in .*: leave into out"):
        shared.shared(tiny(), sequence(9), into=tmp_path / "a.trace")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_before_anything_runs(tiny, tmp_path, monkeypatch):
    """Writing to mapped memory that has no place on the disk would end the process."""
    monkeypatch.setattr(passes, "forward", no_run)
    usage = file_draft.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(file_draft.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with one_sentence(r"cannot write into .*: the trace takes 0\.0 GB, which are not free"):
        kvlab.capture(tiny(), sequence(PROMPT), into=tmp_path / "a.trace")

    def full(*_given):
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr(passes, "forward", no_run)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with one_sentence(r"cannot write .*a\.trace: No space left on device"):
        kvlab.capture(tiny(), sequence(PROMPT), into=tmp_path / "a.trace")
    assert list(tmp_path.iterdir()) == []


def test_a_long_shared_trace_is_captured_into_its_file(tiny, own_home, monkeypatch):
    monkeypatch.setattr(passes, "WHOLE", 40)
    monkeypatch.setattr(passes, "CHUNK", 20)
    saved, save = [], kvlab.Trace.save
    monkeypatch.setattr(kvlab.Trace, "save", lambda trace, path: saved.append(path) or save(trace, path))
    long = shared.shared(tiny(), sequence(PROMPT), STEPS)
    (path,) = shared.folder().glob("*.safetensors")
    assert not saved and path.stem and long.prompt_length == PROMPT
    same(shared.shared(tiny(), sequence(PROMPT), STEPS), long)
    shared.shared(tiny(), sequence(40), STEPS)
    assert len(saved) == 1
    with pytest.raises(KvlabError, match="at least one token"):
        shared.shared(tiny(), sequence(PROMPT), STEPS, chunk=0)


MEASURED = """
import sys, threading, time
import torch, kvlab
from kvlab.bench import memory
from kvlab.inputs import models

def own():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))

def highest(run):
    "Most memory of the process's own above what it has now; pages of files are the system's to take back."
    memory.tidy()
    before, found, over = own(), [0], threading.Event()
    def watch():
        while not over.is_set():
            found[0] = max(found[0], own() - before)
            time.sleep(0.002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    made = run()
    over.set()
    watcher.join()
    return found[0], made

torch.set_num_threads(1)
wide = dict(layers=6, head_dim=32, intermediate_size=4096, max_position_embeddings=8192)
lm = models.random_lm("tiny-llama-mha", device="cpu", dtype="float32", **wide)
ids = torch.randint(3, 256, (4000,), generator=torch.Generator().manual_seed(1))
asked = dict(new_tokens=4, queries="all", policies=["dapq"], chunk=256)
kvlab.capture(lm, ids[:64], **asked)
kvlab.replay(kvlab.capture(lm, ids[:64], **asked), ["snapkv", "dapq"], [40])
kvlab.capture(lm, ids, **asked)  # kernels are made once for each shape, and kept
in_memory, trace = highest(lambda: kvlab.capture(lm, ids, **asked))
size = trace.nbytes
whole, trace = highest(lambda: kvlab.capture(lm, ids, **asked | dict(chunk=4000)))
del trace
in_file, trace = highest(lambda: kvlab.capture(lm, ids, into=sys.argv[1], **asked))
replayed, _ = highest(lambda: kvlab.replay(trace, ["snapkv", "dapq"], [512]))
print(size, in_memory, whole, in_file, replayed)
"""


def test_memory_of_a_long_capture(tmp_path):
    """In memory it takes the trace and a chunk, in a file a chunk alone, and one piece more than both."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "a.trace")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | memory.TIGHT | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    size, in_memory, whole, in_file, replayed = map(int, done.stdout.split())
    assert 0.9 * size < in_memory < 1.5 * size < 2.5 * size < whole
    assert in_file < 0.4 * size and replayed < 0.4 * size
