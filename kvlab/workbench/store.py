"""The MLflow store: where it is, made once and safely, and reached with one clear error if it cannot be."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvlab.errors import KvlabError
from kvlab.workbench import project

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

SQLITE = "sqlite:///"


def store_uri() -> str:
    """MLFLOW_TRACKING_URI if set, else the sqlite database `mlruns/mlflow.db` of the project; sqlite paths absolute.

    MLflow reads a relative sqlite path from the working directory, which differs between a notebook and a shell.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{project.root() / 'mlruns' / 'mlflow.db'}"
    path = database_path(uri)
    return f"{SQLITE}{path}" if path else uri


def database_path(uri: str) -> Path | None:
    """The file behind a sqlite URI, absolute; None for any other store."""
    if not uri.startswith(SQLITE):
        return None
    return (project.root() / Path(uri.removeprefix(SQLITE)).expanduser()).resolve()


def artifact_location(experiment: str, uri: str) -> str | None:
    """Where the artifacts of an experiment go: beside a sqlite database; a server decides for itself (None)."""
    path = database_path(uri)
    return (path.parent / "artifacts" / experiment).as_uri() if path else None


def quiet() -> None:
    """Before mlflow is imported: no telemetry, no advertisement, no migration chatter."""
    for name, value in {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
                        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
                        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
                        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "mlflow.store.db.utils", "alembic", "alembic.runtime.migration"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"mlflow\..*")


@functools.cache
def _ready(uri: str) -> None:
    path = database_path(uri)
    if path:
        _ready_database(path)
    elif uri.startswith(("http://", "https://")):
        _ready_server(uri)


def _ready_server(uri: str) -> None:
    try:
        urllib.request.urlopen(uri.rstrip("/") + "/health", timeout=10).close()
    except urllib.error.HTTPError:
        pass  # an answer, if not the hoped-for one: the server is there, and its own error will say more
    except (OSError, ValueError) as error:
        place = urlsplit(uri).netloc or uri
        reason = getattr(error, "reason", error)
        raise KvlabError(f"the MLflow store at {place} cannot be reached ({reason}); start it, or unset "
                         "MLFLOW_TRACKING_URI to log into the project's mlruns folder") from None


def _ready_database(path: Path) -> None:
    """Create or upgrade the sqlite schema under a lock: a first use by several processes at once breaks it."""
    from filelock import FileLock

    quiet()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / f".{path.name}.lock", timeout=300):
            if not path.exists():
                _create(path)
            else:
                _check(path)
    except KvlabError:
        raise
    except TimeoutError:
        raise KvlabError(f"the MLflow store {path} has been locked by another process for five minutes") from None
    except OSError as error:
        raise KvlabError(f"the MLflow store {path} cannot be reached: {error.strerror or error}") from None
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise KvlabError(f"the MLflow store {path} cannot be used: {first}") from None


def _create(path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    temporary = Path(name)
    try:
        _upgrade(temporary, fresh=True)
        os.replace(temporary, path)
    finally:
        for left in (temporary, Path(f"{name}-journal"), Path(f"{name}-wal"), Path(f"{name}-shm")):
            left.unlink(missing_ok=True)


def _check(path: Path) -> None:
    import sqlite3
    from contextlib import closing

    if not os.access(path, os.W_OK):
        raise KvlabError(f"the MLflow store {path} cannot be written to: check its permissions")
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        tables = {row[0] for row in connection.execute("select name from sqlite_master where type = 'table'")}
        found = connection.execute("select version_num from alembic_version").fetchone() if (
            "alembic_version" in tables) else None
    if tables and not found:
        raise KvlabError(f"{path} is a database, but not MLflow's; name another in MLFLOW_TRACKING_URI")
    from mlflow.store.db.utils import _get_latest_schema_revision

    if not found or found[0] != _get_latest_schema_revision():
        _upgrade(path, fresh=not found)


def _upgrade(path: Path, fresh: bool) -> None:
    import sqlalchemy
    from mlflow.store.db import utils

    engine = sqlalchemy.create_engine(f"{SQLITE}{path}")
    try:
        (utils._initialize_tables if fresh else utils._upgrade_db)(engine)
    finally:
        engine.dispose()


def ensure_store() -> str:
    """Make the store ready for many processes (idempotent), and return its URI.

    Raises KvlabError, in one sentence, where it cannot be reached, written to, or is something else.
    """
    quiet()
    uri = store_uri()
    _ready(uri)
    return uri


def client(uri: str | None = None) -> MlflowClient:
    """A client of the store, which is made ready first. Raises KvlabError where it cannot be reached."""
    uri = uri or ensure_store()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def exists() -> bool:
    """Whether there is a store to read from, without making one."""
    path = database_path(store_uri())
    return path is None or path.exists()


def experiment_id(connection: MlflowClient, name: str) -> str:
    """The id of the MLflow experiment `name`, created with an artifact folder of its own if it is not there."""
    from mlflow.exceptions import MlflowException

    found = connection.get_experiment_by_name(name)
    if found is None:
        try:
            return connection.create_experiment(name, artifact_location(name, connection.tracking_uri))
        except MlflowException:
            found = connection.get_experiment_by_name(name)  # made by another process in between
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise KvlabError(f"the MLflow experiment {name!r} was deleted: bring it back with `mlflow experiments restore "
                         f"--experiment-id {found.experiment_id}`")
    return found.experiment_id
