"""Time an attribution against the plain prefill: the integral alone, and all of it; measure their peak memory.

\b
python benchmarks/attribute.py
python benchmarks/attribute.py --tokens 1024 --new-tokens 32 --policy h2o --repeats 3 --out attribute.csv

The prompt is random token ids. "effects" is the integral alone: forward and backward passes of the response at 8 points
between the policy and the full cache. "attribute" is `kvlab.attribute`: prefill, response, policy and effects. The runs
take turns. Each ratio is the median over rounds of the ratio within one round. Peak memory is measured in a fresh
process for each, above the loaded model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import bar, in_a_sentence, prefill, prompt, run, time_columns, write_csv
from rich import box
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab.attribution.attribute import POINTS, integrated_effects, run_policy
from kvlab.attribution.attribute import prefill as prefill_with_response
from kvlab.bench import clock, memory

PLAIN, EFFECTS, ALL, MIB = "plain prefill", "effects", "attribute", 2**20
LENGTHS = [4096]


def runs_of(lm: kvlab.LM, policy: kvlab.Policy, ids: torch.Tensor, new_tokens: int) -> dict:
    made, prefilled = prefill_with_response(lm, [policy], ids, None, new_tokens)
    made, reads = run_policy(policy, made, prefilled)
    return {
        PLAIN: lambda: prefill(lm, ids),
        EFFECTS: lambda: integrated_effects(made, reads, POINTS),
        ALL: lambda: kvlab.attribute(lm, policy, ids, new_tokens, progress=False),
    }


def main(
    tokens: Annotated[
        list[int], typer.Option(min=64, help="Length of a prompt; may be given several times.")
    ] = LENGTHS,
    new_tokens: Annotated[int, typer.Option(min=2, help="Length of the response.")] = 64,
    policy: Annotated[str, typer.Option(help="A policy that evicts or selects.")] = "snapkv",
    budget: Annotated[int, typer.Option(min=1, help="Entries for each layer and KV head.")] = 256,
    model: Annotated[str, typer.Option(help="As for kvlab.load.")] = "smollm2-135m",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 3,
    out: Annotated[Path | None, typer.Option(help="A CSV file for the figures.")] = None,
    peak_of: Annotated[str | None, typer.Option("--peak-of", hidden=True)] = None,
) -> None:
    tested = kvlab.policy(policy, budget=budget)
    if peak_of:
        lm = kvlab.load(model, device="cpu")
        chosen = runs_of(lm, tested, prompt(lm, tokens[0]), new_tokens)
        with memory.Peak(lm.device) as peak:
            chosen[peak_of]()
        print(json.dumps({"bytes": peak.bytes}))
        return
    console, rows = Console(highlight=False), []
    with in_a_sentence(), bar(console) as progress:
        lm = kvlab.load(model, device="cpu")
        task = progress.add_task("measuring", total=len(tokens) * 3 * (repeats + 1))
        for length in tokens:
            chosen = runs_of(lm, tested, prompt(lm, length), new_tokens)
            times: dict[str, list[float]] = {name: [] for name in chosen}
            for _, name in clock.rounds(list(chosen), repeats):
                progress.update(task, description=f"{name}, {length} tokens")
                times[name].append(clock.seconds(lm.device, chosen[name]))
                progress.advance(task)
            for name in chosen:
                order = [__file__, "--model", model, "--tokens", str(length), "--new-tokens", str(new_tokens)]
                order += ["--policy", policy, "--budget", str(budget), "--peak-of", name]
                found = json.loads(memory.in_fresh_process(order, f"{name!r} at {length} tokens"))
                progress.advance(task)
                rows.append(
                    dict(
                        tokens=length,
                        what=name,
                        **time_columns(times[name], times[PLAIN]),
                        peak_mib=found["bytes"] / MIB,
                    )
                )
    title = f"{model}, {tested}, {new_tokens} tokens, {torch.get_num_threads()} threads, median of {repeats}"
    table = Table(title=title, caption="peak: MiB above the loaded model", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("tokens", "what", "time", "x plain", "range", "peak"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for row in rows:
        times_shown = (
            f"{row['seconds']:.2f} s",
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
        )
        table.add_row(str(row["tokens"]), row["what"], *times_shown, f"{row['peak_mib']:.0f}")
    console.print(table)
    if out is not None:
        write_csv(out, rows)


if __name__ == "__main__":
    run(main, __doc__)
