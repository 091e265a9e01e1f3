"""Sets of LongBench answers: read from a folder or a file of many tasks, scored, and compared prompt by prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab import scores
from kvlab.errors import KvlabError
from kvlab.lib.files import expanded
from kvlab.lib.intervals import bounded

Answers = dict[str, list[dict[str, Any]]]
"""Task -> its predictions, in LongBench's order of tasks."""

Points = Sequence[float]
Pairs = dict[str, list[tuple[int, int]]]
"""Task -> the places of two answers to one prompt, in the first set and in the second."""

RESAMPLES = 10_000
MEAN = "mean"
"""What the row over all tasks is called."""

SUFFIXES = (".jsonl", ".jsonl.gz")
Advance = Callable[[str], None]
"""Called with its task when an answer has been scored."""


@dataclass(frozen=True)
class Scored:
    """The score of a set's answers to one task, in percent; `low` and `high` are its 95 % interval over prompts."""

    task: str
    n: int
    score: float
    low: float
    high: float


@dataclass(frozen=True)
class Compared:
    """Two sets' scores of one task over the prompts that both answer, in percent.

    `difference` is the first less the second; `low` and `high` are the 95 % interval of a bootstrap over prompts.
    """

    task: str
    n: int
    first: float
    second: float
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`ahead` or `behind`, of the first set, where the interval lies on one side of 0; else `open`."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "open"


def read_sets(path: str | os.PathLike) -> dict[str, Answers]:
    """The sets of answers in a folder, or in one file whose lines name their task: name -> answers by task.

    A file `TASK.jsonl` belongs to the folder's own set, and `NAME__TASK.jsonl` to the set NAME. In any other file each
    line has a field `task`, and the set has the file's name. Files may be compressed (`.jsonl.gz`).

    Raises:
        KvlabError: there are no answers, a line is no prediction, or a line's task is unknown or not its file's.
    """
    path = expanded(path)
    if not path.exists():
        raise KvlabError(f"there is no file or folder {path}")
    files = [each for each in sorted(path.iterdir()) if each.name.endswith(SUFFIXES)] if path.is_dir() else [path]
    sets: dict[str, Answers] = {}
    for file in files:
        name, task = _named(file)
        mine = sets.setdefault(name or path.resolve().name, {})
        for number, prediction in enumerate(scores.read_predictions(file), 1):
            mine.setdefault(_task(prediction, task, f"{file}, prediction {number}"), []).append(prediction)
    if not sets:
        raise KvlabError(f"{path} holds no {' or '.join(SUFFIXES)} files of answers")
    order = list(scores.LONGBENCH)
    return {name: {task: mine[task] for task in sorted(mine, key=order.index)} for name, mine in sets.items()}


def read_set(path: str | os.PathLike) -> tuple[str, Answers]:
    """The one set of answers that a folder or file holds, with its name. Raises KvlabError where it holds several."""
    sets = read_sets(path)
    if len(sets) > 1:
        raise KvlabError(f"{path} holds {len(sets)} sets of answers ({', '.join(sets)}): name the file of one of them")
    return next(iter(sets.items()))


def _named(file: Path) -> tuple[str, str]:
    """Read the set and the task from a file's name: the set is "" for a task alone, the task "" where none is known."""
    stem = file.name.removesuffix(".gz").removesuffix(".jsonl")
    name, _, task = stem.rpartition("__")
    return (name, task) if task in scores.LONGBENCH else (stem, "")


def _task(prediction: Mapping[str, Any], of_file: str, where: str) -> str:
    task = prediction.get("task", of_file)
    if not isinstance(task, str) or not task:
        raise KvlabError(f"{where}: the file's name is no LongBench task, and the line has no field 'task'")
    if of_file and task != of_file:
        raise KvlabError(f"{where}: the line's task is {task!r}, the file's is {of_file!r}")
    try:
        scores.convention(task)
    except KvlabError as error:
        raise KvlabError(f"{where}: {error}") from error
    return task


def score_set(answers: Answers, advance: Advance | None = None) -> dict[str, list[float]]:
    """Task -> the score of each answer, in [0, 1]. Raises KvlabError as `kvlab.scores.score`, with task and number."""
    found: dict[str, list[float]] = {}
    for task, predictions in answers.items():
        try:
            found[task] = scores.score_each(task, _counted(task, predictions, advance))
        except KvlabError as error:
            raise KvlabError(f"{task}, {error}") from error
    return found


