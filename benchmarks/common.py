"""Helpers of the benchmarks that `kvlab.bench` lacks: a prompt, the plain prefill, a bar, and CSV files."""

from __future__ import annotations

import contextlib
import csv
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from transformers import DynamicCache
from transformers.utils.generic import ModelOutput

from kvlab.bench import clock
from kvlab.errors import KvlabError
from kvlab.inputs.models import LM
from kvlab.lib import environment
from kvlab.lib.files import replacing

environment.configure()


def prompt(lm: LM, tokens: int) -> torch.Tensor:
    """Random token ids `[tokens]`, the same in every run."""
    vocabulary = lm.model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).to(lm.device)


def prefill(lm: LM, ids: torch.Tensor, attention: str = "sdpa", **more: Any) -> ModelOutput:
    """The prompt through the model and transformers' own cache."""
    lm.model.set_attn_implementation(attention)
    try:
        with torch.inference_mode():
            return lm.model(ids[None], past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1, **more)
    finally:
        lm.model.set_attn_implementation("sdpa")


def time_columns(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Columns of a table: the median of the times, and that of their ratios to the reference's, with its range."""
    ratios = clock.ratios(times, reference)
    return {
        "seconds": statistics.median(times),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def bar(console: Console) -> Progress:
    columns = *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


def write_csv(path: Path, rows: list[dict]) -> None:
    with replacing(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


@contextlib.contextmanager
def in_a_sentence() -> Iterator[None]:
    """End with one sentence and exit status 1 where something cannot be."""
    try:
        yield
    except (KvlabError, OSError) as error:
        typer.echo(f"benchmark: {error}", err=True)
        raise typer.Exit(1) from None


def some_of(known: str, parts: str) -> list[str]:
    """Which of the `known` parts of a benchmark are asked for, in their own order; both are names between commas.

    Raises:
        KvlabError: one of them is not known.
    """
    asked, all_of_them = set(parts.split(",")), known.split(",")
    if not asked <= set(all_of_them):
        raise KvlabError(f"parts are some of {known}, and not {parts!r}")
    return [part for part in all_of_them if part in asked]


def run(main: Callable[..., None], about: str | None) -> None:
    """Run a benchmark's function as a command; `about` is its help."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command(help=about)(main)
    app()
