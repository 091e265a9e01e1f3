"""What MLflow's own pages show of a run besides its numbers: curves, datasets, and verdicts in its tags."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvlab import papers

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

    from kvlab.analyses.findings import Row

AXES = ("budget", "step", "length", "window", "tokens")
"""Keys of effects that a curve runs over, where they are whole numbers."""
CURVES = "over"
DIGEST = 36  # characters, the most that MLflow stores


class Point(NamedTuple):
    """A point of a curve: MLflow draws the metric `name` over its steps."""

    name: str
    step: int
    value: float


def curves(rows: Iterable[Row]) -> list[Point]:
    """The rows whose effect has a key of `AXES`, as `over_budget/EFFECT` with the key's value as step."""
    found = []
    for row in rows:
        fields = [name for _, name, _, _ in string.Formatter().parse(row.effect) if name]
        axis = next((name for name in AXES if name in fields), None)
        if axis is None:
            continue
        at = row.keys[axis]
        if isinstance(at, (int, float)) and at == int(at):
            rest = _without(row.effect, axis).format(**row.keys)
            found.append(Point(f"{CURVES}_{axis}/{rest}", int(at), row.value))
    return found


def _without(effect: str, axis: str) -> str:
    """The template of an effect without a key and the slash before it."""
    parts = [part for part in effect.split("/") if f"{{{axis}" not in part]
    return "/".join(parts)


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
    return {f"verdict.{state.replace(' ', '_')}": str(counted[state]) for state in papers.VERDICTS}
