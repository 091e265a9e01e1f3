"""Answers on disk, one line each, and how they are read again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvlab.errors import KvlabError
from kvlab.lib.files import parsed, why


@dataclass
class Answer:
    """One line of the results. Times in seconds, sizes in bytes; `prefill_seconds` is that of the shared prefill."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    key: str
    task: str
    example: str
    policy: str
    budget: int | float | None
    compress_at: str
    prediction: str
    answers: list[str]
    scores: dict[str, float]
    metric: str
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    seconds: float
    kv_bytes: int
    aux_bytes: int
    uncompressed_bytes: int = 0
    storage: str = "as_is"
    marks: dict[str, Any] = field(default_factory=dict)
    signature: str = ""


ANSWER = TypeAdapter(Answer)


def read(path: str | Path, mend: bool = False) -> list[Answer]:
    """The answers in a results file, without a last line that was cut off.

    Args:
        mend: remove such a half line from the file.

    Raises:
        KvlabError: a line that is no answer, with its number.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise KvlabError(f"cannot read {path}: {why(error).lower()}") from None
    whole = content.rfind(b"\n") + 1
    if mend and whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    answers = []
    for number, line in enumerate(content[:whole].decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            answers.append(ANSWER.validate_python(parsed(line)))
        except (json.JSONDecodeError, ValidationError) as error:
            raise KvlabError(
                f"{path}, line {number} is no answer of an evaluation ({_problem(error)}); name another file"
            ) from None
    return answers


def _problem(error: json.JSONDecodeError | ValidationError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
