"""Where tensors lie: the CPU, or a GPU of any maker that torch can work on (CUDA, ROCm, Apple's mps, Intel's xpu)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from kvlab.errors import KvlabError

CPU = torch.device("cpu")


def resolved(device: str | torch.device = "auto") -> torch.device:
    """A device by name; "auto" takes a GPU where there is one.

    Raises:
        KvlabError: no device of that name, or none such on this machine.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == "auto":
        return accelerator or CPU
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise KvlabError(
            f"unknown device {device!r}; use 'auto', 'cpu', or a GPU's name ('cuda', 'cuda:0', 'mps', 'xpu')"
        ) from error
    if place.type == "cpu":
        return place
    if accelerator is None:
        raise KvlabError(f"device {str(device)!r} was asked for, but torch finds no GPU here; use 'auto' or 'cpu'")
    count = torch.accelerator.device_count()
    if place.type != accelerator.type or (place.index or 0) >= count:
        names = f"{accelerator.type!r}" if count == 1 else f"'{accelerator.type}:0' .. '{accelerator.type}:{count - 1}'"
        raise KvlabError(f"device {str(device)!r} was asked for, but torch finds {names} here; use 'auto' or 'cpu'")
    return place


def name(place: torch.device) -> str | None:
    """The name of a GPU, such as "NVIDIA H100 80GB HBM3", or "mps" of Apple's, which give none; None for a CPU."""
    if place.type == "cpu":
        return None
    ask = getattr(torch.get_device_module(place), "get_device_name", lambda place: place.type)
    return ask(place)


def counts_peak(place: torch.device) -> bool:
    """Whether peak memory is counted: the kernel does it on a CPU, torch on all GPUs but Apple's."""
    return place.type == "cpu" or hasattr(torch.get_device_module(place), "max_memory_allocated")


def free_memory(place: torch.device) -> int | None:
    """Bytes that a process can still take there; None where nothing tells (Apple's GPUs)."""
    if place.type == "cpu":
        return psutil.virtual_memory().available
    module = torch.get_device_module(place)
    if not hasattr(module, "mem_get_info"):
        return None
    # Memory that torch has reserved and does not use is free for it.
    return module.mem_get_info(place)[0] + module.memory_reserved(place) - module.memory_allocated(place)


@contextmanager
def outside_autocast(device: torch.device) -> Iterator[None]:
    """While the block runs, the caller's autocast casts nothing on this kind of device; tensors keep their types."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
