"""Wheels as parcels of data: fetched by name with pip, checked, unzipped. None is installed, and none of it is run."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from kvlab.errors import KvlabError


def fetch(package: str, version: str, sha256: str, folder: Path) -> Path:
    """Download a wheel into `folder`, and return its path once its hash is right.

    Raises KvlabError where there is no pip or no network, and for a wheel with another hash; OSError for a full disk.
    """
    wheel = _download(package, version, folder)
    actual = file_sha256(wheel)
    if actual != sha256:
        raise KvlabError(
            f"{wheel.name} has sha256 {actual}, but {package}=={version} must have {sha256}: "
            "it was changed or damaged on its way, and was not opened"
        )
    return wheel


def _download(package: str, version: str, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise KvlabError(
            f"fetching {package} needs pip, which this Python does not have; "
            f"add it with: {Path(sys.executable).name} -m ensurepip"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "-d",
        str(folder),
        f"{package}=={version}",
    ]
    # pip's own temporary files go below `folder` too, so that nothing of a killed pull stays elsewhere.
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)})
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in done.stderr or "Errno 28" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
    said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR")]
    why = said[-1] if said else "it gave no reason"
    raise KvlabError(
        f"pip could not fetch {package}=={version} ({why}); is there a network, or a "
        "package index that pip is configured for?"
    )


def members(wheel: Path, patterns: tuple[str, ...]) -> list[str]:
    """The names inside a wheel that match, sorted.

    Raises KvlabError where there is none, for one that points outside its folder, and for a file that is no wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(n for n in archive.namelist() if any(fnmatch.fnmatchcase(n, p) for p in patterns))
    except zipfile.BadZipFile as error:
        raise KvlabError(f"{wheel.name} is not a readable wheel ({error})") from error
    unsafe = [n for n in names if ".." in PurePosixPath(n).parts or n.startswith("/") or "\\" in n]
    if unsafe:
        raise KvlabError(f"{wheel.name} has a member that points outside its folder: {unsafe[0]!r}")
    if not names:
        raise KvlabError(f"{wheel.name} has no member {' or '.join(patterns)}")
    return names


def unpack(wheel: Path, patterns: tuple[str, ...], folder: Path) -> list[str]:
    """Write the members that match, by their last name, into `folder`; return the names inside the wheel.

    Raises KvlabError as `members`.
    """
    names = members(wheel, patterns)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in names:
                with archive.open(name) as source, (folder / PurePosixPath(name).name).open("xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
    except zipfile.BadZipFile as error:
        raise KvlabError(f"{wheel.name} is not a readable wheel ({error})") from error
    return names


def file_sha256(*paths: Path) -> str:
    """The sha256 of the bytes of the files, one after the other, in hex."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
