"""Traces from tensors and on disk: the same when read back, one clear error when damaged, nothing left by a failure."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from support.refusals import one_sentence

import kvlab
from kvlab.errors import KvlabError
from kvlab.inputs import models
from kvlab.traces import trace as module


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def small(request):
    lm = models.random_lm("tiny-llama-gqa", device="cpu", dtype=request.param)
    return kvlab.capture(lm, range(3, 30), 5, 9, accumulate=True, pseudo=["dapq"])


@pytest.fixture
def saved(small, tmp_path):
    return small.save(tmp_path / "a.trace")


def same(a, b):
    ours, theirs = a._tensors(), b._tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert (a.prompt_length, a.scaling, a.meta) == (b.prompt_length, b.scaling, b.meta)


def test_what_is_read_back_is_what_was_written(small, tmp_path):
    path = small.save(tmp_path / "new" / "folder" / "a.trace")
    assert [p.name for p in path.parent.iterdir()] == ["a.trace"]
    found = kvlab.Trace.load(path)
    same(small, found)
    assert found.signature == small.signature and found.pseudo.keys() == {"first_last/4/32"}
    assert path.stat().st_size == pytest.approx(small.nbytes, rel=0.1)
    if small.keys.dtype == torch.float32:
        policies = ["snapkv", "dapq", "zsmerge"]
        results = [
            kvlab.replay(
                t, [kvlab.policy(p, budget=9, **({"window": 4} if p == "snapkv" else {})) for p in policies]
            ).summary
            for t in (small, found)
        ]
        assert results[0].equals(results[1])
    same(found, kvlab.Trace.load(found.save(path)))  # over the file it came from


def test_traces_of_shared_and_strided_tensors_are_saved(tmp_path):
    keys = torch.randn(2, 7, 2, 4).transpose(1, 2)
    trace = kvlab.Trace.from_tensors(torch.randn(2, 4, 7, 4)[:, :, 2:], keys, keys, 5)
    same(trace, kvlab.Trace.load(trace.save(tmp_path / "shared")))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(KvlabError, match="there is no trace at .*none"):
        kvlab.Trace.load(tmp_path / "none")
    with pytest.raises(KvlabError, match="is damaged or not a kvlab trace"):
        kvlab.Trace.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    {
        "empty": lambda b: b"",
        "random": lambda b: bytes(range(256)) * 20,
        "a short header": lambda b: b[:5],
        "half a header": lambda b: b[:200],
        "half": lambda b: b[: len(b) // 2],
        "one byte less": lambda b: b[:-1],
        "one byte more": lambda b: b + b"x",
        "text": lambda b: b"This is a letter and no trace at all.\n" * 9,
    }.items(),
    ids=lambda item: item[0],
)
def test_damaged_files_get_a_sentence(saved, damage):
    saved.write_bytes(damage[1](saved.read_bytes()))
    with one_sentence(r"a\.trace is damaged or not a kvlab trace \(\w+\); capture"):
        kvlab.Trace.load(saved)


def refused(path, content):
    path.write_bytes(content)
    with one_sentence() as caught:
        kvlab.Trace.load(path)
    assert path.name in str(caught.value)
    return str(caught.value)


def flipped(content, place, other):
    return content[:place] + bytes([content[place] ^ other]) + content[place + 1 :]


def test_a_flipped_byte_anywhere_in_the_header_is_refused(saved):
    """Also one that leaves it readable: in a number, a name, the checksum, or the blanks at its end."""
    whole = saved.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    assert b'"kvlab"' in whole[:size] and b'"crc32"' in whole[:size]
    for place in range(size):
        refused(saved, flipped(whole, place, (1, 3, 16, 128)[place % 4]))
    saved.write_bytes(whole)
    assert kvlab.Trace.load(saved).steps == 5


def test_a_flipped_bit_anywhere_in_the_tensors_is_refused(saved):
    whole = saved.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    for place in [size, len(whole) - 1, *range(size + 7, len(whole), len(whole) // 200)]:
        said = refused(saved, flipped(whole, place, 1 << place % 8))
        assert said.endswith("is damaged: its bytes are not those of its checksum; capture it again")


def test_pieces_that_changed_their_places_are_refused(saved):
    whole = saved.read_bytes()
    refused(saved, whole[:-512] + whole[-256:] + whole[-512:-256])


def rewritten(path, change):
    """The file with other metadata, as another program writes it."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    change(metadata)
    safetensors.torch.save_file(safetensors.torch.load_file(path), path.with_name("b.trace"), metadata)
    return path.with_name("b.trace")


def test_traces_of_before_there_were_checksums_are_read(small, saved):
    def older(metadata):
        del metadata["crc32"]
        metadata["kvlab"] = metadata["kvlab"].replace("kvlab-trace-2", "kvlab-trace-1")

    same(small, kvlab.Trace.load(rewritten(saved, older)))


def test_a_checksum_that_is_missing_or_another_files_is_refused(small, saved):
    with pytest.raises(KvlabError, match="b.trace is damaged: its bytes are not those of its checksum"):
        kvlab.Trace.load(rewritten(saved, lambda metadata: metadata.pop("crc32")))
    with pytest.raises(KvlabError, match="b.trace is damaged: its bytes"):
        kvlab.Trace.load(
            rewritten(saved, lambda metadata: metadata.update(kvlab=metadata["kvlab"].replace("greedy", "given")))
        )


