"""Scores of tasks that are kept as data next to a ledger (`boards`): means over a live model's answers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.evaluation import Answer, by_turn, summary
from kvlab.lib.files import why
from kvlab.workbench import project
from kvlab.workbench.report import csv_tables
from kvlab.workbench.report.ledger_models import Subject
from kvlab.workbench.report.task_scores import COLUMNS, FOLDER, KEY, read

PLACE = re.compile(r"'(?:/|[A-Za-z]:\\\\)[^']*?([^'/\\]+)[/\\]*'")
"""A quoted path from the root on, as parameters print it, and its last part."""


def keep(folder: Path, answers: Sequence[Answer], machine: str) -> Path:
    """Write the mean scores of one model's answers as FOLDER/tasks/MODEL.csv; what was kept of others stays.

    There is a line for each task, policy, budget, storage and moment of compression. There are further lines for each
    kind of a task's examples, each of its modes, and each turn of a mode. A line has the mean score with its 95 %
    interval. It has the difference from the full cache on the same examples, with its own interval. It has the stored
    bytes, the seconds for an answer, and the source of the numbers.

    Args:
        machine: what it ran on, in words.

    Raises:
        KvlabError: there are no answers, the file cannot be written, or it is of other weights.
    """
    if not answers:
        raise KvlabError("there are no answers to keep")
    model = answers[0].signature.split("|")[0]
    path = folder / FOLDER / f"{Subject(model.split()[0]).label}.csv"
    lines = {_key(line): line for line in read(path)}
    if other := {line["model"] for line in lines.values()} - {model}:
        raise KvlabError(f"{path} is of the model {min(other)!r}, not of {model!r}: keep one of them elsewhere")
    commit = project.commit() or ""
    for settings, mine in _by_settings(answers).items():
        version = mine[0].signature.split("|")[-1]
        about = {"model": model, "settings": settings, "commit": commit, "machine": machine, "version": version}
        for row in _rows(mine):
            line = _texts({**row, **about})
            lines[_key(line)] = line
    try:
        csv_tables.write(path, (lines[key] for key in sorted(lines)), COLUMNS)
    except OSError as error:
        raise KvlabError(f"cannot keep the scores in {folder}: {why(error)}") from error
    return path


def _rows(answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    """Means over all answers of a task, over each kind and each mode where there are several, and over each turn."""
    yield from summary(answers).to_dict("records")
    for mark in ("kind", "mode"):
        if len({answer.marks.get(mark) for answer in answers}) > 1:
            yield from summary(answers, mark).to_dict("records")
    for mode, part in by_turn(answers).items():
        yield from ({**row, "mode": mode} for row in summary(part, "turn").to_dict("records"))


def _by_settings(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """A task with its parameters, as a signature names it -> its answers.

    Of a file or folder only the name is left: where it lay on one machine tells others nothing.
    """
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        settings = PLACE.sub(r"'\1'", answer.signature.split("|")[1])
        found.setdefault(settings, []).append(answer)
    return found


def _key(line: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in KEY)


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """A row's texts in the file: numbers to six digits, and empty where there is no number."""
    found = {}
    for name in COLUMNS:
        value = row.get(name)
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        found[name] = "" if missing else f"{value:.6g}" if isinstance(value, float) else str(value)
    return found
