"""What of models lies in the cache: listed, counted by the doctor, and removed in one step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
from filelock import FileLock
from support import tiny_gguf
from support.wheels import make_model
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.errors import KvlabError
from kvlab.inputs import models, packs
from kvlab.inputs.models import cached, sources
from kvlab.workbench import doctor


@pytest.fixture
def entry(tmp_path, monkeypatch, own_home):
    """A known model in two wheels, which are not where pip looks."""
    model = make_model(tmp_path / "index", tiny_gguf.write(tmp_path / "tiny.gguf").read_bytes(), 2)
    monkeypatch.setitem(models.MODELS, "tiny", model)
    return model


def put_parts(entry, tmp_path, count):
    entry.workspace.mkdir(parents=True, exist_ok=True)
    for part in entry.parts[:count]:
        wheel = tmp_path / "index" / f"{part.package}-1.0-py3-none-any.whl"
        shutil.copy(wheel, entry.workspace / f"{part.package}-{part.version}.whl")


def lines() -> list[dict]:
    done = CliRunner().invoke(app, ["list", "models", "--json"])
    return json.loads(done.stdout)


def of(name) -> dict:
    return next(line for line in lines() if line["name"] == name)


def test_every_step_of_a_pull_is_listed(entry, tmp_path):
    assert cached.cached_models() == [] and of("tiny")["cached"] is None
    put_parts(entry, tmp_path, 1)
    assert of("tiny")["cached"] == "1 of 2 parts fetched" and of("tiny")["cached_bytes"] == entry.parts[0].size
    put_parts(entry, tmp_path, 2)
    sources.obtain(entry, "wheels", progress=False)
    assert of("tiny")["cached"] == "fetched, not converted yet" and of("tiny")["cached_bytes"] == entry.size
    models.pull("tiny", progress=False)
    size = sum(path.stat().st_size for path in entry.folder.iterdir())
    assert of("tiny") == {
        "name": "tiny",
        "summary": "for tests",
        "parameters": 1000,
        "licence": "CC0",
        "context": 256,
        "bytes_to_fetch": entry.fetched_size,
        "sources": ["wheels", "hub"],
        "cached": "ready",
        "cached_bytes": size,
        "folder": str(entry.folder),
    }
    assert (
        doctor.models().found
        == f"{packs.gigabytes(size)} in {packs.home() / 'models'}: tiny ({packs.gigabytes(size)}, ready)"
    )


def test_the_list_names_the_same(entry, tmp_path):
    put_parts(entry, tmp_path, 1)
    shown = " ".join(CliRunner().invoke(app, ["list", "models"]).stdout.split())
    told = "494M parameters, context of 32k; not in the cache, 0.48 GB to fetch from wheels or hub"
    assert told in shown and "1.54B parameters" in shown
    assert "(1 of 2 parts" in shown


def test_a_users_file_is_listed_and_removed_by_its_name(entry, tmp_path):
    lm = models.load(tmp_path / "tiny.gguf", device="cpu")
    name = f"tiny@{lm.sha256[:8]}"
    assert lines()[-1]["name"] == name and lines()[-1]["summary"] == f"converted from {tmp_path / 'tiny.gguf'}"
    assert f"{name} (" in doctor.models().found
    freed = packs.gigabytes(lines()[-1]["cached_bytes"])
    done = CliRunner().invoke(app, ["remove", name])
    assert done.exit_code == 0 and done.stdout == f"{name}: removed, {freed} freed\n"
    assert cached.cached_models() == [] and (tmp_path / "tiny.gguf").is_file()
    assert models.load(tmp_path / "tiny.gguf", device="cpu").sha256 == lm.sha256


def test_removing_takes_the_parts_too_and_says_what_it_freed(entry, tmp_path):
    put_parts(entry, tmp_path, 2)
    models.pull("tiny", progress=False)
    put_parts(entry, tmp_path, 1)
    before = cached.cached_models()[0].size
    assert cached.remove("tiny") == before > entry.parts[0].size
    assert [path.name for path in entry.folder.parent.iterdir()] == [".tiny-1.0.lock"]
    assert doctor.models().found == f"none in {packs.home() / 'models'}"


def test_a_folder_of_an_earlier_version_is_shown_and_goes_by_its_own_name(entry):
    old = entry.folder.with_name("tiny-0.9")
    old.mkdir(parents=True)
    (old / "model.safetensors").write_bytes(b"\0" * 1000)
    assert [(model.name, model.size, model.about) for model in cached.cached_models()] == [
        ("tiny-0.9", 1000, "of an earlier version")
    ]
    assert cached.remove("tiny-0.9") == 1000 and not old.exists()


def test_names_that_are_not_there(entry, tmp_path):
    put_parts(entry, tmp_path, 1)
    with pytest.raises(KvlabError, match="^smollm2-135m is not in the cache; there is tiny$"):
        cached.remove("smollm2-135m")
    with pytest.raises(KvlabError, match="did you mean 'tiny'"):
        cached.remove("tinny")
    for name in ("", ".", "..", "../..", ".parts-tiny-1.0", "/"):
        with pytest.raises(KvlabError, match="unknown model"):
            cached.remove(name)
    assert len(cached.cached_models()) == 1


def test_what_is_being_made_is_not_removed(entry, tmp_path):
    put_parts(entry, tmp_path, 1)
    with FileLock(entry.folder.parent / f".{entry.folder.name}.lock"):
        done = CliRunner().invoke(app, ["remove", "tiny"])
        assert done.exit_code == 1
        with pytest.raises(KvlabError, match="tiny is being made by another process"):
            cached.remove("tiny")
    assert len(sources.fetched(entry)) == 1
    cached.remove("tiny")
    assert not entry.workspace.exists()


KILLED = textwrap.dedent("""
    import os, signal
    from kvlab.inputs.models import cached
    from kvlab.inputs.models.catalogue import MODELS, HubFile, KnownModel, Part
    MODELS["tiny"] = ENTRY
    cached.shutil.rmtree = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    cached.remove("tiny")
