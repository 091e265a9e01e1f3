"""What the benchmarks share: a prompt, the plain prefill, the time of one call, and CSV files."""

from __future__ import annotations

import csv
import gc
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from transformers import DynamicCache

from kvlab.lib.files import replacing


def prompt(lm, tokens: int) -> torch.Tensor:
    vocabulary = lm.model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).to(lm.device)


def prefill(lm, ids, attention: str = "sdpa", **more):
    """The prompt through the model and transformers' own cache."""
    lm.model.set_attn_implementation(attention)
    try:
        with torch.inference_mode():
            return lm.model(ids[None], past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1, **more)
    finally:
        lm.model.set_attn_implementation("sdpa")


def seconds(run, *arguments) -> float:
    gc.collect()
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def bar(console: Console) -> Progress:
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


def write_csv(path: Path, rows: list[dict]) -> None:
    with replacing(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
