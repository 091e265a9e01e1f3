"""Small wheels that stand in for a package index: pip fetches them from a local folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from kvlab.inputs.models.catalogue import HubFile, KnownModel, Part
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


def make_model(folder: Path, content: bytes, pieces: int = 1, name: str = "tiny") -> KnownModel:
    """Cut a GGUF file's bytes into wheels (`NAME-part1`, ...), and return the model that they carry.

    Members are numbered without zeros, so that their order by name is another one from ten pieces on.
    """
    step = -(-len(content) // pieces)
    packs = [
        make_wheel(folder, {f"data/part{number}.bin": content[start : start + step]}, f"{name}_part{number}")
        for number, start in enumerate(range(0, len(content), step), 1)
    ]
    sizes = [(folder / f"{pack.name}-1.0-py3-none-any.whl").stat().st_size for pack in packs]
    return KnownModel(
        name=name,
        version="1.0",
        summary="for tests",
        parameters=1000,
        context=256,
        licence="CC0",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        parts=tuple(Part(pack.package, "1.0", pack.sha256, size) for pack, size in zip(packs, sizes, strict=True)),
        members=("data/part*.bin",),
        hub=HubFile("someone/tiny-GGUF", "tiny.gguf", "0" * 40),
        disk=1_000_000,
    )


def only_from(monkeypatch, folder: Path) -> None:
    """Let pip see this folder and nothing else, as on a machine without a network."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
