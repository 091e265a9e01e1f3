"""The header of a trace's file: a checksum of all bytes, and the layers of the tensors."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from kvlab.core.layout import Layout
from kvlab.core.rotation import Rotation

CHECKSUM = "crc32"
BLANK = "0" * 8  # what stands for a file's checksum while that is taken


def write_checksum(path: Path) -> None:
    """Write a saved trace's checksum into its header."""
    crc, offset = checksum(path, BLANK)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(crc.encode())


def checksum(path: Path, recorded: str) -> tuple[str, int]:
    """The CRC-32 of a safetensors file, as if zeros stood where its header has `recorded`, and that offset."""
    piece = memoryview(bytearray(1 << 20))
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(8 + size)
        # Within a text of the header these quotation marks would be escaped.
        key = f'"{CHECKSUM}":"'.encode()
        offset = header.find(key + recorded.encode() + b'"') + len(key)
        crc = zlib.crc32(header[:offset] + BLANK.encode() + header[offset + len(BLANK) :])
        while n := file.readinto(piece):
            crc = zlib.crc32(piece[:n], crc)
    return f"{crc:08x}", offset


def layout_of(saved: dict[str, list] | None) -> Layout | None:
    """The layout that a file's header tells; None where it tells none."""
    return None if saved is None else Layout(tuple(saved["sees"]), tuple(saved["compressed"]))


def rotations_of(saved: list[dict[str, Any] | None] | None) -> tuple[Rotation | None, ...] | None:
    """The rotations that a file's header tells; None where it tells none."""
    if saved is None:
        return None
    return tuple(
        None if turn is None else Rotation(**{**turn, "frequencies": tuple(turn["frequencies"])}) for turn in saved
    )


def pop_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take out those whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, on the CPU, and no two in one piece of memory, which safetensors refuses."""
    separated: dict[str, Tensor] = {}
    pieces: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.contiguous().cpu()
        piece = tensor.untyped_storage().data_ptr()
        separated[key] = tensor.clone() if piece in pieces else tensor
        pieces.add(piece)
    return separated