def _counted(task: str, predictions: Sequence[dict], advance: Advance | None) -> Iterator[dict]:
    """The predictions; `advance` is called when the next one is asked for, since the last has been scored then."""
    for each in predictions:
        yield each
        if advance:
            advance(task)


def summary(points: Mapping[str, Points]) -> list[Scored]:
    """A row for each task, and one of the mean over tasks, whose interval comes from a bootstrap over prompts."""
    rows = []
    for task, values in points.items():
        mean, (low, high) = bounded(values, 0.0, 1.0)
        rows.append(Scored(task, len(values), 100 * mean, 100 * low, 100 * high))
    middle = float(np.mean([row.score for row in rows]))
    drawn = np.mean([_resampled(task, np.asarray(values)) for task, values in points.items()], axis=0)
    return [*rows, Scored(MEAN, len(rows), middle, *_ends(100 * drawn))]


def compare(first: Answers, second: Answers, advance: Advance | None = None) -> list[Compared]:
    """The first set less the second, task by task over the prompts of both, and the mean over these tasks.

    Raises:
        KvlabError: as `matched` and `score_set`.
    """
    pairs = matched(first, second)
    points = [score_set({task: answers[task] for task in pairs}, advance) for answers in (first, second)]
    return paired(pairs, *points)


def matched(first: Answers, second: Answers) -> Pairs:
    """The answers of two sets to the same prompts: by the field `index`, by their order where a task has none.

    Raises:
        KvlabError: no task is in both, prompts cannot be matched, or matched prompts have other reference answers.
    """
    pairs = {task: _pairs(task, first[task], second[task]) for task in first if task in second}
    if not pairs:
        raise KvlabError("the two sets have no task in common")
    return pairs


def paired(pairs: Pairs, first: Mapping[str, Points], second: Mapping[str, Points]) -> list[Compared]:
    """The rows of `compare`, of scores by `score_set`. The row of the mean counts tasks as its `n`."""
    rows: list[Compared] = []
    draws: list[NDArray[np.floating]] = []
    for task, found in pairs.items():
        one = np.asarray([first[task][at] for at, _ in found])
        other = np.asarray([second[task][at] for _, at in found])
        draws.append(_resampled(task, one - other))
        means = 100 * float(one.mean()), 100 * float(other.mean()), 100 * float((one - other).mean())
        low, high = _ends(100 * draws[-1])
        rows.append(Compared(task, len(found), *means, low, high))
    mine, others = float(np.mean([row.first for row in rows])), float(np.mean([row.second for row in rows]))
    low, high = _ends(100 * np.mean(draws, axis=0))
    difference = float(np.mean([row.difference for row in rows]))
    return [*rows, Compared(MEAN, len(rows), mine, others, difference, low, high)]


def _pairs(task: str, first: list[dict], second: list[dict]) -> list[tuple[int, int]]:
    by_index = [_by_index(task, each) for each in (first, second)]
    if all(by_index):
        found = [(at, by_index[1][index]) for index, at in by_index[0].items() if index in by_index[1]]
    elif len(first) == len(second):
        found = [(at, at) for at in range(len(first))]
    else:
        raise KvlabError(
            f"{task} has {len(first)} answers in one set and {len(second)} in the other, and no field 'index' that "
            "says which belong together"
        )
    if not found:
        raise KvlabError(f"{task}: no 'index' is in both sets")
    for at, other in found:
        if first[at]["answers"] != second[other]["answers"]:
            raise KvlabError(
                f"{task}, predictions {at + 1} and {other + 1}: the reference answers differ, so that the prompts are "
                "not the same"
            )
    return found


def _by_index(task: str, predictions: list[dict]) -> dict[str, int]:
    """Index -> the place of its prediction; empty where none has an index."""
    found = {str(each["index"]): at for at, each in enumerate(predictions) if each.get("index") is not None}
    if len(found) < len(predictions) and len(found) != 0:
        raise KvlabError(f"{task}: an 'index' is missing or stands twice")
    return found


def _resampled(task: str, values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Means of resamples of the prompts; a task draws the same each time."""
    drawn = np.random.default_rng(list(scores.LONGBENCH).index(task))
    return np.concatenate([values[part].mean(axis=1) for part in _draws(drawn, len(values))])


def _draws(generator: np.random.Generator, n: int) -> Iterator[NDArray[np.integer]]:
    for _ in range(10):
        yield generator.integers(n, size=(RESAMPLES // 10, n))


def _ends(drawn: NDArray[np.floating]) -> tuple[float, float]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)
