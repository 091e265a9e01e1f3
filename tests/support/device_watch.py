"""Counts what a block asks of the pretended GPU: its operators, its memory, and how often the CPU waits for it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from support import pretend_gpu

aten = torch.ops.aten

READS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.repeat_interleave,
    aten._linalg_check_errors,
}
"""Operators whose result, or its shape, the CPU must know: CUDA waits for the device in each."""
COPIES = {aten._to_copy, aten.copy_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
VIEWS = {aten.detach, aten.view, aten.expand, aten.alias, aten.unsqueeze, aten.squeeze, aten.permute, aten.transpose}


@dataclass
class Seen:
    """What was counted: operators by name, and waits by the line of kvlab that asked for them."""

    operators: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def wait(self, kind: str) -> None:
        self.waits[f"{kind} at {_line()}"] += 1


class Watch(TorchDispatchMode):
    """Counts the operators that take or make a tensor of the device."""

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        kind, inputs = func.overloadpacket, [*_tensors(args), *_tensors(kwargs.values())]
        found = func(*args, **kwargs)
        if any(map(_far, [*inputs, *_tensors([found])])):
            self.seen.operators[str(func)] += 1
            if _waits(kind, args, kwargs, found):
                self.seen.wait(str(kind).removeprefix("aten."))
        return found


@contextmanager
def watched() -> Iterator[Seen]:
    """Counts while the block runs, inside `pretend_gpu.present()`."""
    seen = Seen()

    def tolist(self: pretend_gpu.Far) -> Any:
        seen.wait("tolist")
        return self.inside.tolist()

    with mock.patch.object(pretend_gpu.Far, "tolist", tolist), Watch(seen):
        yield seen


def _far(x: Tensor) -> bool:
    return isinstance(x, pretend_gpu.Far)


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _waits(kind: Any, args: tuple, kwargs: dict[str, Any], found: Any) -> bool:
    """Whether CUDA waits for the device in this operator."""
    if kind is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if kind in READS:
        return True
    if kind is aten.copy_:
        # One number from the CPU is an argument of a kernel, except to copy_.
        return _far(args[0]) != _far(args[1])
    if kind is aten._to_copy:
        return _far(args[0]) != _far(found)
    if kind in INDEXED:
        indices = [x for x in args[1] if x is not None]
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
        one_number = kind not in (aten.index, aten._unsafe_index) and args[2].numel() == 1
        return any(not _far(x) and x.dim() for x in indices) or bool(masks and not one_number)
    return False


def _line() -> str:
    """The innermost line of kvlab, or of transformers where there is none."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "kvlab" in path.parts[:-1] and "tests" not in path.parts:
            inside = path.parts[len(path.parts) - 1 - path.parts[::-1].index("kvlab") :]
            return f"{'/'.join(inside)}:{frame.f_lineno}"
        if not other and "transformers" in path.parts:
            other = f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "elsewhere"


@dataclass
class Memory:
    """Bytes that tensors of the device took: at most at once, and the largest of them with its shape."""

    peak: int = 0
    largest: int = 0
    shape: tuple[int, ...] = ()


class WatchMemory(TorchDispatchMode):
    """Adds up the storages that are alive after each operator."""

    def __init__(self, memory: Memory, besides: Collection[int]):
        super().__init__()
        self.memory, self._besides, self._alive = memory, besides, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in filter(_far, _tensors([found])):
            self.see(tensor)
        return found

    def see(self, tensor: Tensor) -> None:
        assert isinstance(tensor, pretend_gpu.Far)
        storage, memory = tensor.inside.untyped_storage(), self.memory
        if storage._cdata in self._besides:
            return
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            memory.peak = max(memory.peak, sum(size for _, size in self._alive.values()))
        if storage.nbytes() > memory.largest:
            memory.largest, memory.shape = storage.nbytes(), tuple(tensor.shape)


@contextmanager
def memory_watched(besides: Collection[int] = ()) -> Iterator[Memory]:
    """Counts while the block runs, inside `pretend_gpu.present()`; fused attention is one operator, as on a real GPU.

    Args:
        besides: storages that do not count, by their address.
    """
    memory = Memory()
    watch, fused = WatchMemory(memory, besides), F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        far = any(map(_far, args))
        inside = [x.inside if isinstance(x, pretend_gpu.Far) else x for x in args]
        options = {name: x.inside if isinstance(x, pretend_gpu.Far) else x for name, x in kwargs.items()}
        with _disable_current_modes():
            found = fused(*inside, **options)
            found = pretend_gpu.Far(found, next(x.device for x in args if _far(x))) if far else found
        if far:
            watch.see(found)
        return found

    with mock.patch.object(F, "scaled_dot_product_attention", attention), watch:
        yield memory
