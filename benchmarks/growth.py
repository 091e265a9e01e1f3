"""Measure how time and memory of capture, replay and live runs grow with the length of the prompt.

\b
python benchmarks/growth.py
python benchmarks/growth.py --model qwen2.5-coder-0.5b --tokens 1024 --tokens 32768 --parts capture,replay --out a.csv

The prompt is random token ids. Each part at each length is one run in a process of its own:

\b
* prefill: the prompt through the model and transformers' own cache, in one piece
* capture: `kvlab.capture` into a file; 16 tokens follow the prompt
* replay: six policies at two budgets on that file, in a process without the model
* live: the prompt in the capture's chunks, and 16 tokens by `generate` with snapkv at a budget of 512

Each part runs twice, once for its time and once for its memory. An allocator that returns all freed memory takes up to
twice the time. Memory is the peak resident memory, pages of the mapped trace included. One number is of the whole
process. The other is above the memory before the run, when the model has been loaded and used once. Results that are
already in --out are not measured again. Exponents are the slopes of straight lines through the logarithms. CPU time is
of the process alone, over all its threads, whatever else the machine does.
"""

from __future__ import annotations

import csv
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import psutil
import torch
import typer
from common import bar, in_a_sentence, prefill, prompt, run, some_of, write_csv
from rich import box
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab.bench import clock, memory
from kvlab.traces.passes import chunk_for

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
PARTS = "prefill,capture,replay,live"
POLICIES = ["streamingllm", "snapkv", "dapq", "morphkv", "quest", "rocketkv"]
BUDGETS = [128, 512]
NEW_TOKENS, BUDGET, MIB = 16, 512, 2**20
FOLLOW = 32  # tokens that may come after a prompt: DapQ's pseudo-tokens are more than the response


def captured(lm: kvlab.LM, ids: torch.Tensor, path: Path) -> None:
    kvlab.capture(lm, ids, NEW_TOKENS, into=path)


def replayed(path: Path) -> None:
    kvlab.replay(path, POLICIES, BUDGETS).summary  # noqa: B018 - computed when asked for


def lived(lm: kvlab.LM, ids: torch.Tensor) -> None:
    chunk = chunk_for(lm.model, len(ids))
    asked = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    with kvlab.compress(lm.model, kvlab.policy("snapkv", budget=BUDGET)), torch.inference_mode():
        cast(Any, lm.model).generate(ids[None], prefill_chunk_size=None if chunk == len(ids) else chunk, **asked)


def measured(part: str, model: str, dtype: str, tokens: int, path: Path) -> dict:
    """In this process: seconds, and bytes at the highest."""
    if part == "replay":
        small = path.with_name("small")
        if not small.exists():
            raise kvlab.KvlabError("replays are of a trace: ask for capture, too")
        replayed(small)  # what is set up once is not the trace's

        def once() -> None:
            replayed(path)
    else:
        lm = kvlab.load(model, device="cpu", dtype=dtype)
        ids = prompt(lm, tokens)
        runs = {
            "prefill": lambda some: prefill(lm, some),
            "capture": lambda some: captured(lm, some, path if some is ids else path.with_name("small")),
            "live": lambda some: lived(lm, some),
        }
        runs[part](ids[:600])

        def once() -> None:
            runs[part](ids)

    memory.tidy()
    before = psutil.Process().memory_info().rss
    device, busy = torch.device("cpu"), time.process_time()
    with memory.Peak(device) as peak:
        seconds = clock.seconds(device, once)
    busy = time.process_time() - busy
    return {
        "seconds": seconds,
        "cpu_seconds": busy,
        "above_mib": peak.bytes / MIB,
        "peak_mib": (before + peak.bytes) / MIB,
    }


def named(model: str, dtype: str) -> str:
    """Name a model with its type, for rows and tables."""
    return model if dtype == "auto" else f"{model} in {dtype}"


