"""Check kvlab on a GPU: right (as on the CPU), fast (against the full cache), and the laboratory's own costs.

\b
python benchmarks/gpu.py
python benchmarks/gpu.py --only right --model smollm2-135m --model ./qwen2.5-coder-0.5b.gguf
python benchmarks/gpu.py --only fast,lab --shape llama-2-7b --seconds 300 --out results

\b
A small run without a GPU:
python benchmarks/gpu.py --device cpu --shape tiny --model random:tiny-llama-gqa

"right" compares a model in float32 on the device with the same model on the CPU. It covers capture, every policy's
replay and live run, fidelity, attribution and storages. A result is right if measures differ by at most 1e-3. At most
one retained entry in 200 may differ, since rounding decides between equal scores. In bfloat16 differences are shown and
not judged. The benchmark does not download a model that is missing on this machine. It uses a tiny random one instead,
and the tables say so.

"fast" makes models of published shapes with random weights in bfloat16 on the device. Prefill and decoding take turns,
transformers' full cache by sdpa first. "bound" is the time to read the weights and a step's part of the cache, at the
bandwidth measured here. Peak memory is above the loaded model. "lab" compares capture, replays and attribution with the
plain prefill.

Each part has a time limit, which its items share. Results are lines of JSON in results.jsonl, written as they come. The
next call with the same --out runs the missing ones. The tables are also in summary.md. The exit status is 1 if
something failed or was not right.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import gpu_fast
import gpu_right
import torch
import typer
from common import in_a_sentence, run, some_of
from gpu_journal import Journal, clocks, run_part, tables, versions
from rich.console import Console

from kvlab.bench import meters
from kvlab.lib import devices
from kvlab.lib.files import replacing

LIMITS = {"right": 120.0, "fast": 240.0, "lab": 120.0}
"""Seconds."""


def main(
    device: Annotated[str, typer.Option(help="A GPU's name, cpu, or auto.")] = "auto",
    shape: Annotated[str, typer.Option(help=f"Of fast and lab: {', '.join(gpu_fast.SIZES)}.")] = "llama-3.1-8b",
    out: Annotated[Path, typer.Option(help="A folder for the results, gone on from.")] = Path("gpu-results"),
    only: Annotated[str, typer.Option(help="Some of these, between commas.")] = ",".join(LIMITS),
    model: Annotated[
        list[str], typer.Option(help="Of right: a model's name or a .gguf file; may be given several times.")
    ] = ["smollm2-135m"],  # noqa: B006
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Time limit of each part.", show_default="120, 240 and 120")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run what failed again, too.")] = False,
) -> None:
    console = Console(highlight=False, width=200)
    with in_a_sentence():
        parts, given, place = some_of(",".join(LIMITS), only), gpu_fast.size(shape), devices.resolved(device)
        right = [item for name in model for item in gpu_right.items(name, place)] if "right" in parts else []
        out.mkdir(parents=True, exist_ok=True)
        name = meters.device_name(place)
        journal, random = Journal(out / "results.jsonl", name, retry), gpu_fast.Model(place)
        items = {"right": right, "fast": gpu_fast.fast(random, given), "lab": gpu_fast.lab(random, given)}
        missing = []
        for part in parts:
            missing += run_part(journal, items[part], seconds or LIMITS[part], place, console.print)
        good = show(journal, parts, missing, name, place, out / "summary.md", console)
    if not good:
        raise typer.Exit(1)


def show(
    journal: Journal,
    parts: list[str],
    missing: list[str],
    name: str,
    device: torch.device,
    path: Path,
    console: Console,
) -> bool:
    """Print the tables and write them to a file; whether nothing failed and all that was judged is right."""
    found = clocks() if device.type == "cuda" else None
    known = ", ".join(f"{library} {version}" for library, version in versions().items())
    lines = [f"{name}; {known}" + (f"; clocks {found}" if found else "")]
    records = [record for record in journal.records.values() if record["part"] in parts]
    judged = [row["right"] for record in records for row in record["rows"] if "right" in row]
    failed = [record for record in records if "error" in record]
    lines.append(f"{len(records)} items, {len(failed)} failed; {sum(judged)} of {len(judged)} comparisons are right.")
    if missing:
        lines.append(f"Not run for want of time (the same command goes on): {'; '.join(missing)}.")
    shown = Console(highlight=False, width=240, record=True, file=io.StringIO())
    for part in parts:
        for table in tables(journal, part):
            shown.print(table)
    text = "\n\n".join(lines) + "\n\n" + shown.export_text()
    console.out(text, highlight=False)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return not failed and all(judged)


if __name__ == "__main__":
    run(main, __doc__)
