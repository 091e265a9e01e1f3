"""A trace's file while it is captured: what is large is mapped from where the file will have it."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.traces.files import separate, write_checksum

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace

Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]

# The safetensors format's names of these types.
TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
PAGE = 4096  # bytes


class Draft:
    """A safetensors file in the making: room for its header, then tensors of known shapes.

    A capture fills these tensors while it runs. Tensors that are known only at its end come after them.

    Args:
        path: the file, which may be there already.
        shapes: of the tensors that are mapped, by name, with their types; all zeros at first.
        room: bytes for the header, at least.

    Attributes:
        tensors: the mapped ones, on the CPU; what is written into them is written to the file.

    Raises:
        KvlabError: the disk is full.
    """

    def __init__(self, path: Path, shapes: Shapes, room: int):
        self._path, self._begin = path, -(-room // PAGE) * PAGE
        # The widest numbers first, so that each begins at a multiple of its own width.
        self._shapes = dict(sorted(shapes.items(), key=lambda item: -item[1][1].itemsize))
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values()]
        self._end = self._begin + sum(sizes)
        _reserve(path, self._end)
        mapped = torch.from_file(str(path), shared=True, size=self._end, dtype=torch.uint8)[self._begin :]
        pieces = zip(self._shapes.items(), mapped.split(sizes), strict=True)
        self.tensors = {name: piece.view(dtype).view(shape) for (name, (shape, dtype)), piece in pieces}

    def finish(self, trace: Trace) -> None:
        """Make it the file of a trace, some of whose tensors are the mapped ones."""
        tensors = trace._tensors()
        missing = self.tensors.keys() - tensors.keys()
        assert not missing, f"a trace without {missing} was captured into a file that has room for them"
        for name, mapped in self.tensors.items():
            if tensors[name].data_ptr() != mapped.data_ptr():
                mapped.copy_(tensors[name])
        rest = separate({name: tensor for name, tensor in tensors.items() if name not in self.tensors})
        rest = dict(sorted(rest.items(), key=lambda item: -item[1].element_size()))
        with self._path.open("r+b") as file:
            file.seek(self._end)
            for tensor in rest.values():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            header = self._header(trace, rest)
            file.seek(0)
            file.write((self._begin - 8).to_bytes(8, "little") + header.ljust(self._begin - 8))
        write_checksum(self._path)

    def _header(self, trace: Trace, rest: dict[str, Tensor]) -> bytes:
        shapes = self._shapes | {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in rest.items()}
        header: dict[str, dict] = {"__metadata__": trace.described()}
        end = 0
        for name, (shape, dtype) in shapes.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        written = json.dumps(header, separators=(",", ":")).encode()
        assert len(written) <= self._begin - 8, f"a header of {len(written)} bytes in a room of {self._begin}"
        return written


def _reserve(path: Path, size: int) -> None:
    """Give a file its size and its place on the disk: writing to mapped memory without one ends the process."""
    with path.open("wb") as file:
        if shutil.disk_usage(path.parent).free < size:
            raise KvlabError(
                f"cannot write into {path.parent}: the trace takes {size / 1e9:.1f} GB, which are not free"
            )
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
