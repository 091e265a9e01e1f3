"""What the benchmarks share: a prompt, the plain prefill, time and peak memory of one call, and CSV files."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import gc
import os
import resource
import sys
import time
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from transformers import DynamicCache


def prompt(lm, tokens: int) -> torch.Tensor:
    vocabulary = lm.model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).to(lm.device)


def prefill(lm, ids, attention: str = "sdpa", **more):
    """The prompt through the model and transformers' own cache."""
    lm.model.set_attn_implementation(attention)
    try:
        with torch.inference_mode():
            return lm.model(ids[None], past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1, **more)
    finally:
        lm.model.set_attn_implementation("sdpa")


def seconds(run, *arguments) -> float:
    gc.collect()
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def bar(console: Console) -> Progress:
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


def write_csv(path: Path, rows: list[dict]) -> None:
    part = path.with_name(f".{path.name}.part")
    with open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


def tidy() -> None:
    """Give freed memory back to the system, so that the next peak is not hidden in it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):          # glibc only
        ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """`with Peak() as peak: ...` -> `peak.bytes`: the most that was resident at once, above what was at the start.

    Linux keeps a high-water mark that can be set back. Where it cannot, the process's own highest mark counts, which is
    right as long as nothing before the block took more.
    """

    def __enter__(self) -> Peak:
        self._start = psutil.Process().memory_info().rss
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *_) -> None:
        self.bytes = max(self._highest() - self._start, 0)

    @staticmethod
    def _highest() -> int:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
