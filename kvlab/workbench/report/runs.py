"""The runs that claims rest on, asked for one at a time: a store may hold more of them than there is memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from kvlab.workbench.experiments import TRIAL
from kvlab.workbench.store import database, run_index
from kvlab.workbench.store.findings_table import NAMES, numbers

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab import papers
    from kvlab.workbench.store.retries import RetryingClient


class Runs:
    """The finished jobs of one experiment on one model, with these tags of kvlab.

    newest: the last of them, which answers for nearly all claims.
    """

    def __init__(self, connection: RetryingClient, newest: Run, **tags: str) -> None:
        self.newest = newest
        self._connection, self._tags = connection, tags
        self._asked: dict[frozenset[str], Run | None] = {}

    def measuring(self, claim: papers.Claim) -> Run | None:
        """The newest run with all metrics that a claim reads; failing that, the newest with its own."""
        own = self._newest_with(frozenset({claim.metric}))
        return own and (self._newest_with(frozenset(claim.metrics)) or own)

    def _newest_with(self, metrics: frozenset[str]) -> Run | None:
        if numbers(self.newest).keys() >= metrics:
            return self.newest
        if self._is_only:
            return None
        if metrics not in self._asked:
            old = next(self._finished(1, metrics), None)
            new = next((run for run in self._of_each_table if numbers(run).keys() >= metrics), None)
            found = [run for run in (old, new) if run]
            self._asked[metrics] = max(found, key=_ended, default=None)
        return self._asked[metrics]

    @functools.cached_property
    def _of_each_table(self) -> list[Run]:
        """The newest run of each set of names in tables of findings, newest first. Runs of older code have none."""
        experiment, model = self.newest.info.experiment_id, self.newest.data.tags.get("model", "")
        found = run_index.newest_of_each(self._connection, experiment, NAMES, model, **self._tags)
        return sorted((run for names, run in found.items() if names), key=_ended, reverse=True)

    @functools.cached_property
    def _is_only(self) -> bool:
        """Whether no other run can have a metric that the newest lacks: one question instead of one for each claim."""
        return len(list(itertools.islice(self._finished(2), 2))) < 2

    def _finished(self, page_size: int, metrics: Collection[str] = ()) -> Iterator[Run]:
        experiment, model = self.newest.info.experiment_id, self.newest.data.tags.get("model", "")
        return run_index.finished(self._connection, experiment, page_size, model, metrics=metrics, **self._tags)


def _ended(run: Run) -> int:
    return run.info.end_time or 0


def best(found: Iterable[Run], claim: papers.Claim) -> Run | None:
    """Of runs that are at hand, newest first, the one that `Runs.measuring` would take."""
    own = [run for run in found if claim.metric in numbers(run)]
    return next((run for run in own if numbers(run).keys() >= claim.metrics), None) or next(iter(own), None)


def experiment_id(connection: RetryingClient, name: str) -> str | None:
    """The id of MLflow's experiment `name`; None where there is none."""
    known = connection.get_experiment_by_name(name)
    return known.experiment_id if known else None


def trials(experiments: Collection[str]) -> list[Run]:
    """The newest trial of each experiment, whose parameters are not those of its profile: no claim rests on one."""
    if not database.exists():
        return []
    connection = database.client()
    ids = [number for name in sorted(experiments) if (number := experiment_id(connection, name))]
    return [run for number in ids if (run := run_index.newest(connection, number, kind=TRIAL))]


def newest(experiments: Collection[str], tag: str, **tags: str) -> dict[str, dict[str, Run]]:
    """Experiment -> value of a tag -> its last finished job that has it; without experiments that have none."""
    if not database.exists():
        return {}
    connection = database.client()
    ids = {name: number for name in experiments if (number := experiment_id(connection, name))}
    found = {name: run_index.newest_of_each(connection, number, tag, **tags) for name, number in ids.items()}
    return {name: every for name, every in found.items() if every}
