"""Traces kept on disk: what counts as the same capture, and what happens to the files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.refusals import one_sentence

from kvlab import policy
from kvlab.errors import KvlabError
from kvlab.inputs import models
from kvlab.inputs.corpus import Document
from kvlab.traces import run, shared

IDS = torch.arange(3, 43)


@pytest.fixture
def counted(own_home, monkeypatch):
    """How often a model really ran."""
    calls = []

    def capture(lm, *args, **options):
        calls.append(options)
        return run.capture(lm, *args, **options)

    # The signature is what tells two calls apart.
    capture.__wrapped__ = run.capture
    monkeypatch.setattr(shared, "capture", capture)
    return calls


def kept() -> list:
    return sorted(shared.folder().glob("*.safetensors"))


def test_a_trace_read_from_disk_is_the_one_that_was_captured(tiny, counted):
    lm = tiny()
    first = shared.shared(lm, IDS, 5, window=8, policies=["h2o", "dapq", "compilerkv"])
    again = shared.shared(lm, IDS, 5, window=8, policies=["h2o", "dapq", "compilerkv"])
    assert len(counted) == 1 and again is not first
    ours, theirs = first._tensors(), again._tensors()
    assert ours.keys() == theirs.keys() and {"accumulated", "nll", "pseudo/" + next(iter(first.pseudo))} <= ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (first.meta, first.prompt_length, first.scaling) == (again.meta, again.prompt_length, again.scaling)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped from Linux's /proc")
def test_a_trace_just_captured_lies_in_its_file_and_not_in_memory_besides(tiny, counted):
    trace = shared.shared(tiny(), IDS, 5, window=8)
    (file,) = kept()
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    mapped = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines if line[-1] == str(file)]
    assert len(counted) == 1 and any(trace.keys.data_ptr() in piece for piece in mapped)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((5, 8), {}),
        ((), {"window": 8, "new_tokens": 5}),
        ((5,), {"window": 8, "chat": "auto", "queries": None, "accumulate": False, "progress": False}),
        ((5, 8), {"policies": [policy("snapkv", budget=9, window=4)]}),  # needs no more than the window there is
        ((5, 8), {"pseudo": [policy("dapq", budget=64)]}),
        ((5, 8), {"response": None, "policies": ("streamingllm", "snapkv_pp")[:1]}),
    ],
    ids=str,
)
def test_the_same_capture_put_otherwise_is_the_same_file(tiny, counted, args, options):
    shared.shared(tiny(), IDS, 5, window=8)
    shared.shared(tiny(), IDS.tolist(), *args, **options)
    assert len(counted) == 1 and len(kept()) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"new_tokens": 6},
        {"window": 9},
        {"queries": "all"},
        {"accumulate": True},
        {"pseudo": ()},
        {"policies": ["h2o"]},
        {"pseudo": [policy("dapq", budget=64, seed=1, content="span")]},
        {"response": [1, 2, 3, 4, 5]},
        {"chat": False},
    ],
    ids=str,
)
def test_another_capture_is_another_file(tiny, counted, options):
    shared.shared(tiny(), IDS, 5, 8)
    shared.shared(tiny(), IDS, **{"new_tokens": 5, "window": 8, **options})
    assert len(counted) == 2 and len(kept()) == 2


def test_another_model_dtype_prompt_or_code_is_another_file(tiny, counted, monkeypatch):
    half = models.random_lm("tiny-llama-gqa", device="cpu", dtype="bfloat16")
    for lm in (tiny(), tiny(seed=1), tiny("tiny-qwen2"), half):
        shared.shared(lm, IDS, 5, 8)
    shared.shared(tiny(), IDS + 1, 5, 8)
    monkeypatch.setattr(shared, "_code", lambda: "another capture()")
    shared.shared(tiny(), IDS, 5, 8)
    assert len(counted) == 6 and len(kept()) == 6


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_another_library_is_another_file_where_it_multiplies(tiny, counted, monkeypatch):
    """Also where no layer is large enough to be hastened; half precision is torch's either way."""
    half = models.random_lm("tiny-llama-gqa", device="cpu", dtype="bfloat16")
    for switch in "01":
        monkeypatch.setenv("KVLAB_ONEDNN", switch)
        shared.shared(tiny(), IDS, 5, 8)
        shared.shared(half, IDS, 5, 8)
    assert len(counted) == 3 and len(kept()) == 3


def test_the_same_text_under_another_name_keeps_its_name(lm, counted):
    """The text is in the signature of every number, so that a trace with another's name would be wrong."""
    one, other = (shared.shared(lm, Document(name, "A ferry crosses the sound."), 2, 4) for name in ("a", "b"))
    assert len(counted) == 2 and one.document.startswith("a") and other.document.startswith("b")
    assert torch.equal(one.ids, other.ids)


def test_a_list_gives_each_its_own_file(tiny, counted):
    three = shared.shared(tiny(), [IDS, IDS + 1, IDS + 2], 5, window=8, progress=False)
    assert [each.ids[0].item() for each in three] == [3, 4, 5] and len(kept()) == 3
    shared.shared(tiny(), IDS + 1, 5, window=8)
    assert len(counted) == 3


def test_mistakes_are_those_of_capture_and_leave_nothing(tiny, counted):
    with pytest.raises(KvlabError, match="one response cannot follow several"):
        shared.shared(tiny(), [IDS, IDS], 5, response=[1, 2])
    with pytest.raises(KvlabError, match="must not be negative"):
        shared.shared(tiny(), IDS, -1)
    with pytest.raises(TypeError, match="windw"):
        shared.shared(tiny(), IDS, windw=8)
    assert kept() == [] and counted == []