def measure(model: str, dtype: str, tokens: int, part: str, folder: Path) -> dict:
    order = [__file__, "--model", model, "--dtype", dtype, "--tokens", str(tokens), "--parts", part]
    order += ["--one", str(folder / "long")]
    row: dict = {"model": named(model, dtype), "tokens": tokens, "part": part}
    label = f"{part} at {tokens} tokens"
    timed, tight = (json.loads(memory.in_fresh_process(order, label, each)) for each in ({}, memory.TIGHT))
    row |= {name: (timed if name.endswith("seconds") else tight)[name] for name in timed}
    if part == "capture":
        row["trace_mib"] = (folder / "long").stat().st_size / MIB
    return row


def exponent(rows: list[dict], column: str) -> float:
    """b of a x tokens^b, by least squares of the logarithms; nan of fewer than two lengths."""
    if len({row["tokens"] for row in rows}) < 2:
        return math.nan
    sizes, values = ([math.log(row[name]) for row in rows] for name in ("tokens", column))
    return float(np.polyfit(sizes, values, 1)[0])


def kept(path: Path | None) -> list[dict]:
    """The rows of an earlier run."""
    if path is None or not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        texts = ("model", "part")
        return [
            {name: text if name in texts else float(text) for name, text in row.items() if text}
            | {"tokens": int(row["tokens"])}
            for row in csv.DictReader(file)
        ]


def cost(tokens: int, part: str) -> float:
    """Roughly, for the time that is left."""
    return tokens * (0.3 if part == "replay" else 1 + tokens / 8192)


def show(rows: list[dict], model: str, console: Console) -> None:
    columns = {
        "seconds": "time",
        "cpu_seconds": "CPU time",
        "above_mib": "above",
        "peak_mib": "whole process",
        "trace_mib": "trace",
    }
    table = Table(title=f"{model}, {torch.get_num_threads()} threads; memory in MiB", box=box.SIMPLE_HEAD)
    for name in ("part", "tokens", *columns.values()):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    for part in dict.fromkeys(row["part"] for row in rows):
        own = sorted((row for row in rows if row["part"] == part), key=lambda row: row["tokens"])
        for row in own:
            known = [name for name in columns if name in row]
            shown = (f"{row[name]:.1f} s" if "seconds" in name else f"{row[name]:,.0f}" for name in known)
            table.add_row(part, f"{row['tokens']:,}", *shown)
        table.add_row("", "exponent", *(f"{exponent(own, name):.2f}" for name in [*columns][:3]))
    console.print(table)


def main(
    model: Annotated[str, typer.Option(help="As for kvlab.load.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="Of the model, and so of its trace: auto, float32, bfloat16.")] = "auto",
    tokens: Annotated[
        list[int], typer.Option(min=600, help="Length of a prompt; may be given several times.")
    ] = LENGTHS,
    parts: Annotated[str, typer.Option(help="Some of these, between commas.")] = PARTS,
    out: Annotated[Path | None, typer.Option(help="A CSV file, which grows with each run and is gone on from.")] = None,
    one: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    if one:
        print(json.dumps(measured(parts, model, dtype, tokens[0], one)))
        return
    console = Console(highlight=False)
    with in_a_sentence():
        rows, wanted = kept(out), some_of(PARTS, parts)
        longest = kvlab.load(model, device="cpu").context_length - FOLLOW
        # The longest prompt leaves room for what follows.
        lengths = sorted({min(length, longest) for length in tokens})
        jobs = [(length, part) for length in lengths for part in wanted]
        label = named(model, dtype)
        known = {(row["model"], row["tokens"], row["part"]) for row in rows}
        todo = [job for job in jobs if (label, *job) not in known]
        # A replay's trace is gone with the run that captured it.
        needed = {length for length, part in todo if part == "replay"}
        todo = [job for job in jobs if job in todo or (job[1] == "capture" and job[0] in needed)]
        with bar(console) as progress, tempfile.TemporaryDirectory() as folder:
            task = progress.add_task("", total=sum(cost(*job) for job in todo))
            for length, part in todo:
                progress.update(task, description=f"{part} of {length} tokens")
                row = measure(model, dtype, length, part, Path(folder))
                rows = [each for each in rows if (each["model"], each["tokens"], each["part"]) != (label, length, part)]
                rows.append(row)
                if out:
                    write_csv(out, rows)
                progress.advance(task, cost(length, part))
        show([row for row in rows if row["model"] == label and row["part"] in wanted], label, console)


if __name__ == "__main__":
    run(main, __doc__)
