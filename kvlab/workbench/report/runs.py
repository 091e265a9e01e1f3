"""The runs that claims rest on, asked for one at a time: a store may hold more of them than there is memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from kvlab.workbench.store import database, earlier

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab import papers
    from kvlab.workbench.store.patience import Patient

FEW = 2  # of the newest runs, which are read at once: they answer for nearly all claims


class Runs:
    """The finished jobs of one experiment (its id) on one model, with these tags of kvlab."""

    def __init__(self, connection: Patient, experiment: str, model: str, **tags: str) -> None:
        self._connection, self._experiment, self._model, self._tags = connection, experiment, model, tags
        self._asked: dict[frozenset[str], Run | None] = {}

    @cached_property
    def _first(self) -> list[Run]:
        """The newest, at most `FEW`."""
        return list(islice(self._finished(FEW), FEW))

    def _finished(self, page_size: int, metrics: Collection[str] = ()) -> Iterator[Run]:
        return earlier.finished(
            self._connection, self._experiment, page_size, self._model, metrics=metrics, **self._tags
        )

    @property
    def newest(self) -> Run | None:
        """The last of all, whatever it measured."""
        return next(iter(self._first), None)

    def measuring(self, claim: papers.Claim) -> Run | None:
        """The newest run with all metrics that a claim reads; failing that, the newest with its own."""
        own = self._newest_with(frozenset({claim.metric}))
        return own and (self._newest_with(frozenset(claim.metrics)) or own)

    def _newest_with(self, metrics: frozenset[str]) -> Run | None:
        here = next((run for run in self._first if run.data.metrics.keys() >= metrics), None)
        if here or len(self._first) < FEW:
            return here
        if metrics not in self._asked:
            self._asked[metrics] = next(self._finished(1, metrics), None)
        return self._asked[metrics]


def best(found: Iterable[Run], claim: papers.Claim) -> Run | None:
    """Of runs that are at hand, newest first, the one that `Runs.measuring` would take."""
    own = [run for run in found if claim.metric in run.data.metrics]
    return next((run for run in own if run.data.metrics.keys() >= claim.metrics), None) or next(iter(own), None)


def experiment_id(connection: Patient, name: str) -> str | None:
    """The id of MLflow's experiment `name`; None where there is none."""
    known = connection.get_experiment_by_name(name)
    return known.experiment_id if known else None


def values(experiments: Collection[str], tag: str, **tags: str) -> dict[str, set[str]]:
    """Experiment -> the values that a tag has among its finished jobs; without those that have none."""
    if not database.exists():
        return {}
    connection = database.client()
    ids = {name: number for name in experiments if (number := experiment_id(connection, name))}
    found = {name: earlier.values(connection, number, tag, **tags) for name, number in ids.items()}
    return {name: every for name, every in found.items() if every}
