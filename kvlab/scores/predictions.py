"""Predictions in LongBench's output format, as anybody's run of the benchmark leaves them, read from a JSONL file."""

from __future__ import annotations

import os
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib.files import brief, expanded, objects


def read_predictions(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The predictions of a file with {"pred": text, "answers": [text], "all_classes": [text] or null} on each line.

    Empty lines are passed over, further fields are let through. Raises KvlabError, with file and line number, for
    anything else, and for a file without predictions.
    """
    path = expanded(path)
    predictions = [_prediction(fields, f"{path}, line {number}") for number, fields in objects(path, "prediction")]
    if not predictions:
        raise KvlabError(f"{path} is empty: there are no predictions in it to score")
    return predictions


def _prediction(fields: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(fields.get("pred"), str):
        raise KvlabError(f"{where}: 'pred' must be a text, {_is(fields, 'pred')}")
    if not _texts(fields.get("answers")):
        raise KvlabError(f"{where}: 'answers' must be a list of texts, {_is(fields, 'answers')}")
    if fields.get("all_classes") is not None and not _texts(fields["all_classes"]):
        raise KvlabError(f"{where}: 'all_classes' must be a list of texts or null, {_is(fields, 'all_classes')}")
    return fields


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is(fields: dict[str, Any], key: str) -> str:
    return f"and is {brief(fields[key])}" if key in fields else "and is missing"
