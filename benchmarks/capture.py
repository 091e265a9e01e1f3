"""Measure time and memory of a capture, against the plain prefill and `output_attentions=True`.

\b
python benchmarks/capture.py
python benchmarks/capture.py --tokens 1024 --tokens 2048 --repeats 5 --out capture.csv
python benchmarks/capture.py --model random:llama-3.1-8b --memory-limit 20

The prompt is random token ids, and nothing is generated. "capture" is `kvlab.capture` as it is, the pseudo-queries of
DapQ included (--no-pseudo leaves them out). The runs take turns, in alternating order. Each ratio is the median over
rounds of the ratio within one round, so that a drifting clock speed cancels. Peak memory is measured in a fresh process
for each, above the loaded model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from common import bar, in_a_sentence, prefill, prompt, run, time_columns, write_csv
from rich import box
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab.bench import clock, memory

PLAIN, EAGER, MIB = "plain prefill", "output_attentions", 2**20
LENGTHS = [1024, 2048, 4096]


def methods(pseudo: bool) -> dict:
    asking = ("dapq",) if pseudo else ()
    return {
        PLAIN: prefill,
        "capture": lambda lm, ids: kvlab.capture(lm, ids, 0, pseudo=asking),
        "with accumulate": lambda lm, ids: kvlab.capture(lm, ids, 0, accumulate=True, pseudo=asking),
        EAGER: lambda lm, ids: prefill(lm, ids, "eager", output_attentions=True),
    }


def peak_of(method: str, model: str, tokens: int, pseudo: bool) -> dict:
    """In this process: bytes above the loaded model, and those of the trace."""
    lm, run = kvlab.load(model, device="cpu"), methods(pseudo)[method]
    run(lm, prompt(lm, 32))  # what is set up once is not the prompt's
    with memory.Peak(lm.device) as peak:
        result = run(lm, prompt(lm, tokens))
    return {"bytes": peak.bytes, "trace": getattr(result, "nbytes", None)}


def in_fresh_process(method: str, model: str, tokens: int, pseudo: bool) -> dict:
    order = [__file__, "--model", model, "--tokens", str(tokens), "--peak-of", method]
    order += [] if pseudo else ["--no-pseudo"]
    return json.loads(memory.in_fresh_process(order, f"{method!r} at {tokens} tokens"))


def measure(model: str, lengths: list[int], repeats: int, limit: float, pseudo: bool, console: Console) -> list[dict]:
    """One row for each length and method; `limit` is in bytes."""
    lm, rows = kvlab.load(model, device="cpu"), []
    heads = lm.model.config.get_text_config(decoder=True).num_attention_heads
    needs = {n: lm.n_layers * heads * n * n * torch.finfo(lm.dtype).bits // 8 for n in lengths}
    chosen = {n: {k: run for k, run in methods(pseudo).items() if k != EAGER or needs[n] <= limit} for n in lengths}
    with bar(console) as progress:
        task = progress.add_task("measuring", total=sum((repeats + 1) * len(some) for some in chosen.values()))
        for tokens, runs in chosen.items():
            ids, times = prompt(lm, tokens), {method: [] for method in runs}
            for run in runs.values():
                run(lm, ids[:64])
            for _, method in clock.rounds(list(runs), repeats):
                progress.update(task, description=f"{method}, {tokens} tokens")
                times[method].append(clock.seconds(lm.device, runs[method], lm, ids))
                progress.advance(task)
            for method in runs:
                progress.update(task, description=f"memory of {method}, {tokens} tokens")
                found = in_fresh_process(method, model, tokens, pseudo)
                progress.advance(task)
                row = dict(
                    tokens=tokens,
                    method=method,
                    **time_columns(times[method], times[PLAIN]),
                    peak_mib=found["bytes"] / MIB,
                )
                rows.append(row)
                if found["trace"]:
                    plain = next(r["peak_mib"] for r in rows if (r["tokens"], r["method"]) == (tokens, PLAIN))
                    row["trace_mib"] = found["trace"] / MIB
                    row["extra_per_trace"] = (row["peak_mib"] - plain) / row["trace_mib"]
            if EAGER not in runs:
                rows.append(dict(tokens=tokens, method=EAGER, needs_gib=needs[tokens] / 2**30))
    return rows


def show(rows: list[dict], title: str) -> Table:
    caption = "peak: MiB above the loaded model; extra: (peak - that of the plain prefill) / size of the trace"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("tokens", "method", "time", "x plain", "range", "peak", "trace", "extra"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        if "needs_gib" in row:
            continue
        trace = [f"{row['trace_mib']:.0f}", f"{row['extra_per_trace']:.2f}"] if "trace_mib" in row else []
        table.add_row(
            str(row["tokens"]),
            row["method"],
            f"{row['seconds']:.2f} s",
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
            f"{row['peak_mib']:.0f}",
            *trace,
        )
    return table


def main(
    tokens: Annotated[list[int], typer.Option(min=1, help="Length of a prompt; may be given several times.")] = LENGTHS,
    model: Annotated[str, typer.Option(help="As for kvlab.load.")] = "smollm2-135m",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 5,
    memory_limit: Annotated[
        float,
        typer.Option(help="GiB that output_attentions=True may take.", show_default="half of the machine's memory"),
    ] = psutil.virtual_memory().total / 2**31,
    pseudo: Annotated[bool, typer.Option(help="Record DapQ's pseudo-queries, as capture does by default.")] = True,
    out: Annotated[Path | None, typer.Option(help="A CSV file for the figures.")] = None,
    method: Annotated[str | None, typer.Option("--peak-of", hidden=True)] = None,
) -> None:
    if method:
        print(json.dumps(peak_of(method, model, tokens[0], pseudo)))
        return
    console = Console(highlight=False)
    with in_a_sentence():
        rows = measure(model, tokens, repeats, memory_limit * 2**30, pseudo, console)
        console.print(show(rows, f"{model}, {torch.get_num_threads()} threads, median of {repeats}"))
        for row in rows:
            if "needs_gib" in row:
                console.print(f"{row['method']} at {row['tokens']} tokens: not run (needs {row['needs_gib']:.1f} GiB)")
        if out:
            write_csv(out, rows)


if __name__ == "__main__":
    run(main, __doc__)
