"""Small wheels that stand in for a package index: pip fetches them from a local folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from kvlab.inputs.packs import Pack


def make_wheel(folder: Path, members: dict[str, bytes], name: str = "parcel", version: str = "1.0") -> Pack:
    """Write a wheel with these members, and return the pack that takes all of `data/` out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    facts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in (members | facts).items():
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), content)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Pack(
        name=name,
        package=name,
        version=version,
        sha256=sha256,
        members=("data/*",),
        licence="CC0",
        summary="a parcel for tests",
    )


def only_from(monkeypatch, folder: Path) -> None:
    """Let pip see this folder and nothing else, as on a machine without a network."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
