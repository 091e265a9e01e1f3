"""The command that learns compilerkv's tables: compile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.commands import options, progress
from kvlab.commands.options import Device, Dtype, Model
from kvlab.lib import extras

if TYPE_CHECKING:
    from kvlab.inputs.corpus import Document

app = typer.Typer()


@app.command(
    "compile",
    epilog="Examples:   kvlab compile --budget 128   |   "
    "kvlab compile --documents sotu/1867,my.txt --budget 64 --contexts 12 --samples 24 "
    "-p 'lengths=[300,600]'   |   "
    "kvlab compile --from smollm2-135m --model ./my-model --out my-tables.json",
)
def compile_(
    model: Model = "smollm2-135m",
    documents: Annotated[
        str,
        typer.Option(
            "--documents",
            help="Texts to learn from: names or files with commas between them (default: speeches, articles, "
            "chats and code).",
        ),
    ] = "",
    budget: Annotated[int, typer.Option("--budget", min=1, help="Entries for each layer and KV head.")] = 128,
    contexts: Annotated[int, typer.Option("--contexts", min=1, help="Number of prompts to learn from.")] = 40,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Random head weights to try in each prompt.")] = 48,
    risk_samples: Annotated[
        int, typer.Option("--risk-samples", min=0, help="Random thresholds to try in each prompt.")
    ] = 24,
    alpha: Annotated[float, typer.Option("--alpha", min=0, help="Weight of the conservative penalty.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts and trials.")] = 0,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="KEY=VALUE",
            help="Set another field of kvlab.compile.Settings (lengths, pool, "
            "continuation, weights, thresholds, penalty, bins, ...); may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The JSON file (default: MODEL-tables.json here).", show_default=False)
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            help="JSONL file of trials, from which a stopped run goes on (default: beside the tables).",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Learn nothing: map the tables of this file or model to the layers of --model.",
            show_default=False,
        ),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Try one head and one threshold at a time, on captured requests to summarise the texts; -p then sets "
            "a field of kvlab.compile.MarginalSettings. With several budgets (-p 'budgets=[64,128]') each gets a file.",
        ),
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Learn compilerkv's tables on calibration texts. The same command continues a run that was stopped."""
    extras.need("pyarrow")
    options.check_out(out)
    from kvlab.inputs import corpus

    # Read before torch is imported, so that an unknown text is refused at once.
    named = options.names(documents)
    texts = corpus.documents(named) if named else None
    from kvlab import compile as compiling
    from kvlab.inputs import models
    from kvlab.methods._base.lookup import DecisionTables

    if alone:
        _learn_per_head(model, texts, budget, contexts, seed, parameters or [], out, log, device, dtype)
        return
    values: dict[str, Any] = dict(
        budget=budget, contexts=contexts, samples=samples, risk_samples=risk_samples, alpha=alpha, seed=seed
    )
    values |= {"pool": max(64, contexts), **options.task_parameters(parameters or [])}
    settings = compiling.Settings(**values)
    known = DecisionTables.load(source) if source else None
    lm = models.load(model, device, dtype)
    path = out or _named(lm.name)
    if known is not None:
        typer.echo(compiling.write(compiling.mapped(known, lm), path))
        return
    with progress.bar("learning") as update:
        learnt = compiling.learn(
            lm,
            settings,
            texts,
            log or path.with_suffix(".jsonl"),
            lambda phase, done, total: update(description=phase, completed=done, total=total),
        )
    for line in learnt.summary():
        typer.echo(line)
    for written in learnt.save(path):
        typer.echo(written)


def _named(model: str) -> Path:
    return Path(re.sub(r"[^\w.-]+", "-", model) + "-tables.json")


def _learn_per_head(
    model: str,
    texts: list[Document] | None,
    budget: int,
    contexts: int,
    seed: int,
    parameters: list[str],
    out: Path | None,
    log: Path | None,
    device: str,
    dtype: str,
) -> None:
    """`kvlab compile --alone`."""
    from kvlab import compile as compiling
    from kvlab.analyses.compilerkv.marginal import prompts
    from kvlab.inputs import corpus, models

    settings = compiling.MarginalSettings(**{"budgets": (budget,), "seed": seed} | options.task_parameters(parameters))
    texts = texts or corpus.documents(compiling.DOCUMENTS)
    lm = models.load(model, device, dtype)
    path = out or _named(lm.name)
    with progress.bar("learning") as update:
        measured = compiling.measure(
            lm,
            settings,
            prompts(lm, texts, settings, contexts),
            log or path.with_suffix(".jsonl"),
            lambda phase, done, total: update(description=phase, completed=done, total=total),
        )
    for entries in settings.budgets:
        tables = compiling.tables(measured, entries)
        heads = [weight for row in tables.heads or [] for weight in row]
        changed = sum(weight != 1 for weight in heads)
        typer.echo(f"{entries} entries: {changed} of {len(heads)} heads weigh other than 1, from {contexts} prompts")
        file = path if len(settings.budgets) == 1 else path.with_name(f"{path.stem}-{entries}{path.suffix}")
        typer.echo(compiling.write(tables, file))
