"""The MLflow store: where it is, how it is made once and safely, and one clear error where it cannot be reached."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import warnings
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvlab.errors import KvlabError
from kvlab.lib import environment, extras
from kvlab.lib.addresses import without_password
from kvlab.lib.files import first_line, why
from kvlab.workbench import experiments, project
from kvlab.workbench.store.retries import RetryingClient

SQLITE = "sqlite:///"
KIND = "mlflow.experimentKind"
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow shows as a description
EVALUATIONS = "Results of `kvlab eval`: scores of tasks under policies and budgets, each next to the full cache."
PROXY_WITHOUT_SERVER = (502, 503, 504)


def store_uri() -> str:
    """MLFLOW_TRACKING_URI if set, else the sqlite database `mlruns/mlflow.db` of the project; sqlite paths absolute.

    MLflow reads a relative sqlite path from the working directory, which differs between a notebook and a shell.
    """
    return _absolute(os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{project.root() / 'mlruns' / 'mlflow.db'}")


def _absolute(uri: str) -> str:
    path = database_path(uri)
    return f"{SQLITE}{path}" if path else uri


def shown_uri() -> str:
    """`store_uri` as it may be printed and kept: without user and password."""
    return without_password(store_uri())


def database_path(uri: str) -> Path | None:
    """The file behind a sqlite URI, absolute; None for any other store."""
    if not uri.startswith(SQLITE):
        return None
    return (project.root() / Path(uri.removeprefix(SQLITE)).expanduser()).resolve()


def artifact_location(experiment: str, uri: str) -> str | None:
    """Where the artifacts of an experiment go: next to a sqlite database; a server decides for itself (None)."""
    path = database_path(uri)
    return (path.parent / "artifacts" / experiment).as_uri() if path else None


def quiet() -> None:
    """Keep MLflow from sending telemetry, and from printing advertisements and each step of a migration.

    To be called before it is imported. Raises KvlabError where it is not installed.
    """
    extras.need("mlflow", "sqlalchemy", "requests")
    environment.without_telemetry()
    for name, value in {
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic", "alembic.runtime.migration"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It logs hundreds of lines about errors that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"mlflow\..*")


@functools.cache
def _ready(uri: str) -> None:
    path = database_path(uri)
    if path:
        _ready_database(path)
    elif urlsplit(uri).scheme in ("", "file") or Path(uri).is_absolute():
        raise KvlabError(
            f"MLflow keeps no runs in plain folders any more ({uri}); set MLFLOW_TRACKING_URI to "
            "sqlite:///mlruns/mlflow.db or to a server's address, or unset it"
        )
    else:
        _ready_server(uri)


def silence(uri: str) -> str | None:
    """Why a tracking server does not answer; None where it does, and for any store that is no server.

    It is asked by the library that MLflow's own client asks with, which takes user and password from the address.
    """
    import requests

    if not uri.startswith(("http://", "https://")):
        return None
    try:
        code = requests.get(uri.rstrip("/") + "/health", timeout=10).status_code
    except (requests.RequestException, ValueError) as error:
        return _reason(error)
    # Any other code shows that the server is there; the call that follows gets its own error, which says more.
    return f"HTTP error {code}" if code in PROXY_WITHOUT_SERVER else None


def _reason(error: BaseException) -> str:
    """The root cause of a network error, in the system's words where it has any."""
    causes = [error]
    while below := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(below)
    system = next((cause for cause in reversed(causes) if isinstance(cause, OSError) and cause.strerror), None)
    return system.strerror or "" if system else without_password(first_line(error))[:200]


def _ready_server(uri: str) -> None:
    if reason := silence(uri):
        place = urlsplit(without_password(uri)).netloc or uri
        raise KvlabError(
            f"the MLflow store at {place} cannot be reached ({reason}); start it, or unset "
            "MLFLOW_TRACKING_URI to log into the project's mlruns folder"
        )


def _ready_database(path: Path) -> None:
    """Create or upgrade the sqlite schema under a lock: two processes that do so at once would break it."""
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
        raise KvlabError(f"the MLflow store {path} cannot be reached: {why(error)}") from None
    except Exception as error:
        raise KvlabError(f"the MLflow store {path} cannot be used: {first_line(error)}") from None


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
        revision = (
            connection.execute("select version_num from alembic_version").fetchone()
            if ("alembic_version" in tables)
            else None
        )
    if tables and not revision:
        raise KvlabError(f"{path} is a database, but not MLflow's; name another in MLFLOW_TRACKING_URI")
    from mlflow.store.db.utils import _get_latest_schema_revision

    if not revision or revision[0] != _get_latest_schema_revision():
        _upgrade(path, fresh=not revision)


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
    return ready(store_uri())


def ready(uri: str) -> str:
    """`ensure_store`, of the store at another address."""
    quiet()
    uri = _absolute(uri)
    _ready(uri)
    return uri


def client(uri: str | None = None) -> RetryingClient:
    """A client of the store, which is made ready first; of the store at `uri`, if that is known to be ready.

    Raises KvlabError where it cannot be reached.
    """
    quiet()
    uri = uri or ensure_store()
    from mlflow.tracking import MlflowClient

    return RetryingClient(MlflowClient(tracking_uri=uri), silence)


def write_through(connection: RetryingClient, run_id: str) -> None:
    """Write a run's artifacts from the system's memory to the disk, if they lie on this machine.

    The database does so by itself. Without this, a power cut could leave a finished run whose files are gone.
    """
    place = urlsplit(connection.get_run(run_id).info.artifact_uri)
    if place.scheme not in ("", "file"):
        return
    folder = Path(url2pathname(place.path))
    # A file is only safe when the folders that list it are, too, up to the folder of the experiment.
    for path in (*folder.rglob("*"), folder, *folder.parents[:2]):
        # Some systems cannot open or sync a folder.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def exists() -> bool:
    """Whether there is a store to read from, without making one."""
    path = database_path(store_uri())
    return path is None or path.exists()


def experiment_id(connection: RetryingClient, name: str) -> str:
    """The id of the MLflow experiment `name`, created with an artifact folder of its own if it is not there.

    Its tag KIND tells MLflow's UI to show a table of runs, and not the page of an application of a language model.
    """
    from mlflow.exceptions import MlflowException

    tags = {KIND: "custom_model_development", **_description(name)}
    experiment = connection.get_experiment_by_name(name)
    if experiment is None:
        try:
            return connection.create_experiment(name, artifact_location(name, connection.tracking_uri), tags)
        except MlflowException:
            experiment = connection.get_experiment_by_name(name)  # made by another process in between
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise KvlabError(
            f"the MLflow experiment {name!r} was deleted: bring it back with `mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}`"
        )
    for tag, value in tags.items():
        if tag not in experiment.tags:  # a description that was changed in the UI stays
            connection.set_experiment_tag(experiment.experiment_id, tag, value)
    return experiment.experiment_id


def _description(name: str) -> dict[str, str]:
    """The tag with an experiment's description, as its YAML has it, if there is one."""
    with contextlib.suppress(KvlabError):
        if name in experiments.names():
            return {DESCRIPTION: experiments.load(name).summary}
    return {DESCRIPTION: EVALUATIONS} if name == "eval" else {}
