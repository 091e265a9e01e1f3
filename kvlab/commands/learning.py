"""The command that learns compilerkv's weights of heads: compile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.commands import options, progress
from kvlab.commands.options import Device, Dtype, Model
from kvlab.errors import KvlabError

app = typer.Typer()


ENDED = "pool samples risk_samples continuation thresholds neutral alpha penalty bins entropy perplexity support"
"""Settings of joint trials and of thresholds, which are learnt no longer; `--contexts` counts prompts still."""


@app.command(
    "compile",
    epilog="Examples:   kvlab compile --budget 128   |   "
    "kvlab compile --documents sotu/1867,my.txt --contexts 12 -p 'budgets=[64,128]' -p 'lengths=[600]'   |   "
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
    samples: Annotated[str | None, typer.Option("--samples", hidden=True)] = None,
    risk_samples: Annotated[str | None, typer.Option("--risk-samples", hidden=True)] = None,
    alpha: Annotated[str | None, typer.Option("--alpha", hidden=True)] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the places of prompts in their texts.")] = 0,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="KEY=VALUE",
            help="Set a field of kvlab.compile.MarginalSettings (budgets, lengths, new_tokens, weights, ...); may be "
            "repeated. With several budgets (-p 'budgets=[64,128]') each gets a file.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The JSON file (default: MODEL-tables.json here).", show_default=False)
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            help="JSONL file of trials, from which a stopped run goes on (default: in the folder of --out).",
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
    alone: Annotated[bool, typer.Option("--alone", hidden=True)] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Learn compilerkv's weights of heads, one head at a time, on captured requests to summarise texts.

    The same command continues a run that was stopped.
    """
    given = {"samples": samples, "risk_samples": risk_samples, "alpha": alpha}
    chosen: dict[str, Any] = options.task_parameters(parameters or [])
    for name in (*(name for name, value in given.items() if value is not None), *chosen):
        if name in ENDED.split():
            raise KvlabError(
                f"leave out {name}: `kvlab compile` no longer learns thresholds or several heads at once, but the "
                "weight of one head at a time"
            )
    options.check_out(out)
    from kvlab.inputs import corpus

    # Read before torch is imported, so that an unknown text is refused at once.
    named = options.names(documents)
    texts = corpus.documents(named) if named else None
    from kvlab import compile as compiling
    from kvlab.analyses.compilerkv.marginal import prompts
    from kvlab.inputs import models
    from kvlab.methods._base.lookup import DecisionTables

    settings = compiling.MarginalSettings(**{"budgets": (budget,), "seed": seed} | chosen)
    known = DecisionTables.load(source) if source else None
    lm = models.load(model, device, dtype)
    path = out or _named(lm.name)
    if known is not None:
        typer.echo(compiling.write(compiling.mapped(known, lm), path))
        return
    texts = texts or corpus.documents(compiling.DOCUMENTS)
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


def _named(model: str) -> Path:
    return Path(re.sub(r"[^\w.-]+", "-", model) + "-tables.json")
