"""What stands around a trace's tensors in its file: a checksum of all bytes, and the layers that they are of."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from kvlab.core.layout import Layout
from kvlab.core.rotation import Rotation

CHECKSUM = "crc32"
BLANK = "0" * 8  # what stands for a file's checksum while that is taken


def sign(path: Path) -> None:
    """Put a saved trace's checksum into its place in the header."""
    found, place = checksum(path, BLANK)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(found.encode())


def checksum(path: Path, told: str) -> tuple[str, int]:
    """The CRC-32 of a safetensors file, as if zeros stood where its header tells `told`, and that place."""
    piece = memoryview(bytearray(1 << 20))
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(8 + size)
        # Within a text of the header these quotation marks would be escaped.
        key = f'"{CHECKSUM}":"'.encode()
        place = header.find(key + told.encode() + b'"') + len(key)
        found = zlib.crc32(header[:place] + BLANK.encode() + header[place + len(BLANK) :])
        while n := file.readinto(piece):
            found = zlib.crc32(piece[:n], found)
    return f"{found:08x}", place


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


def popped(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take out those whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, on the CPU, and no two in one piece of memory, which safetensors refuses."""
    found: dict[str, Tensor] = {}
    pieces: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.contiguous().cpu()
        piece = tensor.untyped_storage().data_ptr()
        found[key] = tensor.clone() if piece in pieces else tensor
        pieces.add(piece)
    return found
