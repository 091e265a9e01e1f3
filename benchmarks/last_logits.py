"""Time the logits of a text's last token in bfloat16: by torch, and where kvlab folds the texts into a matrix.

\b
python benchmarks/last_logits.py
python benchmarks/last_logits.py --model smollm2-135m --tokens 200

Only the model's output layer runs, on the last of --tokens random hidden states. The two take turns. Times are CPU time
on one thread.
"""

from __future__ import annotations

import statistics
from typing import Annotated, cast

import torch
import typer
from common import in_a_sentence, run
from rich import box
from rich.console import Console
from rich.table import Table

from kvlab.bench import clock, meters
from kvlab.core import onednn
from kvlab.inputs import models


def timed(head: torch.nn.Module, hidden: torch.Tensor) -> float:
    start = clock.busy(hidden.device)
    head(hidden[:, -1:])
    return 1000 * (clock.busy(hidden.device) - start)


def main(
    model: Annotated[str, typer.Option("--model")] = "qwen2.5-coder-0.5b",
    tokens: Annotated[int, typer.Option("--tokens", min=2)] = 40,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 5,
) -> None:
    """Time the output layer on the last of some tokens, and print the ratio."""
    with in_a_sentence():
        lm = models.load(model, device="cpu", dtype="bfloat16")
    weight = cast(torch.nn.Linear, lm.model.get_output_embeddings()).weight
    heads = {name: torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta") for name in ("torch", "folded")}
    for head in heads.values():
        head.weight = weight
    onednn.fold_rows(heads["folded"])
    grid = Table(title=f"{lm.name}, {meters.device_name(lm.device)}, bfloat16", box=box.MARKDOWN)
    for title in ("texts", "torch, ms", "folded, ms", "folded over torch", "range"):
        grid.add_column(title, justify="right")
    with clock.one_thread(lm.device), torch.inference_mode():
        for texts in (1, 2):
            hidden = torch.randn(texts, tokens, weight.shape[1], dtype=weight.dtype)
            found: dict[str, list[float]] = {name: [] for name in heads}
            for turn, name in clock.rounds(list(heads), repeats + 1):
                took = timed(heads[name], hidden)
                if turn:  # the first meets the shape anew
                    found[name].append(took)
            ratios = clock.ratios(found["folded"], found["torch"])
            both = (f"{statistics.median(times):.1f}" for times in found.values())
            grid.add_row(str(texts), *both, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}")
    Console(width=140).print(grid, highlight=False)


if __name__ == "__main__":
    run(main, __doc__)
