"""List and remove the cached files of models. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs
from kvlab.inputs.models import sources
from kvlab.inputs.models.catalogue import MODELS, KnownModel

GONE = ".gone-"
# A change of what a conversion writes gets a new number, so that a user's file is converted again. A known model's
# version is in the catalogue.
FORMAT = 1


def own_folder(sha256: str) -> Path:
    """Where a user's GGUF file with this hash lies once it is converted."""
    return packs.home() / "models" / f"gguf-{FORMAT}-{sha256[:32]}"


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache, or what a pull or a conversion that was cut off has left of it.

    Attributes:
        name: as `remove` takes it.
        folder: where it lies; it is not there yet where only parts are.
        parts: where those lie, if there are any; or what is there of a model whose conversion was cut off.
        size: bytes on the disk, parts included.
        about: what it is, in a few words.
    """

    name: str
    folder: Path
    parts: Path | None
    size: int
    about: str


def cached_models() -> list[CachedModel]:
    """The models in the cache: those that kvlab knows, in the order of the catalogue, then the others."""
    known = [entry for model in MODELS.values() if (entry := _known(model))]
    folders = {model.folder.name for model in MODELS.values()}
    store = packs.home() / "models"
    others = [path for path in sorted(store.glob("[!.]*")) if path.is_dir() and path.name not in folders]
    return known + [_other(path) for path in others] + _cut_off(store, folders)


def _known(model: KnownModel) -> CachedModel | None:
    size = _bytes(model.folder) + _bytes(model.workspace)
    if model.folder.is_dir():
        about = "ready"
    elif (model.workspace / sources.WHOLE).is_file():
        about = "fetched, not converted yet"
    elif size:
        about = f"{len(sources.fetched(model))} of {len(model.parts)} parts fetched"
    else:
        return None
    return CachedModel(model.name, model.folder, model.workspace, size, about)


def _other(folder: Path) -> CachedModel:
    facts = packs.read_provenance(folder)
    name, file = facts.get("name"), facts.get("file")
    if isinstance(name, str) and isinstance(file, str):
        return CachedModel(name, folder, None, _bytes(folder), f"converted from {file}")
    return CachedModel(folder.name, folder, None, _bytes(folder), "of an earlier version")


def _cut_off(store: Path, known: set[str]) -> list[CachedModel]:
    """The remains of users' conversions that ended before they were done; none of those under way."""
    left: dict[str, list[Path]] = {}
    for stage in sorted(store.glob(f"{packs.STAGE_PREFIX}*")):
        target = stage.name.removeprefix(packs.STAGE_PREFIX).rpartition("-")[0]
        if target not in known and not _is_being_made(store / target):
            left.setdefault(target, []).append(stage)
    about = "left by a conversion that was cut off"
    return [
        CachedModel(target, store / target, stages[0], sum(map(_bytes, stages)), about)
        for target, stages in left.items()
    ]


def _is_being_made(target: Path) -> bool:
    lock = packs.lock_of(target)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def remove(name: str) -> int:
    """Remove a model from the cache, with what was fetched for it, and return the bytes that are free by that.

    Raises KvlabError for a name that is not in the cache, and where another process is making the model.
    """
    cached = cached_models()
    named = [model for model in cached if name in (model.name, model.folder.name)]
    if not named and name in MODELS:
        names = ", ".join(model.name for model in cached)
        raise KvlabError(f"{name} is not in the cache; there is {names or 'no model'}")
    if not named:
        raise KvlabError(nearest(name, [*MODELS, *(model.name for model in cached)], "model"))
    for model in named:
        _remove(model)
    return sum(model.size for model in named)


def _remove(model: CachedModel) -> None:
    store, name = model.folder.parent, model.folder.name
    lock = packs.lock_of(model.folder)
    with packs.disk_errors(f"removing {model.name}"):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise KvlabError(f"{model.name} is being made by another process; wait for it, or stop it") from error
        try:
            for path in (model.folder, model.parts):
                if path and path.exists():
                    # Out of the way in one step: a removal that is killed leaves no half model behind.
                    os.replace(path, tempfile.mkdtemp(prefix=f"{GONE}{name}-", dir=store))
            for left in [*store.glob(f"{GONE}*"), *store.glob(f"{packs.STAGE_PREFIX}{name}-*")]:
                shutil.rmtree(left, ignore_errors=True)
        finally:
            lock.release()


def _bytes(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a pull in another process moves its files
            size += path.stat().st_size if path.is_file() else 0
    return size
