"""Time replays of twelve policies at five budgets on one trace, against running the model again for each.

\b
python benchmarks/replay.py
python benchmarks/replay.py --policies all --tokens 1024 --budgets 64 --budgets 256 --out replay.csv

The prompt is random token ids. A tool that runs the model for each policy and budget needs at least one prefill each.
So the replays are compared with the plain SDPA prefill, times the number of replays. The time of the replays includes
the full cache's side of the comparison, which is computed once for a trace. The time of the capture is shown, too.
"""

from __future__ import annotations

import resource
import statistics
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from common import bar, in_a_sentence, prefill, prompt, run, write_csv
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab.bench import clock
from kvlab.methods import registry

BUDGETS = [128, 256, 512, 1024, 2048]
TWELVE = "streamingllm,h2o,snapkv,pyramidkv,dynamickv,duoattention,morphkv,zsmerge,dapq,quest,rocketkv,compilerkv"


def possible(names: str, budgets: list[int], console: Console) -> list:
    """The named policies at every budget that they can work with; one without a budget stands once."""
    found = []
    for name in kvlab.policies() if names == "all" else names.split(","):
        if "budget" not in registry()[name].model_fields:
            found.append(kvlab.policy(name))
            continue
        for budget in budgets:
            try:
                found.append(kvlab.policy(name, budget=budget))
            except kvlab.KvlabError as error:
                console.print(f"left out: {error}")
    return found


def measure(lm, ids, new_tokens: int, policies: list, repeats: int, console: Console) -> tuple[list, float, float]:
    """One row for each replay; seconds of one prefill, taken before and after them; seconds of the capture."""
    rows, traces = [], []

    def capture() -> None:
        traces.append(kvlab.capture(lm, ids, new_tokens, policies=policies))

    with bar(console) as progress:
        task = progress.add_task("", total=2 * repeats + 1 + len(policies))

        def timed(what: str, run) -> float:
            progress.update(task, description=what)
            taken = clock.seconds(lm.device, run)
            progress.advance(task)
            return taken

        prefill(lm, ids[:64])
        plain = [timed("plain prefill", lambda: prefill(lm, ids)) for _ in range(repeats)]
        capturing = timed("capture", capture)
        for policy in policies:
            taken = timed(str(policy), lambda policy=policy: kvlab.replay(traces[0], policy).summary)
            rows.append(dict(policy=policy.name, budget=policy.entries(len(ids)), seconds=taken))
        plain += [timed("plain prefill", lambda: prefill(lm, ids)) for _ in range(repeats)]
    return rows, statistics.median(plain), capturing


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of the response.")] = 64,
    budgets: Annotated[list[int], typer.Option(min=1, help="May be given several times.")] = BUDGETS,
    policies: Annotated[str, typer.Option(help="Names between commas, or all.")] = TWELVE,
    model: Annotated[str, typer.Option(help="As for kvlab.load.")] = "smollm2-135m",
    repeats: Annotated[int, typer.Option(min=1, help="Prefills before and as many after the replays.")] = 2,
    out: Annotated[Path | None, typer.Option(help="A CSV file for the time of each replay.")] = None,
) -> None:
    console = Console(highlight=False)
    with in_a_sentence():
        lm, chosen = kvlab.load(model, device="cpu"), possible(policies, budgets, console)
        before = psutil.Process().memory_info().rss
        rows, one, capturing = measure(lm, prompt(lm, tokens), new_tokens, chosen, repeats, console)
        if out:
            write_csv(out, rows)

    table = Table(title=f"{model}, {tokens} + {new_tokens} tokens, {torch.get_num_threads()} threads")
    for name in ("policy", "replays", "median", "longest"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name in dict.fromkeys(row["policy"] for row in rows):
        took = [row["seconds"] for row in rows if row["policy"] == name]
        table.add_row(name, str(len(took)), f"{statistics.median(took):.2f} s", f"{max(took):.2f} s")
    console.print(table)
    n, total = len(rows), sum(row["seconds"] for row in rows)
    console.print(f"one prefill {one:.2f} s, the capture with its response {capturing:.2f} s")
    console.print(f"{n} replays {total:.2f} s, {n} prefills {n * one:.2f} s: ratio {total / n / one:.4f}")
    console.print(f"replays and capture together: ratio {(total + capturing) / n / one:.4f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(f"peak memory {peak / 2**20:,.0f} MiB, {(peak - before) / 2**20:,.0f} MiB above the loaded model")


if __name__ == "__main__":
    run(main, __doc__)
