"""MLflow's UI: its address, how to start it, and the links into it that a command prints at its end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import quote

from kvlab.lib.addresses import without_password
from kvlab.workbench import project
from kvlab.workbench.store import database

APP = "kvlab"  # kvlab.workbench.mlflow_app, by its entry point
TRAINING = "workflowType=machine_learning"  # for a server that is not ours: its pages open elsewhere
HOST, PORT = "127.0.0.1", 5000
# Its background jobs serve the traces of language models, and would take another gigabyte.
SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def address(port: int) -> str:
    return f"http://{HOST}:{port}"


def options(uri: str) -> list[str]:
    """Options of `mlflow server` for a store on this machine."""
    # An environment that was installed earlier may not have this app.
    ours = ["--app-name", APP] if entry_points(group="mlflow.app", name=APP) else []
    return ["server", *ours, "--workers", "1", "--backend-store-uri", uri]


def command(uri: str, port: int) -> list[str]:
    """The command that starts the UI on a store, with SETTINGS in its environment."""
    return [sys.executable, "-m", "mlflow", *options(uri), "--host", HOST, "--port", str(port)]


def note() -> Path:
    """Where `make lab` leaves the address of its UI while it runs."""
    return project.root() / "mlruns" / ".ui"


def running() -> str | None:
    """The address of a UI on the store: the tracking server's own, or that of `make lab`; None if none answers."""
    uri = database.store_uri()
    if database.database_path(uri):
        try:
            uri = note().read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    answers = uri.startswith(("http://", "https://")) and database.silence(uri) is None
    return without_password(uri).rstrip("/") if answers else None


def link_text(names: Iterable[str]) -> str:
    """The link to the table of runs of these experiments; if no UI is running, also the command that starts it."""
    connection = database.client()
    experiments = [connection.get_experiment_by_name(name) for name in names]
    ids = [experiment.experiment_id for experiment in experiments if experiment]
    path = (
        f"/#/experiments/{ids[0]}/runs?{TRAINING}"
        if len(ids) == 1
        else (f"/#/compare-experiments/s?experiments={quote(json.dumps(ids, separators=(',', ':')))}&{TRAINING}")
    )
    if base := running():
        return f"{base}{path}"
    uri = database.store_uri()
    if not database.database_path(uri):
        return f"{without_password(uri)} (a store without a page to look at)"
    return f"{address(PORT)}{path}\n  once this runs: {_command(uri)}"


def _command(uri: str) -> str:
    """A command that starts the UI, as short as this shell takes it."""
    installed = Path(sys.executable).with_name("mlflow")
    known = shutil.which("mlflow")
    on_path = known is not None and installed.exists() and Path(known).samefile(installed)
    program = "mlflow" if on_path else min(os.path.relpath(installed), str(installed), key=len)
    return f"MLFLOW_DISABLE_TELEMETRY=true {shlex.join([program, *options(uri)])}"
