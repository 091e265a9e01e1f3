"""A run on MLflow's own pages: headline metrics, curves, datasets, and verdicts in its tags."""

from __future__ import annotations

import contextlib
import json
import string
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvlab import papers
from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric

    from kvlab.analyses.findings import Row

AXES = ("budget", "capacity", "step", "length", "window", "tokens")
"""Keys of effects that a curve runs over, where they are whole numbers."""
PLAYERS = ("policy", "method", "variant")
"""Keys of effects that name who is measured: a curve belongs to one of them."""
CURVES = "over"
MOST = 12  # headline metrics of a run: what fits MLflow's first screen
VERDICT = "verdict."  # how the tags with counts of verdicts begin
DIGEST = 36  # characters, the most that MLflow stores


class Point(NamedTuple):
    """A point of a curve: MLflow draws the metric `name` over its steps."""

    name: str
    step: int
    value: float


def metrics(points: Iterable[Point]) -> list[Metric]:
    """Points as MLflow takes them, all of this moment."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    return [Metric(point.name, point.value, now, point.step) for point in points]


class Headlines:
    """Which of a run's metrics MLflow shows as its own, at most `MOST`.

    Args:
        experiment: its claims name them: those of quoted findings first, in the order of the ledger, then the others.
            The first metrics that are logged are taken where the experiment has no claims.
        named: these instead. Raises KvlabError for more than `MOST`.
    """

    def __init__(self, experiment: str, named: Sequence[str] = ()) -> None:
        if len(named) > MOST:
            raise KvlabError(f"a run has at most {MOST} headline metrics, and {len(named)} are named")
        self._experiment, self._named = experiment, list(named)
        self._wanted: list[str] | None = None
        self._shown: set[str] = set()

    @property
    def wanted(self) -> list[str]:
        """Metric names, the most important first; empty where any will do."""
        if self._wanted is None:
            self._wanted = self._named or self._of_claims()
        return self._wanted

    def _of_claims(self) -> list[str]:
        # A mistake in a paper's file must not end a measurement.
        with contextlib.suppress(KvlabError):
            quoted = [claim for claim in papers.quoted() if claim.experiment == self._experiment]
            every = [*quoted, *papers.claims(experiment=self._experiment)]
            return list(dict.fromkeys(claim.metric for claim in every))
        return []

    def among(self, logged: Mapping[str, float]) -> list[str]:
        """The headlines among metrics that are logged now; a name that was one stays one."""
        first = self.wanted[:MOST] or logged
        return self._take(name for name in first if name in logged)

    def more(self, logged: Mapping[str, float]) -> list[str]:
        """The headlines that fill the room left by those that were not measured, once all metrics are logged."""
        return self._take(name for name in self.wanted if name in logged and name not in self._shown)

    def _take(self, names: Iterable[str]) -> list[str]:
        taken = []
        for name in names:
            if name in self._shown or len(self._shown) < MOST:
                self._shown.add(name)
                taken.append(name)
        return taken


def curves(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """Policy -> its curves over keys of `AXES`, such as `over_budget/EFFECT`, with the key's value as step.

    One point is no curve.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        fields = [name for _, name, _, _ in string.Formatter().parse(row.effect) if name]
        player = next((name for name in PLAYERS if name in fields), "")
        for axis in AXES if player else ():
            at = row.keys.get(axis)
            if isinstance(at, (int, float)) and at == int(at):
                rest = _without(_without(row.effect, axis), player).format(**row.keys)
                name = f"{CURVES}_{axis}/{rest}".rstrip("/")
                found.setdefault((str(row.keys[player]), name), []).append(Point(name, int(at), row.value))
    of_policies: dict[str, list[Point]] = {}
    for (policy, _), points in found.items():
        if len(points) > 1:
            of_policies.setdefault(policy, []).extend(points)
    return of_policies


def _without(effect: str, key: str) -> str:
    """The template of an effect without the part that has a key."""
    return "/".join(part for part in effect.split("/") if f"{{{key}" not in part)


def datasets(signature: str) -> list[DatasetInput]:
    """The texts that a signature names, as MLflow's datasets: name, hash and where they come from."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    from kvlab.workbench.store.signatures import texts

    return [
        DatasetInput(
            Dataset(name, digest[:DIGEST], "kvlab document", json.dumps({"document": name})),
            [InputTag("mlflow.data.context", "evaluation")],
        )
        for name, digest in texts(signature)
    ]


def verdicts(found: Iterable[str]) -> dict[str, str]:
    """Tags with the number of claims of each verdict, such as `verdict.fails`: "2"."""
    counted = Counter(found)
    return {f"{VERDICT}{state.replace(' ', '_')}": str(counted[state]) for state in papers.VERDICTS}
