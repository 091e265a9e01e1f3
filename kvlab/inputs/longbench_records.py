"""Records of LongBench-format JSONL files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib.files import brief, expanded, objects


@dataclass(frozen=True)
class Record:
    """One example in LongBench's format; `prompt` is the whole prompt where the file has it, else None."""

    task: str
    id: str
    prompt: str | None
    context: str
    input: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] | None
    length: int | None
    line: int


def read(path: str | os.PathLike) -> Iterator[Record]:
    """The records of a LongBench-format JSONL file, or of all `*.jsonl` files of a folder in order of name.

    Fields: task or dataset, id or _id, prompt and/or (context, input), answers, all_classes, length; others are let
    through. Raises KvlabError, with file and line number, for a line that is not such a record.
    """
    path = expanded(path)
    files = sorted(path.glob("*.jsonl")) if os.path.isdir(path) else [path]
    if not files:
        raise KvlabError(f"the folder {path} has no .jsonl files")
    for file in files:
        for number, fields in objects(file, "record"):
            yield _record(fields, number, file)


def _record(fields: dict[str, Any], number: int, file: Path) -> Record:
    def refuse(why: str) -> KvlabError:
        return KvlabError(f"{file}, line {number}: {why}")

    def text(*keys: str) -> str | None:
        for key in keys:
            if fields.get(key) is not None:
                if not isinstance(fields[key], str):
                    raise refuse(f"{key!r} must be text, not {brief(fields[key])}")
                return fields[key]
        return None

    def texts(key: str) -> tuple[str, ...] | None:
        if fields.get(key) is None:
            return None
        if not isinstance(fields[key], list) or not all(isinstance(item, str) for item in fields[key]):
            raise refuse(f"{key!r} must be a list of texts, not {brief(fields[key])}")
        return tuple(fields[key])

    prompt, context, answers, length = text("prompt"), text("context"), texts("answers"), fields.get("length")
    if not (prompt or context or "").strip():
        raise refuse("a record needs a 'prompt' or a 'context' that is not empty")
    if answers is None:
        raise refuse("a record needs 'answers', a list of texts")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        raise refuse(f"'length' must be a whole number, not {brief(length)}")
    return Record(
        task=text("task", "dataset") or file.stem,
        id=text("id", "_id") or f"{file.stem}-{number}",
        prompt=prompt,
        context=context or "",
        input=text("input") or "",
        answers=answers,
        all_classes=texts("all_classes"),
        length=length,
        line=number,
    )
