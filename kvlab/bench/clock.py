"""Clocks that wait for the device, and rounds in which the compared methods take turns.

All timings of kvlab are taken with these: `kvlab bench`, the notebook on speed, and the scripts in benchmarks/.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")


def wall(device: torch.device) -> float:
    """Wall-clock seconds from an arbitrary start, once everything queued on `device` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def busy(device: torch.device) -> float:
    """Seconds from an arbitrary start: on a CPU this process's CPU time, without other processes; else `wall`."""
    return time.process_time() if device.type == "cpu" else wall(device)


def seconds(device: torch.device, run: Callable[..., object], *arguments: object) -> float:
    """Wall-clock seconds of one call, until `device` has finished all work that the call gave it."""
    gc.collect()
    start = wall(device)
    run(*arguments)
    return wall(device) - start


class Marks:
    """Times on a device: `mark()` notes one, `gaps()` gives the seconds between each and the next.

    On CUDA a mark is an event in the current stream: the program runs ahead of the device and waits in `gaps` alone. On
    other devices every mark is `wall`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._marks: list[Any] = []  # seconds, or CUDA's events

    def mark(self) -> None:
        if self.device.type != "cuda":
            self._marks.append(wall(self.device))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def gaps(self) -> list[float]:
        pairs = list(pairwise(self._marks))
        if self.device.type != "cuda":
            return [after - before for before, after in pairs]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """While the block runs, torch uses one thread where `device` is a CPU, as `busy` needs it."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rounds(items: Sequence[Item], repeats: int) -> list[tuple[int, Item]]:
    """(round from 0, item) pairs: every item once in each round. Odd rounds run in reverse order, so that a drifting
    clock speed cancels.
    """
    return [(turn, item) for turn in range(repeats) for item in (items if turn % 2 == 0 else items[::-1])]


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each value over the reference's in the same round; nan where that is 0."""
    return [value / base if base else math.nan for value, base in zip(values, reference, strict=True)]
