"""The log of all trials: JSON lines while learning, then one compressed table to ship and to learn from again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.errors import KvlabError
from kvlab.lib import extras
from kvlab.lib.files import first_line, parsed, replacing, why
from kvlab.methods._base.lookup import SHIPPED_TABLES

if TYPE_CHECKING:
    import pandas as pd

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


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


@dataclass(frozen=True)
class Samples:
    """All joint actions of one phase ("heads" or "risk") with what came of them.

    Attributes:
        actions: int `[samples, states]`: index of the action of each (layer, KV head), or of each layer.
        change: `[samples]`, mean NLL of the continuation minus that with the full cache, in nats.
        context: int `[samples]`, which context.
        names, entropy, perplexity: of the contexts.
        retained: int `[samples, layers]`, candidates that reached the thresholds (risk phase; empty otherwise).
    """

    actions: np.ndarray
    change: np.ndarray
    context: np.ndarray
    names: list[str]
    entropy: np.ndarray
    perplexity: np.ndarray
    retained: np.ndarray

    @classmethod
    def of(cls, lines: list[dict[str, Any]]) -> Samples:
        """From the journal's lines of a phase."""
        actions = np.array([[DIGITS.index(d) for d in row] for line in lines for row in line["actions"]], dtype=int)
        change = np.array([nll - line["full"] for line in lines for nll in line["nll"]])
        context = np.array([i for i, line in enumerate(lines) for _ in line["nll"]], dtype=int)
        retained = np.array([row for line in lines for row in line.get("retained", [])], dtype=int)
        entropy, perplexity = (np.array([line[name] for line in lines]) for name in ("entropy", "perplexity"))
        return cls(actions, change, context, [line["context"] for line in lines], entropy, perplexity, retained)

    def __len__(self) -> int:
        return len(self.change)


def save(path: str | Path, phases: Mapping[str, list[dict[str, Any]]]) -> Path:
    """Write the lines of all phases as one table, a row for each joint action: parquet, a few bytes a row."""
    extras.need("pyarrow")
    import pandas as pd

    rows = [
        {
            "phase": phase,
            "context": line["context"],
            "entropy": line["entropy"],
            "perplexity": line["perplexity"],
            "full": line["full"],
            "nll": nll,
            "actions": actions,
            "retained": line["retained"][number] if "retained" in line else [],
        }
        for phase, lines in phases.items()
        for line in lines
        for number, (nll, actions) in enumerate(zip(line["nll"], line["actions"], strict=True))
    ]
    with replacing(path) as temporary:
        pd.DataFrame(rows).to_parquet(temporary, index=False, compression="zstd")
    return Path(path)


def load(path_or_name: str | Path) -> dict[str, Samples]:
    """The samples of each phase in a table that `save` wrote, or in the one that comes with kvlab for a model's name.

    Raises:
        KvlabError: there is no such file, it is not such a table, or pyarrow is not installed.
    """
    extras.need("pyarrow")
    import pandas as pd

    shipped = {file.name: file for file in SHIPPED_TABLES.glob("*.parquet")}
    path = shipped.get(f"{path_or_name}-log.parquet") or Path(path_or_name)
    if not os.path.isfile(path):  # pandas would also read a folder, with all files in it
        raise KvlabError(f"cannot read {path}: no such file")
    try:
        table = pd.read_parquet(path)
        samples = {str(phase): Samples.of(_lines(rows)) for phase, rows in table.groupby("phase", sort=False)}
    except Exception as error:
        raise KvlabError(f"{path} is no log of `kvlab compile`: {first_line(error)}") from None
    if not samples:
        raise KvlabError(f"{path} is no log of `kvlab compile`: there is nothing in it")
    return samples


def _lines(rows: pd.DataFrame) -> list[dict[str, Any]]:
    lines = []
    for name, part in rows.groupby("context", sort=False):
        first = part.iloc[0]
        line = {"context": name, "nll": part["nll"].tolist(), "actions": part["actions"].tolist()}
        line |= {key: float(first[key]) for key in ("entropy", "perplexity", "full")}
        retained = [list(map(int, row)) for row in part["retained"]]
        lines.append(line | ({"retained": retained} if retained[0] else {}))
    return lines
