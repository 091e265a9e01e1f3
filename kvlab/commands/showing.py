"""Pages to look at: MLflow's UI, JupyterLab; runs for others to look at."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import typer

from kvlab.lib import extras

app = typer.Typer()

Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="The port of MLflow's UI, on this machine only.")]


@app.command(epilog="Examples:   kvlab ui   |   kvlab ui --port 5001")
def ui(port: Port = 5000) -> None:
    """Start MLflow's UI on the runs of this project, and say when it can be opened. Ctrl-C ends it."""
    extras.need()
    from kvlab.workbench import ui as pages
    from kvlab.workbench.store import database

    uri = database.ensure_store()
    if base := pages.running():
        typer.echo(f"it runs already: {base}")
        return
    # A shell starts what runs in the background with Ctrl-C ignored; a plain kill must end the server, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with pages.served(uri, port) as server:
        server.wait_until_it_answers()
        typer.echo(f"{server.address}   (Ctrl-C ends it)")
        try:
            while server.alive:
                time.sleep(0.5)
        except KeyboardInterrupt:
            return
    server.complain()


@app.command(
    "push-runs", epilog="Examples:   kvlab push-runs http://team:5000   |   kvlab push-runs http://team:5000 quickstart"
)
def push_runs(
    uri: Annotated[str, typer.Argument(metavar="URI", help="The other store: a server's address, or sqlite:///FILE.")],
    experiments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT]...", help="Only runs of these (default: all).", show_default=False),
    ] = None,
) -> None:
    """Copy finished runs into another MLflow store. No run is copied twice, and an interrupted copy goes on."""
    extras.need()
    from kvlab.lib.addresses import without_password
    from kvlab.workbench.store import pushing

    pushed = pushing.push(uri, experiments or [])
    runs = "1 run" if pushed.copied == 1 else f"{pushed.copied} runs"
    there = f", {pushed.there} there already" if pushed.there else ""
    typer.echo(f"{runs} copied to {without_password(uri)}{there}")


@app.command(epilog="Examples:   kvlab lab   |   kvlab lab --port 5001   |   kvlab lab --in-place")
def lab(
    port: Port = 5000,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Open the notebooks themselves, not copies of them in lab/.")
    ] = False,
) -> None:
    """Start JupyterLab on copies of the notebooks, and MLflow's UI, which ends with it."""
    extras.need()
    from kvlab.workbench import lab as jupyter

    raise typer.Exit(jupyter.start(port, in_place))
