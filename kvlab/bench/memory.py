"""Peak memory: of a block in this process, and of a whole run in a fresh one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from kvlab.errors import KvlabError


def tidy() -> None:
    """Give freed memory back to the system; the next peak would be hidden in it."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """`with Peak(device) as peak: ...` -> `peak.bytes`: the most memory in use at once, above what was at the start.

    On a GPU torch counts it, where it can (`devices.counts_peak`). On a CPU it is resident memory: Linux keeps a
    high-water mark, which is reset. Where it cannot be reset, the mark of the whole process counts, which only means
    something in a fresh process.
    """

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0
        self._gpu = torch.get_device_module(device)

    def __enter__(self) -> Peak:
        tidy()
        if self.device.type != "cpu":
            self._gpu.reset_peak_memory_stats(self.device)
            self._start = self._gpu.memory_allocated(self.device)
            return self
        self._start = psutil.Process().memory_info().rss
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *exception: object) -> None:
        on_gpu = self.device.type != "cpu"
        highest = self._gpu.max_memory_allocated(self.device) if on_gpu else _high_water_mark()
        self.bytes = max(highest - self._start, 0)


def _high_water_mark() -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment in which glibc gives every freed block back: by default it keeps them, and the peak of the same run
varies between once and twice its need. Times mean nothing there: the system clears every block anew, which may double
them."""


def in_fresh_process(arguments: Sequence[str], label: str, variables: Mapping[str, str] = TIGHT) -> str:
    """The last line that a fresh Python process prints: no earlier run has left memory behind in it.

    Args:
        arguments: of Python: a module after "-m", or a script, and its own arguments.
        label: name of the measured run, for the error.
        variables: of its environment, in addition to this process's: `TIGHT` to measure memory, none to measure time.

    Raises:
        KvlabError: the process failed.
    """
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}"
        why = "it was killed, perhaps for want of memory" if done.returncode < 0 else last
        raise KvlabError(f"measuring the memory of {label} failed: {why}")
    return done.stdout.splitlines()[-1]
