"""Finished runs, copied into another MLflow store: parameters, metrics with steps, tags, texts and files.

`mlflow-export-import` is not used: its maintainers call its release on PyPI deprecated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.errors import KvlabError, nearest
from kvlab.lib import progress_bars
from kvlab.lib.addresses import without_password
from kvlab.lib.batches import batches
from kvlab.workbench.store import database, run_index

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.workbench.store.retries import RetryingClient

SOURCE = "kvlab.pushed_from"
"""The tag of a copy with the id of the run that it was made of."""
WHOLE = "kvlab.pushed"
"""The tag of a copy that is complete; set last, so that an interrupted one is completed by the next try."""
PARENT = "mlflow.parentRunId"
OURS = "tags.`kvlab.kind` != ''"
OWN_TAGS = {SOURCE, WHOLE, PARENT, "mlflow.runName"}  # tags that a copy has of its own
METRICS, OTHERS = 1000, 100  # how many metrics, parameters or tags MLflow takes at once


@dataclass
class Pushed:
    """How many runs were copied, and how many were complete in the other store already."""

    copied: int = 0
    there: int = 0


def push(uri: str, experiments: list[str]) -> Pushed:
    """Copy the finished runs of experiments (of all, if none is named) into the store at an address.

    A run is never copied twice. An interrupted copy goes on. The runs above finished ones are copied, too.

    Raises:
        KvlabError: a store cannot be reached, both are the same, or an experiment has no runs.
    """
    if reason := database.silence(uri):
        raise KvlabError(f"no MLflow server answers at {without_password(uri)} ({reason}); check the address")
    connection, other = database.client(), database.client(database.ready(uri))
    if other.tracking_uri == connection.tracking_uri:
        raise KvlabError(f"the runs are in {database.shown_uri()} already; name another store")
    known = {each.name: each.experiment_id for each in connection.search_experiments()}
    for name in experiments:
        if name not in known:
            raise KvlabError(nearest(name, known, "experiment with runs"))
    pushed = Pushed()
    for name in experiments or sorted(known):
        found = _with_parents(connection, known[name])
        if not found:
            continue
        there = database.experiment_id(other, name)
        copies = {run.data.tags[SOURCE]: run for run in _runs(other, there, f"tags.`{SOURCE}` != ''")}
        ids = {of: run.info.run_id for of, run in copies.items()}
        for run in progress_bars.each(found, f"copying {name}", "run"):
            if run.info.run_id in copies and WHOLE in copies[run.info.run_id].data.tags:
                pushed.there += 1
                continue
            if run.info.run_id not in ids:
                ids[run.info.run_id] = _begin(other, there, run)
            _fill(connection, other, run, ids)
            pushed.copied += 1
    return pushed


def _with_parents(connection: RetryingClient, experiment: str) -> list[Run]:
    """The finished runs of kvlab, and those above them, each after the one above it."""
    finished = {run.info.run_id: run for run in _runs(connection, experiment, f"{run_index.FINISHED} and {OURS}")}
    above = {run.data.tags[PARENT] for run in finished.values() if PARENT in run.data.tags} - finished.keys()
    parents = [run for run in map(connection.get_run, sorted(above)) if run.info.status != "RUNNING"]
    return sorted([*parents, *finished.values()], key=lambda run: run.info.start_time)


def _runs(connection: RetryingClient, experiment: str, query: str) -> Iterator[Run]:
    token = None
    while True:
        page = connection.search_runs([experiment], query, max_results=run_index.PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _begin(other: RetryingClient, experiment: str, run: Run) -> str:
    tags = {SOURCE: run.info.run_id}
    made = other.create_run(experiment, run.info.start_time, tags, run.info.run_name)
    return made.info.run_id


def _fill(connection: RetryingClient, other: RetryingClient, run: Run, ids: Mapping[str, str]) -> None:
    """Copy all of a run into its copy. Sent again, the same values change nothing."""
    from mlflow.entities import Param, RunTag

    of, to = run.info.run_id, ids[run.info.run_id]
    for params in batches([Param(name, value) for name, value in run.data.params.items()], OTHERS):
        other.log_batch(to, params=params)
    tags = {name: value for name, value in run.data.tags.items() if name not in OWN_TAGS}
    if above := ids.get(run.data.tags.get(PARENT, "")):
        tags[PARENT] = above
    for some in batches([RunTag(name, value) for name, value in tags.items()], OTHERS):
        other.log_batch(to, tags=some)
    points = [point for name in run.data.metrics for point in connection.get_metric_history(of, name)]
    for some in batches(points, METRICS):
        other.log_batch(to, metrics=some)
    if run.inputs and run.inputs.dataset_inputs:
        other.log_inputs(to, run.inputs.dataset_inputs)
    with tempfile.TemporaryDirectory() as folder:
        if connection.list_artifacts(of):
            connection.download_artifacts(of, "", folder)
            other.log_artifacts(to, folder)
    other.set_terminated(to, run.info.status, run.info.end_time)
    other.set_tag(to, WHOLE, without_password(connection.tracking_uri))
