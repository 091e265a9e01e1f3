"""How long a slider of `kvlab.explore` takes on a trace of 2,000 tokens.

\b
python benchmarks/explore.py
python benchmarks/explore.py --tokens 4000 --left rocketkv --right zsmerge

Each setting is moved through some values; what is timed is the whole answer: the replay (made ahead), the picture and
the widget. The browser's own drawing comes on top, of what is sent: only those parts of the picture that changed.
"""

from __future__ import annotations

import statistics
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab.analyses.texts import common_traces
from kvlab.bench import clock


def main(
    tokens: Annotated[int, typer.Option(min=100, help="Length of the prompt.")] = 2000,
    left: Annotated[str, typer.Option(help="One policy.")] = "snapkv",
    right: Annotated[str, typer.Option(help="The other.")] = "dapq",
) -> None:
    lm = kvlab.load("smollm2-135m")
    trace = common_traces(lm, ["sotu/1962"], tokens)[0]
    explorer = kvlab.explore(trace, left, right, lm=lm)
    _ = explorer.panel
    ahead = clock.seconds(lm.device, lambda: [replay.result() for replay in explorer.look_ahead()])
    values = {
        "budget": explorer.budgets,
        "layer": range(0, trace.n_layers, 3),
        "head": range(trace.heads),
        "step": range(1, trace.steps + 1, 3),
    }
    table = Table("slider", "median", "slowest", "goal", "sent", title=f"{trace}")
    sent = []
    for part in explorer._parts.values():
        part.observe(lambda change: sent.append(len(change["new"].encode())), names="value")
    for name, moves in values.items():
        taken = []
        sent.clear()
        for value in moves:
            start = clock.wall(lm.device)
            explorer.show(**{name: value})
            taken.append(1000 * (clock.wall(lm.device) - start))
        table.add_row(
            name,
            f"{statistics.median(taken):.0f} ms",
            f"{max(taken):.0f} ms",
            "100 ms",
            f"{sum(sent) / len(taken) / 1000:.0f} kB",
        )
    console = Console()
    console.print(table)
    console.print(
        f"replays of the other budgets, made in the background: {ahead:.1f} s; "
        f"the picture as it is saved: {len(explorer.html().encode()) / 1000:.0f} kB"
    )
    explorer.close()


if __name__ == "__main__":
    typer.run(main)
