"""What the library behind a model's products with its weights costs: torch's own choice against oneDNN, in turns.

\b
python benchmarks/products.py
python benchmarks/products.py --model qwen2.5-coder-0.5b --tokens 2048 --repeats 5

CPU time on one thread, so that other processes disturb little: a prompt's prefill, and a decoding step after it. A
ratio below 1.00 is oneDNN's gain. *Differs by* is the largest difference between the two's logits of the last token.
"""

from __future__ import annotations

import copy
import os
import statistics
from typing import Annotated, Any

import torch
import typer
from common import bar, in_a_sentence, prefill, prompt
from rich import box
from rich.console import Console
from rich.table import Table

from kvlab.bench import clock, meters
from kvlab.core import products
from kvlab.inputs import models

LIBRARIES = {"torch": "0", "oneDNN": "1"}


def timed(lm: models.LM, ids: torch.Tensor, steps: int) -> tuple[float, float, torch.Tensor]:
    """Seconds of the prefill and of one step after it, and the prompt's last logits."""
    start = clock.busy(lm.device)
    out: Any = prefill(lm, ids)
    middle = clock.busy(lm.device)
    logits = out.logits[0, -1]
    with torch.inference_mode():
        for _ in range(steps):
            out = lm.model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
    return middle - start, (clock.busy(lm.device) - middle) / steps, logits


def main(
    tokens: Annotated[list[int] | None, typer.Option("--tokens", min=2, help="May be repeated.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1)] = 16,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    model: Annotated[str, typer.Option("--model")] = models.DEFAULT,
) -> None:
    """Time prefills and steps by either library, and print their ratio."""
    lengths, console = tokens or [512, 2048], Console(width=140)
    with in_a_sentence():
        os.environ[products.SWITCH] = LIBRARIES["torch"]
        lm = models.load(model, device="cpu", dtype="float32")
    lms = {"torch": lm, "oneDNN": models.LM(copy.deepcopy(lm.model), lm.tokenizer, lm.name, lm.sha256)}
    os.environ[products.SWITCH] = LIBRARIES["oneDNN"]
    products.hasten(lms["oneDNN"].model)
    grid = Table(title=f"{lm.name}, {meters.device_name(lm.device)}", box=box.MARKDOWN)
    for title in ("tokens", "", "torch", "oneDNN", "oneDNN over torch", "range", "differs by"):
        grid.add_column(title, justify="left" if title == "" else "right")
    with bar(Console(stderr=True)) as progress, clock.one_thread(lm.device):
        task = progress.add_task("runs", total=len(lengths) * (repeats + 1) * len(LIBRARIES))
        for length in lengths:
            ids, found = prompt(lm, length), {name: [] for name in LIBRARIES}
            for turn, name in clock.rounds(list(LIBRARIES), repeats + 1):
                result = timed(lms[name], ids, steps)
                if turn:  # the first meets all shapes anew
                    found[name].append(result)
                progress.advance(task)
            off = (found["torch"][0][2] - found["oneDNN"][0][2]).abs().max()
            for part, what in enumerate(("prefill, s", "a step, ms")):
                ours, theirs = ([result[part] for result in found[name]] for name in ("oneDNN", "torch"))
                ratios = clock.ratios(ours, theirs)
                medians = [statistics.median(each) * (1e3 if part else 1) for each in (theirs, ours)]
                grid.add_row(
                    f"{length:,}" if not part else "",
                    what,
                    *(f"{median:.2f}" for median in medians),
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f}-{max(ratios):.2f}",
                    f"{off:.0e}" if not part else "",
                )
    console.print(grid, highlight=False)


if __name__ == "__main__":
    typer.run(main)
