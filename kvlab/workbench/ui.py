"""MLflow's UI: its address, how to start it, and the links into it that a command prints at its end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from kvlab.errors import KvlabError
from kvlab.lib.addresses import without_password
from kvlab.workbench import project
from kvlab.workbench.jobs import processes
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


class Server:
    """MLflow's UI: one that was started here, or a tracking server's own, which has no process here."""

    def __init__(self, address: str, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self.address, self.log = address, log
        self._process = process

    @property
    def alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def wait_until_it_answers(self, seconds: float = 120) -> None:
        """Raises KvlabError where it ends or stays silent."""
        until = time.monotonic() + seconds
        while database.silence(self.address) is not None:
            if not self.alive or time.monotonic() > until:
                self.complain()
            time.sleep(0.2)

    def complain(self) -> NoReturn:
        """Raise KvlabError that names its log."""
        raise KvlabError(f"MLflow's UI has ended or does not answer; its log is {self.log}")


@contextmanager
def served(uri: str, port: int) -> Iterator[Server]:
    """MLflow's UI on a sqlite store, for as long as the block runs; any other store is a server, with a UI of its own.

    Raises KvlabError where the port cannot be used.
    """
    log = note().parent / "server.log"
    if database.database_path(uri) is None:
        yield Server(without_password(uri).rstrip("/"), None, log)
        return
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((HOST, port))
        except OSError as error:
            raise KvlabError(
                f"port {port} cannot be used ({error.strerror}); name another: --port {port + 1}"
            ) from None
    with log.open("wb") as written:
        # In a session of its own, so that Ctrl-C reaches only what runs in front of it; it is ended after that.
        server = subprocess.Popen(
            command(uri, port),
            stdout=written,
            stderr=written,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **SETTINGS},
        )
    try:
        note().write_text(address(port), encoding="utf-8")
        yield Server(address(port), server, log)
    finally:
        note().unlink(missing_ok=True)
        processes.stop(server)


def note() -> Path:
    """Where `kvlab ui` and `kvlab lab` leave the address of its UI while it runs."""
    return project.root() / "mlruns" / ".ui"


def running() -> str | None:
    """The address of a UI on the store: the tracking server's own, or `kvlab ui`'s or `kvlab lab`'s; None without."""
    uri = database.store_uri()
    if database.database_path(uri):
        try:
            uri = note().read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    answers = uri.startswith(("http://", "https://")) and database.silence(uri) is None
    return without_password(uri).rstrip("/") if answers else None


def link_text(names: Iterable[str]) -> str:
    """The link to the table of runs of these experiments; if no UI is running, the command that starts it before."""
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
    return f"kvlab ui   (then {address(PORT)}{path})"