""")


def test_a_removal_that_is_killed_leaves_no_half_model(entry, tmp_path):
    put_parts(entry, tmp_path, 2)
    models.pull("tiny", progress=False)
    done = subprocess.run([sys.executable, "-c", KILLED.replace("ENTRY", repr(entry))])
    assert done.returncode == -9
    assert not entry.folder.exists() and cached.cached_models() == []
    put_parts(entry, tmp_path, 2)
    assert models.load("tiny", device="cpu").n_layers == tiny_gguf.LAYERS
    cached.remove("tiny")
    assert [path.name for path in entry.folder.parent.iterdir()] == [".tiny-1.0.lock"], "what it left is gone, too"


def test_a_look_changes_nothing_and_needs_no_torch(own_home):
    told = "import sys; from kvlab.workbench.listing import entries; entries('models'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and not own_home.exists()


def test_what_a_killed_conversion_left_is_listed_and_removed(tmp_path, own_home):
    stage = own_home / "models" / f"{packs.STAGE_PREFIX}gguf-1-0123abcd-x8z_k2pq"
    stage.mkdir(parents=True)
    (stage / "model.safetensors").write_bytes(b"0" * 3000)
    (line,) = [line for line in lines() if line["name"] == "gguf-1-0123abcd"]
    assert (line["summary"], line["cached_bytes"]) == ("left by a conversion that was cut off", 3000)
    assert "gguf-1-0123abcd (0.0 MB, left by a conversion that was cut off)" in doctor.models().found
    with FileLock(own_home / "models" / ".gguf-1-0123abcd.lock"):
        assert cached.cached_models() == [], "one that is under way is nothing that is left"
    done = CliRunner().invoke(app, ["remove", "gguf-1-0123abcd"])
    assert done.exit_code == 0 and done.stdout == "gguf-1-0123abcd: removed, 0.0 MB freed\n"
    assert not stage.exists() and cached.cached_models() == []
