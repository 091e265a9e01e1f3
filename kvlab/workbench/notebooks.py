"""Reading a notebook: its `parameters` cell, and the code that decides its numbers."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook file. Raises KvlabError where it is missing or no notebook."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except FileNotFoundError:
        raise KvlabError(f"the notebook {path.name} is missing: there is no file {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise KvlabError(f"{path} is not a notebook (version 4 of the format)") from None
    return found


def source(cell: dict[str, Any]) -> str:
    """The text of a cell, which the format stores as a string or as a list of lines."""
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(text)


def code(path: Path) -> list[str]:
    """The sources of the code cells, in order."""
    return [source(cell) for cell in cells(path) if cell.get("cell_type") == "code"]


def parameters_of(path: Path) -> dict[str, Any]:
    """Name -> default of the one cell tagged `parameters`; None where the default is not a plain literal.

    Raises KvlabError if no cell, or more than one, carries the tag, or the cell is not Python.
    """
    tagged = [cell for cell in cells(path) if "parameters" in cell.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise KvlabError(f"{path.name} must have one cell tagged `parameters`, and has {len(tagged)}")
    try:
        tree = ast.parse(source(tagged[0]))
    except SyntaxError as error:
        where = f"{error.msg} in line {error.lineno}"
        raise KvlabError(f"the parameters cell of {path.name} is not Python: {where}") from None
    found: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = _literal(value)
    return found


def _literal(node: ast.expr) -> Any:
    by_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"
    if by_name and not node.args and all(keyword.arg for keyword in node.keywords):
        return {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return list(value) if isinstance(value, tuple) else value