def last_byte_flipped(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("no trace at all, but a longer text than a header"),
        last_byte_flipped,
    ],
    ids=["cut", "empty", "alien", "flipped"],
)
def test_a_damaged_file_is_captured_again(tiny, counted, damage):
    whole = shared.shared(tiny(), IDS, 5, 8).keys.clone()  # before it is mapped from what will be cut
    (path,) = kept()
    damage(path)
    mended = shared.shared(tiny(), IDS, 5, 8)
    assert len(counted) == 2 and torch.equal(mended.keys, whole)
    shared.shared(tiny(), IDS, 5, 8)
    assert len(counted) == 2


def test_two_processes_wait_for_one_capture(own_home, tmp_path):
    """Both begin together and find nothing; only one runs the model, and both have the same trace."""
    script = f"""
import multiprocessing, pathlib, time
from kvlab.inputs import models
from kvlab.traces import run, shared
folder = pathlib.Path({str(tmp_path)!r})
def slow(*args, **options):
    with open(folder / "ran", "a") as log:
        log.write("x")
    time.sleep(1.5)
    return run.capture(*args, **options)
slow.__wrapped__ = run.capture
shared.capture = slow
lm = models.random_lm("tiny-llama-gqa", device="cpu", dtype="float32")
def one(name):
    (folder / name).touch()
    while not all((folder / name).exists() for name in "ab"):
        time.sleep(0.02)
    return shared.shared(lm, list(range(3, 43)), 5, 8).keys.contiguous().sum().item()
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(*pool.map(one, "ab", chunksize=1))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    one, other = done.stdout.split()
    assert one == other
    assert (tmp_path / "ran").read_text() == "x" and len(kept()) == 1


def test_of_several_documents_each_process_takes_what_no_other_has_begun(tiny, counted):
    """While another holds the first document, the other two are captured; then the first is waited for."""
    from filelock import FileLock

    names = {}
    for shift in range(6):
        before = set(kept())
        shared.shared(tiny(), IDS + shift, 5, 8)
        (path,) = set(kept()) - before
        names[shift] = path.name
    # Names that begin alike share a lock.
    free = [shift for shift, name in names.items() if name[:2] != names[0][:2]][:2]
    for shift in free:
        (shared.folder() / names[shift]).unlink()
    counted.clear()
    there, other = len(kept()), FileLock(shared.folder() / f".{names[0][:2]}.lock")
    with ThreadPoolExecutor() as pool:
        with other:
            prompts = [IDS + shift for shift in (0, *free)]
            three = pool.submit(shared.shared, tiny(), prompts, 5, 8, progress=False)
            deadline = time.monotonic() + 30
            while len(kept()) < there + 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(kept()) == there + 2 and not three.done()
        found = [each.ids[0].item() for each in three.result(timeout=30)]
        assert found == [int(ids[0]) for ids in prompts] and len(counted) == 2


def aged(*names: str, size: int = 1000) -> list:
    """Files of `size` bytes, each newer than the one before."""
    shared.folder().mkdir(parents=True, exist_ok=True)
    paths = [shared.folder() / f"{name}.safetensors" for name in names]
    for age, path in enumerate(paths):
        path.write_bytes(bytes(size))
        os.utime(path, (1000 + age, 1000 + age))
    return paths


def test_pruning_takes_the_least_recently_used(own_home, monkeypatch):
    old, middle, new = aged("c", "a", "b")
    writing = shared.folder() / ".half-written.safetensors"
    writing.write_bytes(bytes(5000))
    assert shared.prune(3e-6) == []
    assert shared.prune(2.5e-6) == [old] and shared.prune(2e-6) == []
    monkeypatch.setenv("KVLAB_TRACES_GB", "0")
    assert shared.prune() == [middle] and new.exists() and writing.exists()
    os.utime(writing, (1000, 1000))
    shared.prune()
    assert not writing.exists()


def test_a_use_makes_a_trace_recent_and_a_capture_prunes(tiny, counted, monkeypatch):
    shared.shared(tiny(), IDS, 5, 8)
    (used,) = kept()
    shared.shared(tiny(), IDS + 1, 5, 8)
    (other,) = set(kept()) - {used}
    for path in (used, other):
        os.utime(path, (1000, 1000))
    shared.shared(tiny(), IDS, 5, 8)
    monkeypatch.setenv("KVLAB_TRACES_GB", str(2.5 * used.stat().st_size / 1e9))
    time.sleep(0.01)
    shared.shared(tiny(), IDS + 2, 5, 8)
    assert used.exists() and not other.exists() and len(kept()) == 2


@pytest.mark.parametrize("value", ["plenty", "-1", "nan", ""])
def test_a_limit_that_is_no_number_is_one_sentence_before_anything_runs(tiny, counted, monkeypatch, value):
    monkeypatch.setenv("KVLAB_TRACES_GB", value)
    with one_sentence("KVLAB_TRACES_GB must be a number of gigabytes"):
        shared.shared(tiny(), IDS, 5, 8)
    assert counted == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tiny, counted, own_home):
    own_home.mkdir()
    (own_home / "traces").write_text("in the way")
    with pytest.raises(KvlabError, match="cannot keep traces in"):
        shared.shared(tiny(), IDS, 5, 8)
    assert counted == []


def test_locks_do_not_pile_up(tiny, counted, monkeypatch):
    """However many traces there were, there are no more lock files than first letters of their names."""
    monkeypatch.setattr(shared, "_key", lambda lm, plan, chat: f"{'ab'[plan.ids[0] % 2]}x{int(plan.ids[0])}")
    for shift in range(6):
        shared.shared(tiny(), IDS + shift, 2, 4)
    assert len(kept()) == 6 and len(list(shared.folder().glob(".*.lock"))) == 2
