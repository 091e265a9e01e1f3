"""Workspaces: new, add."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command(epilog="Examples:   kvlab new my-lab   |   kvlab new my-lab --paper dapq")
def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make; it must not exist yet.")],
    paper: Annotated[
        str | None,
        typer.Option(
            "--paper",
            metavar="PAPER",
            show_default=False,
            help="Start from a copy of this paper's notebooks, experiments and claims, not from the example.",
        ),
    ] = None,
    with_wheel: Annotated[
        bool, typer.Option("--with-wheel", help="Put a wheel of this kvlab into it, where no index has it.")
    ] = False,
) -> None:
    """Make a workspace of your own: a folder with a worked example, in which all commands work."""
    from kvlab.workbench import workspace

    made = workspace.new(folder, paper, with_wheel)
    names = sorted(path.stem for path in (made / "experiments").glob("*.yaml"))
    typer.echo(
        f"{made}\nNext:   cd {shlex.quote(str(folder))} && kvlab run {names[0]}   |   kvlab reproduce   |   make test"
    )


@app.command(
    epilog="Examples:\n"
    "  kvlab add policy mine\n"
    "  kvlab add task riddles\n"
    "  kvlab add notebook first_try\n"
    "  kvlab add notebook scores --tasks\n"
    "  kvlab add claim mypaper.table1.gain\n"
    "  kvlab add experiment evict_or_quantise"
)
def add(
    kind: Annotated[str, typer.Argument(metavar="WHAT", help="policy, claim, notebook, task or experiment.")],
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A word in small letters; of a claim, PAPER.NAME; of an experiment, one of kvlab's own.",
        ),
    ],
    with_tasks: Annotated[bool, typer.Option("--tasks", help="Of a notebook: it scores answers to tasks.")] = False,
) -> None:
    """Write the skeleton of a policy, claim, notebook or task into the workspace, or copy an experiment of kvlab's."""
    from kvlab.workbench import workspace

    for path in workspace.add(kind, name, with_tasks):
        typer.echo(path)
