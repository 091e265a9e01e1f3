"""Compare torch's thread settings with torch's own defaults, alone and next to busy processes.

\b
python benchmarks/threads.py
python benchmarks/threads.py --beside 4 --repeats 9

Each setting has a process of its own. The settings take turns, next to the same busy processes. A ratio compares the
times of one turn. A ratio above 1.00 is slower than torch's defaults.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")
SETTINGS: dict[str, dict[str, str]] = {
    "torch's own": {},
    "GOMP_SPINCOUNT=2000": {"GOMP_SPINCOUNT": "2000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one inter-op thread": {"INTEROP": "1"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
# torch comes before kvlab, which has a default of its own.
WORKER = """
import os, sys, time, torch
if "INTEROP" in os.environ:
    torch.set_num_interop_threads(int(os.environ["INTEROP"]))
import kvlab
lm = kvlab.random_lm("smollm2-135m", layers=6, device="cpu", dtype="float32")
ids = torch.arange(100, 100 + int(sys.argv[1]))[None]
def turn():
    with torch.inference_mode():
        start = time.perf_counter()
        out = lm.model(ids, use_cache=True, logits_to_keep=1)
        middle = time.perf_counter()
        for token in range(int(sys.argv[2])):
            out = lm.model(ids[:, :1], past_key_values=out.past_key_values, logits_to_keep=1)
        return middle - start, time.perf_counter() - middle
turn()
print("ready", flush=True)
for _ in sys.stdin:
    print(*turn(), flush=True)
"""
NEIGHBOUR = """
import torch
one = torch.randn(512, 512)
print("ready", flush=True)
while True:
    one @ one
"""


@contextmanager
def running() -> Iterator[Callable[..., subprocess.Popen]]:
    """start(code, settings, *arguments): a process that is ready, and that is gone in the end."""
    begun: list[subprocess.Popen] = []

    def start(code: str, settings: dict[str, str], *arguments: int) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if name not in NAMES} | settings
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        begun.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("a process did not start; read its message above")
        return process

    try:
        yield start
    finally:
        for process in begun:
            process.kill()
            process.wait()


def main(
    beside: Annotated[list[int] | None, typer.Option(min=0, help="Busy processes next to it (0 and 4).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each setting.")] = 7,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prefill.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded after it.")] = 8,
) -> None:
    console = Console()
    workers = {}
    with running() as start:
        for name, settings in SETTINGS.items():
            workers[name] = start(WORKER, settings, prompt, tokens)
        for count in beside or (0, 4):
            with running() as start_beside:
                for _ in range(count):
                    start_beside(NEIGHBOUR, {"OMP_NUM_THREADS": "1"})
                console.print(measured(workers, repeats, f"next to {count} busy processes, {os.cpu_count()} cores"))


def measured(workers: dict[str, subprocess.Popen], repeats: int, title: str) -> Table:
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            taken[name].append(tuple(map(float, worker.stdout.readline().split())))
    table = Table("setting", "prefill", "range", "decoding", "range", title=title)
    first = taken[next(iter(SETTINGS))]
    for name, times in taken.items():
        cells = []
        for part in (0, 1):
            ratios = [mine[part] / theirs[part] for mine, theirs in zip(times, first, strict=True)]
            cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
