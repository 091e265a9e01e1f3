"""Tables that are kept as CSV next to or within a ledger: read as texts, written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib.files import replacing


def read(path: Path, columns: Sequence[str], what: str = "kept ledger") -> list[dict[str, str]]:
    """The lines of a CSV that has these columns, as texts; `what` it should be, for the message.

    Raises:
        KvlabError: it cannot be read, or lacks a column.
    """
    import pandas

    try:
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise KvlabError(f"cannot read the {what} {path}: {error}") from error
    if missing := [name for name in columns if name not in frame]:
        raise KvlabError(f"{path} is no {what}: it has no column {missing[0]!r}")
    return frame.to_dict("records")


def write(path: Path, lines: Iterable[Mapping[str, Any]], columns: list[str]) -> None:
    """Write lines as `read` reads them, whole or not at all. Raises OSError where the file cannot be written."""
    import pandas

    with replacing(path) as part:
        pandas.DataFrame(lines, columns=columns).to_csv(part, index=False)
