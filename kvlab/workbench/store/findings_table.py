"""The table `findings` of a run: every number under its metric's name. MLflow's own metrics hold the headlines only."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvlab.errors import KvlabError
from kvlab.lib.files import parsed, read_text
from kvlab.workbench.store import database

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.workbench.store.retries import RetryingClient

FILE = "findings.json"
NAMES = "kvlab.findings"
"""The tag with a hash of the metrics' names. Runs of older code lack it: all their numbers are MLflow's metrics."""
COLUMNS = ["metric", "value", "low", "high"]
CACHED = 128  # tables in memory; a report reads one for each experiment and model


class Number(NamedTuple):
    """A value with its 95 % interval, if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def table(metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> dict[str, Number]:
    """Rows by metric name, of metrics that may hold the ends of intervals as NAME/low and NAME/high."""
    ends = {f"{name}/{end}" for name in intervals for end in ("low", "high")}
    none = (None, None)
    return {name: Number(value, *intervals.get(name, none)) for name, value in metrics.items() if name not in ends}


def flat(rows: Mapping[str, Number]) -> dict[str, float]:
    """Values by metric name; the ends of an interval are NAME/low and NAME/high."""
    found = {name: number.value for name, number in rows.items()}
    for name, number in rows.items():
        if number.low is not None and number.high is not None:
            found |= {f"{name}/low": number.low, f"{name}/high": number.high}
    return found


def signed(rows: Mapping[str, Number]) -> str:
    """The value of the tag `NAMES`."""
    return hashlib.sha256("\n".join(sorted(flat(rows))).encode()).hexdigest()[:16]


def write(connection: RetryingClient, run_id: str, rows: Mapping[str, Number]) -> None:
    """Keep the whole table as findings.json, in the form that MLflow's UI shows as a table."""
    lines = [[name, *number] for name, number in rows.items()]
    connection.log_text(run_id, json.dumps({"columns": COLUMNS, "data": lines}, ensure_ascii=False), FILE)


def read(connection: RetryingClient, run: Run) -> dict[str, Number]:
    """The rows of a run; none for a run of older code.

    Raises:
        KvlabError: the run had a table, and it is lost or damaged.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if NAMES not in run.data.tags:
        return {}
    assert run.info.artifact_uri is not None, "every run that is stored has a place for its files"
    there = get_artifact_repository(run.info.artifact_uri, tracking_uri=connection.tracking_uri)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(connection.with_retries(there.download_artifacts)(FILE, temporary))
            return {name: Number(*number) for name, *number in parsed(read_text(path))["data"]}
    except (OSError, ValueError, LookupError, TypeError, MlflowException) as error:
        raise KvlabError(
            f"{FILE} of the run {run.info.run_id} cannot be read; bring the store's artifacts back, or delete the run"
        ) from error


def numbers(run: Run) -> Mapping[str, float]:
    """All numbers of a finished run of the store by their metrics' names, of whatever code."""
    if NAMES not in run.data.tags:
        return run.data.metrics
    return _numbers(_Finished(run))


class _Finished:
    """A run as the key of a cache: by its id and its table's names."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.key = run.info.run_id, run.info.artifact_uri, run.data.tags[NAMES]

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Finished) and self.key == other.key


@functools.lru_cache(CACHED)
def _numbers(finished: _Finished) -> Mapping[str, float]:
    return flat(read(database.client(), finished.run))
