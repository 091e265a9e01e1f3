"""The runs of earlier sweeps: finished runs, which are not repeated, and unfinished runs of processes that died."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout

from kvlab.workbench import project
from kvlab.workbench.experiments import CELL, ORDINARY, POLICY, TRIAL

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.workbench.store.retries import RetryingClient

# Replaces the key of a job during which the code was edited: its numbers may come from both versions of the code.
EDITED = "edited while it ran"
FINISHED = "attributes.status = 'FINISHED'"
PAGE = 200  # runs that are in memory at once: each may hold thousands of metrics
ASKED = 20  # metrics in one question: each costs a database one more join
LEAST = "-1.7976931348623157e308"  # as MLflow stores minus infinity; it cannot read e+308


def finished(
    connection: RetryingClient,
    experiment: str,
    page_size: int = PAGE,
    model: str | None = None,
    metrics: Collection[str] = (),
    kind: str = ORDINARY,
    **tags: str,
) -> Iterator[Run]:
    """The finished jobs of an experiment (its id) with these tags of kvlab, newest first.

    model: only those on the model that is called so, "" for those on none; on any by default.
    metrics: only those with all of these among MLflow's metrics.
    kind: of the jobs.
    """
    query = _finished(kind, tags, model)
    query += "".join(f" and metrics.`{name}` >= {LEAST}" for name in sorted(metrics)[:ASKED])
    for run in _found(connection, experiment, query, page_size):
        if (model is None or run.data.tags.get("model", "") == model) and run.data.metrics.keys() >= set(metrics):
            yield run


def _finished(kind: str, tags: Mapping[str, str], model: str | None = None) -> str:
    """The query for finished jobs of a kind with these tags of kvlab on a model.

    A path with a quote cannot be asked for: the query finds the jobs on other models, too.
    """
    every = {"kind": kind, **tags}
    asked = FINISHED + "".join(f" and tags.`kvlab.{name}` = '{every[name]}'" for name in every)
    return asked + (f" and tags.model = '{model}'" if model and "'" not in model else "")


def _found(connection: RetryingClient, experiment: str, query: str, page_size: int) -> Iterator[Run]:
    """The runs of a query, newest first, page by page; without jobs during which the code was edited."""
    token = None
    while True:
        page = connection.search_runs(
            [experiment], query, max_results=page_size, page_token=token, order_by=["attributes.end_time DESC"]
        )
        yield from (run for run in page if run.data.tags.get("kvlab.key") != EDITED)
        token = page.token
        if not token:
            return


def newest_of_each(
    connection: RetryingClient, experiment: str, tag: str, model: str | None = None, **tags: str
) -> dict[str, Run]:
    """Value of a tag -> the last finished job of an experiment (its id) that has it.

    Only jobs with these tags of kvlab on a model (any by default) count. The value is "" where the last of all has no
    such tag. The store is asked once for each value, however many runs there are.
    """
    query = _finished(ORDINARY, tags, model)
    known: dict[str, Run] = {}
    if model is not None and (not model or "'" in model):  # cannot be asked for
        for run in finished(connection, experiment, PAGE, model, (), ORDINARY, **tags):
            known.setdefault(run.data.tags.get(tag, ""), run)
        return known
    while True:
        others = "".join(f" and tags.`{tag}` != '{value}'" for value in sorted(known))
        run = next(_found(connection, experiment, query + others, 1), None)
        if run is None:
            return known
        known[value := run.data.tags.get(tag, "")] = run
        if "'" in value:  # cannot be asked for
            for run in _found(connection, experiment, query, PAGE):
                known.setdefault(run.data.tags.get(tag, ""), run)
            return known


def newest(
    connection: RetryingClient, experiment: str, model: str | None = None, kind: str = ORDINARY, **tags: str
) -> Run | None:
    """The last finished job of an experiment (its id) on a model (any by default) with these tags of kvlab."""
    return next(finished(connection, experiment, page_size=1, model=model, kind=kind, **tags), None)


def done(connection: RetryingClient, experiment: str, key: str, kind: str) -> Run | None:
    """The last finished job with this content key that replaces one of that kind.

    An ordinary job replaces any other. No other replaces an ordinary one, since the ledger would not read it.
    """
    found: dict[str, Run] = {}
    # Not asked for by its kind as well: a database looks through all runs once for each tag, and few share a key.
    for run in _found(connection, experiment, f"{FINISHED} and tags.`kvlab.key` = '{key}'", 2):
        found.setdefault(run.data.tags.get("kvlab.kind", ""), run)
        if ORDINARY in found:
            break
    return found.get(ORDINARY) or found.get(kind)


# ---------------------------------------------------------------- locks


def work() -> Path:
    """The folder with the files of jobs that are under way, and with their locks."""
    return project.root() / "mlruns" / "work"


def take(experiment: str, key: str) -> FileLock | None:
    """Lock a job for this process; None while another process has it.

    The lock ends with `release`, or with the process.
    """
    work().mkdir(parents=True, exist_ok=True)
    return _held(work() / f".{experiment}-{key}.lock")


def _held(path: Path) -> FileLock | None:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def release(lock: FileLock) -> None:
    """Give a job back, so that another process may take it, and remove the lock's file.

    The file is removed while it is still locked. A process that waits for this very file gets a lock on a file without
    a name. filelock notices that, and tries again with a new file.
    """
    with contextlib.suppress(OSError):
        Path(lock.lock_file).unlink()
    lock.release()


# ---------------------------------------------------------------- after processes that died


def tidy(connection: RetryingClient, experiments: Mapping[str, str]) -> None:
    """Mark the runs as KILLED that a dead process on this host left RUNNING, and remove its files in `work()`.

    experiments: name -> id of those to look at.
    """
    for experiment in experiments.values():
        for left in connection.search_runs([experiment], "attributes.status = 'RUNNING'", max_results=PAGE):
            if _is_left(left):
                connection.set_terminated(left.info.run_id, "KILLED")
    for path in list(work().iterdir()) if work().is_dir() else ():
        if path.suffix == ".lock":
            if lock := _held(path):
                release(lock)
        elif _has_ended(connection, path.name):
            shutil.rmtree(path, ignore_errors=True)


def _is_left(run: Run) -> bool:
    tags = run.data.tags
    ours = (
        tags.get("kvlab.kind") in (ORDINARY, CELL, TRIAL, POLICY, "sweep")
        and tags.get("kvlab.host") == socket.gethostname()
    )
    pid = int(tags.get("kvlab.pid", 0))
    # This process runs one sweep at a time. So a run that an earlier sweep of its own left RUNNING is left over, too.
    if not ours or (pid != os.getpid() and _lives(pid, float(tags.get("kvlab.pid_started", 0)))):
        return False
    # If the clock was set, a living process seems to be another one: but then it still holds the lock of its job.
    if not tags.get("kvlab.key") or not tags.get("kvlab.experiment"):
        return True
    if lock := take(tags["kvlab.experiment"], tags["kvlab.key"]):
        release(lock)
    return lock is not None


def _has_ended(connection: RetryingClient, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return connection.get_run(run_id).info.status != "RUNNING"
    except MlflowException:
        return False  # a run of another store


def _lives(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < 2
    except psutil.Error:
        return False
