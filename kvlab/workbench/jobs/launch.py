"""`kvlab run` and `kvlab reproduce`: everything is checked, then the jobs of all experiments run as one sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.lib.files import first_line
from kvlab.workbench import experiments
from kvlab.workbench.experiments import TRIAL, Experiment, Job, budget_limits, inputs, policy_limits, prompt_limits
from kvlab.workbench.experiments.notebooks import parameters_of
from kvlab.workbench.jobs import executors
from kvlab.workbench.jobs.executors import Here, cores
from kvlab.workbench.jobs.running_job import Result
from kvlab.workbench.jobs.sweep import Sweep
from kvlab.workbench.store import database, retries, run_index

if TYPE_CHECKING:
    from rich.console import Console

    from kvlab.workbench.store.retries import RetryingClient

__all__ = ["Result", "Sweep", "go", "run"]


def run(
    names: str | Sequence[str],
    profile: str = "quick",
    overrides: Mapping[str, Any] | None = None,
    workers: int | None = None,
    fresh: bool = False,
    console: Console | None = None,
    cluster: str | None = None,
    models: Sequence[str] = (),
) -> list[Result]:
    """Run all jobs of the named experiments, `workers` at once (default: 2, or 1 on a single core).

    With `models`, every experiment runs once on each of them, instead of on the model that its file names. An
    experiment whose notebook has no parameter `model` runs once.

    Everything is checked before anything runs: names, parameters, notebooks, documents, the store. A finished job with
    the same content key is not run again unless `fresh`. A job that fails does not stop the others; its executed copy
    is kept in mlruns/failed and with its run. A job whose process dies is begun again, `sweep.TRIES` times in all.
    `cluster` is a Dask scheduler's address, or "slurm"; all its workers are used by default. Raises KvlabError if one
    of these checks fails.
    """
    names = [names] if isinstance(names, str) else list(names)
    loaded = [experiments.load(name) for name in names]
    return go(loaded, lambda: list(_jobs(loaded, profile, overrides or {}, models)), workers, fresh, console, cluster)


def go(
    loaded: Sequence[Experiment],
    jobs: Callable[[], list[Job]],
    workers: int | None = None,
    fresh: bool = False,
    console: Console | None = None,
    cluster: str | None = None,
) -> list[Result]:
    """Check the jobs that are made of these experiments, and run them as one sweep, as `run` says.

    Returns:
        How each ended, in their order.
    """
    if workers is not None and workers < 1:
        raise KvlabError(f"the number of jobs at once must be 1 or more, not {workers}")
    retries.retry_seconds()
    queue = jobs()
    inputs.prepare([job.parameters for job in queue])
    _check(queue)
    queue = jobs()  # again, since `prepare` may have pulled a model, and its hash belongs in the keys
    connection = database.client()
    ids = _known(connection, [experiment.name for experiment in loaded])
    descriptions = {experiment.name: experiment.summary for experiment in loaded}
    place = executors.connect(cluster, workers) if cluster else Here(at_once(workers))
    try:
        return Sweep(connection, queue, ids, descriptions, place, fresh, console).go()
    finally:
        place.close()


def planned(
    names: Sequence[str],
    profile: str,
    overrides: Mapping[str, Any] | None = None,
    models: Sequence[str] = (),
) -> list[Job]:
    """The jobs that `run` would run, checked as it checks them; nothing is fetched."""
    queue = list(_jobs([experiments.load(name) for name in names], profile, overrides or {}, models))
    _check(queue)
    return queue


def _check(queue: Sequence[Job]) -> None:
    for job in queue:
        prompt_limits.check(job.parameters, job.experiment)
        usual = parameters_of(job.notebook)
        policy_limits.check(job.parameters, usual, job.experiment)
        budget_limits.check(job.parameters, usual, job.experiment)


def at_once(workers: int | None) -> int:
    """How many jobs run at once on this machine where a command asks for so many: two, or one on a single core."""
    return workers or min(2, cores())


def _jobs(
    loaded: Sequence[Experiment], profile: str, overrides: Mapping[str, Any], models: Sequence[str]
) -> Iterator[Job]:
    for experiment in loaded:
        takes_one = bool(models) and "model" in parameters_of(experiment.path)
        for given in [{"model": model} for model in dict.fromkeys(models)] if takes_one else [{}]:
            planned = experiments.jobs(experiment, profile, {**overrides, **given})
            yield from _marked(planned, experiment, {**overrides, **given})


def _marked(planned: Sequence[Job], experiment: Experiment, overrides: Mapping[str, Any]) -> Iterator[Job]:
    """Yield the jobs; those whose parameters are not the profile's own, on any model, become trials."""
    usual: set[str] = set()
    changed = overrides.keys() - {"model"}
    for profile, model in {(job.profile, job.parameters.get("model")) for job in planned} if changed else ():
        own = experiments.jobs(experiment, profile, {"model": model} if "model" in overrides else {})
        usual |= {job.key for job in own}
    for job in planned:
        yield replace(job, kind=TRIAL) if changed and job.key not in usual else job


def _known(connection: RetryingClient, names: Sequence[str]) -> dict[str, str]:
    """Name -> id of MLflow's experiments; makes those that are missing, and tidies up after processes that died."""
    from mlflow.exceptions import MlflowException

    try:
        ids = {name: database.experiment_id(connection, name) for name in names}
        run_index.tidy(connection, ids)
    except MlflowException as error:
        raise KvlabError(f"the MLflow store failed: {first_line(error)[:300]}") from error
    return ids
