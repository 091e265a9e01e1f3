"""Time a model's products with its weights by two libraries, in turns: torch's own choice, and oneDNN.

\b
python benchmarks/products.py
python benchmarks/products.py --model qwen2.5-coder-0.5b --tokens 2048 --repeats 5

Times are CPU time on one thread, so that other processes disturb little. A prompt's prefill is timed by transformers
alone and inside `kvlab.compress`, whose attention multiplies by the same library. A decoding step of transformers after
it is timed, too. A ratio below 1.00 is oneDNN's gain. *Differs by* is the largest difference between the last token's
logits of the two.
"""

from __future__ import annotations

import copy
import itertools
import os
import statistics
from typing import Annotated, Any

import torch
import typer
from common import bar, in_a_sentence, prefill, prompt
from rich import box
from rich.console import Console
from rich.table import Table

from kvlab import methods
from kvlab.bench import clock, meters, timing
from kvlab.core import onednn
from kvlab.inputs import models

LIBRARIES = {"torch": "0", "oneDNN": "1"}
WHOLE = timing.Contender(methods.policy("full"))
SHOWN = {"prefill, s": 1, "prefill in kvlab, s": 1, "a step, ms": 1000}


def timed(name: str, lm: models.LM, ids: torch.Tensor, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Seconds of both prefills and of one step, and both prompts' last logits."""
    os.environ[onednn.SWITCH] = LIBRARIES[name]  # attention asks at each of its calls
    times, logits = [clock.busy(lm.device)], []
    with WHOLE.session(lm):
        logits.append(lm.model(ids[None], use_cache=True, logits_to_keep=1).logits[0, -1])
    times.append(clock.busy(lm.device))
    out: Any = prefill(lm, ids)
    times.append(clock.busy(lm.device))
    logits.append(out.logits[0, -1])
    for _ in range(steps):
        out = lm.model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
    times.append(clock.busy(lm.device))
    inside, alone, step = (after - before for before, after in itertools.pairwise(times))
    return [alone, inside, step / steps], logits


def main(
    tokens: Annotated[list[int] | None, typer.Option("--tokens", min=2, help="May be repeated.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1)] = 16,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    model: Annotated[str, typer.Option("--model")] = models.DEFAULT,
) -> None:
    """Time prefills and steps by either library, and print their ratio."""
    lengths, console = tokens or [512, 2048], Console(width=140)
    with in_a_sentence():
        os.environ[onednn.SWITCH] = LIBRARIES["torch"]
        lm = models.load(model, device="cpu", dtype="float32")
    lms = {"torch": lm, "oneDNN": models.LM(copy.deepcopy(lm.model), lm.tokenizer, lm.name, lm.sha256)}
    os.environ[onednn.SWITCH] = LIBRARIES["oneDNN"]
    onednn.use_onednn(lms["oneDNN"].model)
    grid = Table(title=f"{lm.name}, {meters.device_name(lm.device)}", box=box.MARKDOWN)
    for title in ("tokens", "", "torch", "oneDNN", "oneDNN over torch", "range", "differs by"):
        grid.add_column(title, justify="left" if title == "" else "right")
    with bar(Console(stderr=True)) as progress, clock.one_thread(lm.device), torch.inference_mode():
        task = progress.add_task("runs", total=len(lengths) * (repeats + 1) * len(LIBRARIES))
        for length in lengths:
            ids, found = prompt(lm, length), {name: [] for name in LIBRARIES}
            for turn, name in clock.rounds(list(LIBRARIES), repeats + 1):
                result = timed(name, lms[name], ids, steps)
                if turn:  # the first meets all shapes anew
                    found[name].append(result)
                progress.advance(task)
            for part, (what, factor) in enumerate(SHOWN.items()):
                ours, theirs = ([times[part] for times, _ in found[name]] for name in ("oneDNN", "torch"))
                ratios = clock.ratios(ours, theirs)
                both = [logits[part] for logits in (found[name][0][1] for name in LIBRARIES) if part < len(logits)]
                grid.add_row(
                    "" if part else f"{length:,}",
                    what,
                    *(f"{factor * statistics.median(each):.2f}" for each in (theirs, ours)),
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f}-{max(ratios):.2f}",
                    f"{(both[0] - both[1]).abs().max():.0e}" if both else "",
                )
    console.print(grid, highlight=False)


if __name__ == "__main__":
    typer.run(main)