def test_a_name_that_looks_like_a_checksum_is_no_trouble(small, tmp_path):
    named = dataclasses.replace(small, meta={"document": 'a "crc32":"00000000" b'})
    path = named.save(tmp_path / "a.trace")
    same(named, kvlab.Trace.load(path))
    same(named, kvlab.Trace.load(kvlab.Trace.load(path).save(path)))


def test_checking_takes_no_memory_of_its_own(tmp_path):
    """A trace of 160 MB is checked and mapped: none of it is copied."""
    keys = torch.zeros(1, 1, 10**7, 2)
    path = kvlab.Trace.from_tensors(torch.zeros(1, 1, 1, 2), keys, keys, 10**7).save(tmp_path / "a.trace")
    assert path.stat().st_size > 160e6
    code = (
        "import sys, kvlab\nkvlab.Trace\n"
        "def own():\n    lines = open('/proc/self/status').read().splitlines()\n"
        "    return sum(int(line.split()[1]) for line in lines if line.startswith(('RssAnon', 'RssShmem')))\n"
        "before = own()\ntrace = kvlab.Trace.load(sys.argv[1])\nprint(own() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 60_000


@pytest.mark.parametrize(
    "metadata, message",
    [
        (None, "is a safetensors file but no kvlab trace"),
        ({"format": "pt"}, "is a safetensors file but no kvlab trace"),
        ({"kvlab": "{}"}, "is a safetensors file but no kvlab trace"),
        ({"kvlab": "[1]"}, "is a safetensors file but no kvlab trace"),
        ({"kvlab": '{"format": "kvlab-trace-0"}'}, "is a safetensors file but no kvlab trace"),
        ({"kvlab": "{"}, "is damaged"),
        ({"kvlab": '{"format": "kvlab-trace-1"}'}, "is damaged"),
        ({"kvlab": '{"format": "kvlab-trace-2"}'}, "is damaged"),
        ({"kvlab": '{"format": "kvlab-trace-2"}', "crc32": "nothing"}, "is damaged"),
        ({"kvlab": '{"format": "kvlab-trace-1", "prompt_length": 3, "scaling": 1.0, "meta": {}}'}, "is damaged"),
    ],
)
def test_foreign_safetensors_files_get_a_sentence(tmp_path, metadata, message):
    safetensors.torch.save_file({"weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(KvlabError, match=message):
        kvlab.Trace.load(tmp_path / "model.safetensors")


def full_disk(*_args, **_more):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_disk_in_rust(tensors, path, metadata):
    with open(path, "wb") as file:
        file.write(b"half of it")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("where, name, failure", [(os, "replace", full_disk), (module, "save_file", full_disk_in_rust)])
def test_a_save_that_fails_leaves_what_was_there_before(small, saved, monkeypatch, where, name, failure):
    before = saved.read_bytes()
    monkeypatch.setattr(where, name, failure)
    for path in (saved, saved.with_name("b.trace")):
        with pytest.raises(KvlabError, match=rf"cannot write .*{path.name}.*No space left"):
            small.save(path)
    assert [p.name for p in saved.parent.iterdir()] == ["a.trace"] and saved.read_bytes() == before


def test_an_interrupted_save_leaves_nothing(small, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small.save(tmp_path / "a.trace")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to(small, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "a.trace", tmp_path):
        with pytest.raises(KvlabError, match="cannot write"):
            small.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(queries=torch.zeros(4, 7, 8)), r"needs queries \[layers, heads, n, head_dim\]"),
        (dict(values=torch.zeros(2, 2, 8, 8)), "keys, values of one shape"),
        (dict(queries=torch.zeros(1, 4, 7, 8)), "differ in layers, head size, or heads per KV head"),
        (dict(queries=torch.zeros(2, 3, 7, 8)), "differ in layers"),
        (dict(queries=torch.zeros(2, 4, 7, 6)), "differ in layers"),
        (dict(prompt_length=0), r"prompt_length 0 is not within 1 \.\. 9 tokens"),
        (dict(prompt_length=10), "prompt_length 10"),
        (dict(prompt_length=1), "7 queries do not cover the response of 8 among 9 tokens"),
        (dict(queries=torch.zeros(2, 4, 10, 8)), "10 queries do not cover"),
        (dict(pseudo=torch.zeros(2, 2, 5, 8)), r"pseudo-queries \(2, 2, 5, 8\) are not \[2, 4, m, 8\]"),
        (dict(pseudo={"mine": torch.zeros(4, 5, 8)}), "pseudo-queries"),
        (dict(accumulated=torch.zeros(2, 4, 9)), r"accumulated attention \(2, 4, 9\) is not \[2, 4, 6\]"),
    ],
)
def test_tensors_that_do_not_fit_together(change, message):
    fit = dict(
        queries=torch.zeros(2, 4, 7, 8), keys=torch.zeros(2, 2, 9, 8), values=torch.zeros(2, 2, 9, 8), prompt_length=6
    )
    assert kvlab.Trace.from_tensors(**fit).steps == 3
    with pytest.raises(KvlabError, match=message):
        kvlab.Trace.from_tensors(**fit | change)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_are_as_private_as_the_umask_says(tmp_path, mask, mode):
    code = "from kvlab.lib import files\nimport sys\n"
    code += "with files.replacing(sys.argv[1]) as path:\n    path.write_text('kept')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "trace")], check=True, umask=mask)
    assert (tmp_path / "trace").stat().st_mode & 0o777 == mode
