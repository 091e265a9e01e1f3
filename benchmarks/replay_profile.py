"""Show where the time of a replay goes: torch's operations by purpose, and Python between them.

\b
python benchmarks/replay_profile.py
python benchmarks/replay_profile.py --policies h2o,zsmerge --tokens 2048 --budget 128

The trace is of random token ids. The parts that replays share are made first: the full cache's side, and the scores
that several policies read. Each policy is then replayed once as it is, for its CPU time. It is replayed once more under
torch's profiler, for the shares of operations in the time on the clock. The rest is Python: the policy's own steps,
torch's way from a call to its operation, and the profiler's own work for each operation.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import torch
import typer
from common import bar, in_a_sentence, prompt, run
from rich import box
from rich.console import Console
from rich.table import Table
from step import OTHER, PURPOSES, PYTHON, WEIGHTS, purpose, recorded
from torch.profiler import ProfilerActivity, profile

import kvlab
from kvlab.bench import clock

SHOWN = [name for name in (*PURPOSES, OTHER) if name != WEIGHTS]


def replayed(trace: kvlab.Trace, policy: kvlab.Policy) -> float:
    """CPU seconds of one replay with its means."""
    start = time.process_time()
    kvlab.replay(trace, policy).summary  # noqa: B018 - computed when asked for
    return time.process_time() - start


def profiled(trace: kvlab.Trace, policy: kvlab.Policy) -> tuple[float, Counter[str], int]:
    """CPU seconds of a replay, shares of the operations by purpose, and how many operations there are."""
    replayed(trace, policy)
    whole = replayed(trace, policy)
    inside: Counter[str] = Counter()
    with recorded(), profile(activities=[ProfilerActivity.CPU]) as found:
        taken = clock.seconds(trace.keys.device, lambda: replayed(trace, policy))
    events = found.key_averages()
    for event in events:
        # No model runs here: products of matrices are attention, too.
        kind = purpose(event.key).replace(WEIGHTS, "attention")
        inside[kind] += event.self_cpu_time_total / 1e6 / taken
    return whole, inside, sum(event.count for event in events)


def main(
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of the response.")] = 64,
    policies: Annotated[str, typer.Option(help="Names between commas.")] = "snapkv,h2o,morphkv,zsmerge,quest,rocketkv",
    budget: Annotated[int, typer.Option(min=1, help="Entries for each layer and KV head.")] = 1024,
    model: Annotated[str, typer.Option(help="As for kvlab.load.")] = "smollm2-135m",
) -> None:
    console = Console(width=140, highlight=False)
    with in_a_sentence():
        lm = kvlab.load(model, device="cpu")
        chosen = [kvlab.policy(name, budget=budget) for name in policies.split(",")]
        trace = kvlab.capture(lm, prompt(lm, tokens), new_tokens, policies=chosen)
    with bar(Console(stderr=True)) as progress:
        rows = [profiled(trace, policy) for policy in progress.track(chosen, description="replays")]
    title = f"{lm.name}, {tokens:,} + {new_tokens} tokens, budget {budget:,}, {torch.get_num_threads()} threads"
    grid = Table(title=title, box=box.MARKDOWN)
    grid.add_column("")
    for policy in chosen:
        grid.add_column(policy.name, justify="right")
    grid.add_row("a replay, s of CPU time", *(f"{whole:.2f}" for whole, _, _ in rows))
    for name in SHOWN:
        grid.add_row(f"{name}, %", *(f"{100 * inside[name]:.0f}" for _, inside, _ in rows))
    grid.add_row(f"{PYTHON}, %", *(f"{100 * (1 - inside.total()):.0f}" for _, inside, _ in rows))
    grid.add_row("operations", *(f"{count:,}" for _, _, count in rows))
    console.print(grid)


if __name__ == "__main__":
    run(main, __doc__)
