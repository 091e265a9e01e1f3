"""What of models lies in the cache, and how it is removed. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs
from kvlab.inputs.models import sources
from kvlab.inputs.models.catalogue import MODELS, KnownModel

GONE = ".gone-"


@dataclass(frozen=True)
class Held:
    """A model in the cache, or what a pull that was cut off has left of it.

    Attributes:
        name: as `remove` takes it.
        folder: where it lies; it is not there yet where only parts are.
        parts: where those lie, if there are any.
        size: bytes on the disk, parts included.
        about: what it is, in a few words.
    """

    name: str
    folder: Path
    parts: Path | None
    size: int
    about: str


def held() -> list[Held]:
    """The models in the cache: those that kvlab knows, in the order of the catalogue, then the others."""
    known = [_known(model) for model in MODELS.values()]
    others = {model.folder.name for model in MODELS.values()}
    store = packs.home() / "models"
    folders = sorted(path for path in store.glob("[!.]*") if path.is_dir() and path.name not in others)
    return [one for one in known if one] + [_other(folder) for folder in folders]


def _known(model: KnownModel) -> Held | None:
    parts, size = len(sources.fetched(model)), _bytes(model.folder) + _bytes(model.workspace)
    if model.folder.is_dir():
        about = "ready"
    elif (model.workspace / sources.WHOLE).is_file():
        about = "fetched, not converted yet"
    elif size:
        about = f"{parts} of {len(model.parts)} parts fetched"
    else:
        return None
    return Held(model.name, model.folder, model.workspace, size, about)


def _other(folder: Path) -> Held:
    facts = packs.read_provenance(folder)
    name, file = facts.get("name"), facts.get("file")
    about = f"converted from {file}" if isinstance(file, str) else "of an earlier version"
    return Held(name if isinstance(name, str) and file else folder.name, folder, None, _bytes(folder), about)


def remove(name: str) -> int:
    """Remove a model from the cache, with what was fetched for it, and return the bytes that are free by that.

    Raises KvlabError for a name that is not in the cache, and where another process is making the model.
    """
    there = held()
    found = [one for one in there if name in (one.name, one.folder.name)]
    if not found and name in MODELS:
        raise KvlabError(f"{name} is not in the cache; there is {', '.join(one.name for one in there) or 'no model'}")
    if not found:
        raise KvlabError(nearest(name, [*MODELS, *(one.name for one in there)], "model"))
    for one in found:
        _remove(one)
    return sum(one.size for one in found)


def _remove(one: Held) -> None:
    store, name = one.folder.parent, one.folder.name
    lock = FileLock(store / f".{name}.lock")
    with packs.disk_errors(f"removing {one.name}"):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise KvlabError(f"{one.name} is being made by another process; wait for it, or stop it") from error
        try:
            for path in (one.folder, one.parts):
                if path and path.exists():
                    # Out of the way in one step: a removal that is killed leaves no half model behind.
                    os.replace(path, tempfile.mkdtemp(prefix=f"{GONE}{name}-", dir=store))
            for left in [*store.glob(f"{GONE}*"), *store.glob(f"{packs.STAGE_PREFIX}{name}-*")]:
                shutil.rmtree(left, ignore_errors=True)
        finally:
            lock.release()


def _bytes(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a pull in another process moves its files
            sizes += path.stat().st_size if path.is_file() else 0
    return sizes
