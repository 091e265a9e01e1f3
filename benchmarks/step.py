"""Show where the time of a decoding step goes on a CPU: torch's operations by purpose, and Python between them.

\b
python benchmarks/step.py
python benchmarks/step.py --context 8000 --policies full,quest --budget 512

Each policy decodes after the same prompt, in turns with the others. Steps are timed as they are. Then as many again run
under torch's profiler, which measures the time inside each operation. The rest of a step's time without the profiler is
Python: transformers' modules, kvlab's own, and torch's way from a call to its operation.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, cast
from unittest import mock

import torch
import typer
from common import bar, in_a_sentence, run
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from kvlab.bench import clock, meters, timing
from kvlab.core import ranking
from kvlab.inputs import models

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler announces each of its starts
WEIGHTS, ATTENTION, TAKING, FINDING, WRITING, OTHER = (
    "products with the weights",
    "attention",
    "taking entries",
    "finding entries",
    "copying",
    "norms, rotation, all else",
)
PURPOSES = {
    WEIGHTS: ("mm", "addmm", "linear", "_linear_pointwise"),
    ATTENTION: ("bmm", "baddbmm", "_scaled_dot_product", "_softmax"),
    TAKING: ("index_select", "gather", "index", "embedding"),
    FINDING: ("by NumPy", "topk", "sort", "nonzero", "argmax", "amin", "aminmax", "ge", "ne", "cumsum"),
    WRITING: ("copy_", "cat", "index_copy_", "index_put_"),
}
PYTHON = "Python, between operations"


def purpose(operation: str) -> str:
    """Name the purpose of a torch operation ("aten::mm", "mkldnn::_linear_pointwise") in a decoding step."""
    name = operation.rpartition("::")[2]
    for found, names in PURPOSES.items():
        if name in names or any(each.startswith("_") and name.startswith(each) for each in names):
            return found
    return OTHER


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """While the block runs, the profiler sees the best scores being found by NumPy, which it knows nothing of."""

    def finding(scores: torch.Tensor, k: int | torch.Tensor, widest: int) -> torch.Tensor | None:
        with record_function("kvlab::by NumPy"):
            return by_numpy(scores, k, widest)

    by_numpy = ranking._reaching_by_numpy
    with mock.patch.object(ranking, "_reaching_by_numpy", finding):
        yield


def steps(lm: models.LM, ids: torch.Tensor, contender: timing.Contender, n: int) -> tuple[float, Counter[str]]:
    """Milliseconds of a decoding step (the median of `n`), and those inside operations by purpose."""
    inside: Counter[str] = Counter()
    with torch.inference_mode(), contender.session(lm):
        out = lm.model(ids, use_cache=True, logits_to_keep=1)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        # The first step ends the prompt, and the second meets all shapes anew.
        times = [clock.seconds(lm.device, lambda: lm.model(token, past_key_values=cache)) for _ in range(n + 2)][2:]
        with recorded(), profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(n):
                lm.model(token, past_key_values=cache)
    for event in profiled.key_averages():
        inside[purpose(event.key)] += event.self_cpu_time_total / 1e3 / n
    return statistics.median(times) * 1e3, inside


def main(
    context: Annotated[int, typer.Option("--context", min=2)] = 4000,
    policies: Annotated[str, typer.Option("--policies")] = "full,snapkv,morphkv,exact_topk,quest,rocketkv",
    budget: Annotated[int, typer.Option("--budget", min=2)] = 512,
    n: Annotated[int, typer.Option("--steps", min=1)] = 16,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    model: Annotated[str, typer.Option("--model")] = models.DEFAULT,
) -> None:
    """Profile a decoding step of each policy."""
    console = Console(width=140)
    with in_a_sentence():
        lm = models.load(model)
        chosen = timing.contenders(policies.split(","), [budget])
        ids, _ = meters.prompt(lm, context)
    found: dict[timing.Contender, list[tuple[float, Counter[str]]]] = {each: [] for each in chosen}
    with bar(Console(stderr=True)) as progress:
        task = progress.add_task("steps", total=repeats * len(chosen))
        for _, each in clock.rounds(chosen, repeats):
            found[each].append(steps(lm, ids, each, n))
            progress.advance(task)
    title = f"ms of a step after {context:,} tokens: {lm.name}, {meters.device_name(lm.device)}, budget {budget}"
    grid = Table(title=title, box=box.MARKDOWN)
    grid.add_column("")
    for each in chosen:
        grid.add_column(each.name, justify="right")
    wholes = [statistics.median(whole for whole, _ in found[each]) for each in chosen]
    grid.add_row("a step", *(f"{whole:.1f}" for whole in wholes))
    sums = [0.0] * len(chosen)
    for each in (*PURPOSES, OTHER):
        parts = [statistics.median(cast(float, inside[each]) for _, inside in found[one]) for one in chosen]
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
        grid.add_row(each, *(f"{part:.1f}" for part in parts))
    grid.add_row(PYTHON, *(f"{whole - total:.1f}" for whole, total in zip(wholes, sums, strict=True)))
    console.print(grid, highlight=False)


if __name__ == "__main__":
    run(main, __doc__)
