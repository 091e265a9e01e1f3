"""Time the decoding of the lm-evaluation-harness's requests: in batches, and one at a time.

\b
python benchmarks/answering.py
python benchmarks/answering.py --model qwen2.5-coder-0.5b --policies full,snapkv --batches 8

Prompts of several lengths are prefilled and compressed one by one, whatever the batch. Only the steps after that are
timed, one request at a time and in batches, in turns. Times are CPU seconds of all threads. The harness need not be
installed.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from common import bar, in_a_sentence, prompt, run
from rich import box
from rich.console import Console
from rich.table import Table

from kvlab import methods
from kvlab.bench import clock
from kvlab.errors import KvlabError
from kvlab.harness.reading import Asked, Reader
from kvlab.harness.rows import respond
from kvlab.harness.settings import generation
from kvlab.inputs import models


def seconds(reader: Reader, prompts: list[list[int]], new_tokens: int, batch: int) -> tuple[float, list[list[int]]]:
    """CPU seconds of the steps after the prompts, and the responses."""
    how = generation(reader.lm, {}, new_tokens, set())
    rows = [reader.begun(Asked(ids, len(ids), lambda tokens: False), how) for ids in prompts]
    start = time.process_time()
    for place in range(0, len(rows), batch):
        respond(reader.lm, rows[place : place + batch], how)
    return time.process_time() - start, [row.tokens for row in rows]


def main(
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Of the longest prompt.")] = 512,
    n: Annotated[int, typer.Option("--requests", min=1)] = 8,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2)] = 48,
    batches: Annotated[str, typer.Option("--batches")] = "4,8",
    policies: Annotated[str, typer.Option("--policies")] = "full,snapkv,h2o,quest",
    budget: Annotated[int, typer.Option("--budget", min=2)] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    model: Annotated[str, typer.Option("--model")] = models.DEFAULT,
) -> None:
    """Time the steps of requests in batches."""
    console = Console(width=120)
    with in_a_sentence():
        lm = models.load(model)
        if any(not size.isdecimal() or int(size) < 1 for size in batches.split(",")):
            raise KvlabError(f"--batches takes numbers from 1 on, such as 4,8, and not {batches}")
        sizes = [1, *map(int, batches.split(","))]
        names = policies.split(",")
        readers = {
            name: Reader(lm, methods.policy(name, **({"budget": budget} if methods.has_budget(name) else {})))
            for name in names
        }
    prompts = [prompt(lm, tokens - 7 * number).tolist() for number in range(n)]
    taken: dict[tuple[str, int], list[float]] = {(name, size): [] for name in names for size in sizes}
    said: dict[str, list[list[int]]] = {}
    alike = dict.fromkeys(names, True)
    with bar(Console(stderr=True)) as progress:
        task = progress.add_task("responses", total=repeats * len(taken))
        for _, (name, size) in clock.rounds(list(taken), repeats):
            found, responses = seconds(readers[name], prompts, new_tokens, size)
            taken[name, size].append(found)
            alike[name] &= said.setdefault(name, responses) == responses
            progress.advance(task)
    threads = torch.get_num_threads()
    console.print(
        f"{n} responses of {new_tokens} tokens after up to {tokens}: {lm.name}, budget {budget}, {threads} threads",
        highlight=False,
    )
    columns = "policy", "one at a time, s", *(f"{size} at once" for size in sizes[1:]), "same responses"
    grid = Table(*columns, box=box.MARKDOWN)
    for name in names:
        alone = statistics.median(taken[name, 1])
        ratios = (f"{alone / statistics.median(taken[name, size]):.1f}x" for size in sizes[1:])
        grid.add_row(name, f"{alone:.1f}", *ratios, "yes" if alike[name] else "no")
    console.print(grid, highlight=False)


if __name__ == "__main__":
    run(main, __doc__)
