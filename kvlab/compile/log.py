"""The log of all trials: a JSON line for each prompt, from which a run that was cut off goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib.files import parsed, why


class Journal:
    """Lines of a JSONL file, found by their keys; a line is on disk as soon as it is written.

    Without a path nothing is kept.
    """

    def __init__(self, path: Path | None, lines: dict[str, dict[str, Any]], file: Any = None):
        self.path, self._lines, self._file = path, lines, file

    @classmethod
    @contextmanager
    def open(cls, path: str | Path | None) -> Iterator[Journal]:
        """The journal at `path`, for this process alone; half a line at its end is taken out.

        Raises:
            KvlabError: another process writes it, it cannot be written, or a line of it belongs to no journal.
        """
        if path is None:
            yield cls(None, {})
            return
        from filelock import FileLock, Timeout

        path = Path(path)
        with ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path.with_name(f".{path.name}.lock"), timeout=0))
                lines = _read(path)
                file = stack.enter_context(path.open("a", encoding="utf-8"))
            except Timeout:
                raise KvlabError(f"another compilation is writing {path}; wait for it, or name another log") from None
            except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
                raise KvlabError(f"cannot write {path}: {why(error)}") from None
            yield cls(path, lines, file)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._lines.get(key)

    def add(self, key: str, line: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line, and return it as a later run will read it."""
        text = json.dumps({"key": key, **line})
        if self._file is not None:
            self._file.write(text + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._lines[key] = json.loads(text)
        return self._lines[key]


def key(*parts: Any) -> str:
    """The name of a line: a hash of everything that its numbers depend on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    lines = {}
    for number, line in enumerate(content[:whole].decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            fields = parsed(line)
            lines[fields["key"]] = fields
        except (json.JSONDecodeError, TypeError, KeyError):
            raise KvlabError(f"{path}, line {number} is no line of a log of `kvlab compile`; name another") from None
    if whole < len(content):
        # Half a line of a killed run is cut off; but a file with no line of ours may be somebody else's.
        if not lines and not content.startswith(b'{"key": "'):
            raise KvlabError(f"{path} is no log of `kvlab compile`; name another")
        with path.open("r+b") as file:
            file.truncate(whole)
    return lines
