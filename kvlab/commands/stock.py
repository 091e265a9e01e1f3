"""What there is: pull, list, doctor."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvlab.commands.options import AsJson
from kvlab.errors import KvlabError, nearest

LISTS = ("policies", "storages", "experiments", "claims", "measures", "probes", "models", "packs", "tasks")
app = typer.Typer()


@app.command(epilog="Examples:   kvlab pull   |   kvlab pull sotu   |   kvlab pull all")
def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL|PACK|all]...",
            help="What to fetch (default: everything that the experiments need).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fetch a model or a text pack into the cache (KVLAB_HOME), check it and unpack it, once."""
    from kvlab.inputs import models, packs

    known = [*models.MODELS, *packs.PACKS]
    wanted = known if not names or "all" in names else list(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            raise KvlabError(nearest(name, known, "model or pack"))
    for name in wanted:
        folder = models.pull(name) if name in models.MODELS else packs.pull(name)
        typer.echo(f"{name}: {folder}")


@app.command("list", epilog="Examples:   kvlab list policies   |   kvlab list claims --json")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=", ".join(LISTS))],
    as_json: AsJson = False,
) -> None:
    """List what there is."""
    if what not in LISTS:
        raise KvlabError(nearest(what, LISTS, "list"))
    from kvlab.workbench.listing import entries

    found = entries(what)
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    elif not found:
        typer.echo(f"There are no {what} yet.")
    else:
        _print_list(found)


def _print_list(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for entry in found:
        paper = f"[{entry['where']}] " if "where" in entry else ""
        table.add_row(Text(entry["name"]), Text(paper + entry["summary"]))
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False)


@app.command(epilog="Examples:   kvlab doctor   |   kvlab doctor --json")
def doctor(as_json: AsJson = False) -> None:
    """Check the environment, the model, the texts, the store and the machine; name the mend for what is wrong."""
    from rich.console import Console

    from kvlab.workbench import doctor as checks

    if as_json:
        found = checks.as_json()
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        well = all(one["state"] != checks.BAD for one in found)
    else:
        well = checks.show(Console())
    if not well:
        raise typer.Exit(1)
