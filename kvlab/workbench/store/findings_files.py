"""Findings as files: tidy rows as JSON, tables as parquet. Figures and sentences are made from them again later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.analyses.findings import Findings, Row
from kvlab.errors import KvlabError
from kvlab.lib.files import parsed, read_text

FOLDER = "findings"
FRAME = "DataFrame"
SUFFIX = ".json"


def write(found: Findings | pd.DataFrame, folder: Path, name: str) -> None:
    """Write NAME.json, and a parquet file for each table.

    A table keeps its index; a subclass of `Findings` keeps attributes of its own that are tables or plain JSON.
    """
    own = {"table": found} if isinstance(found, pd.DataFrame) else vars(found)
    tables = {key: value for key, value in own.items() if isinstance(value, pd.DataFrame)}
    for key, table in tables.items():
        table.to_parquet(folder / f"{name}.{key}.parquet")
    kept: dict[str, Any] = {"kind": FRAME, "tables": sorted(tables)}
    if isinstance(found, Findings):
        kept["kind"] = type(found).__name__
        kept["rows"] = [vars(row) for row in found.rows]
        kept["own"] = {key: value for key, value in own.items() if key not in tables and key != "_rows"}
    text = json.dumps(kept, ensure_ascii=False, default=_plain)
    (folder / f"{name}{SUFFIX}").write_text(text, encoding="utf-8")


def read(folder: Path, name: str) -> Findings | pd.DataFrame:
    """Read the files of `write`. Raises KvlabError where the files are damaged or of a class that is not imported."""
    try:
        kept = parsed(read_text(folder / f"{name}{SUFFIX}"))
        tables = {key: pd.read_parquet(folder / f"{name}.{key}.parquet") for key in kept["tables"]}
        if kept["kind"] == FRAME:
            return tables["table"]
        rows = [
            Row(**{**row, "keys": {key: _key(value) for key, value in row["keys"].items()}}) for row in kept["rows"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise KvlabError(f"the findings {name!r} cannot be read: {error}") from error
    kind = next((each for each in _kinds(Findings) if each.__name__ == kept["kind"]), None)
    if kind is None:
        raise KvlabError(f"the findings {name!r} are of the class {kept['kind']}, which the notebook does not import")
    found = object.__new__(kind)
    vars(found).update(kept["own"] | tables, _rows={row.metric: row for row in rows})
    return found


def _kinds(kind: type[Findings]) -> Iterator[type[Findings]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a number of numpy
        return value.item()
    if hasattr(value, "items"):
        return dict(value)
    raise KvlabError(f"findings hold a {type(value).__name__}, which does not fit into JSON")


def _key(value: Any) -> Any:
    """A key of a row as it was: JSON makes a list of a tuple, and no list can be a key."""
    return tuple(map(_key, value)) if isinstance(value, list) else value
