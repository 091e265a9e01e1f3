"""Reads a notebook: its `parameters` cell, and the code that decides its numbers."""

from __future__ import annotations

import ast
import functools
import json
import os
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib.files import parsed, read_text


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook file. Raises KvlabError where it is missing or no notebook."""
    if not os.path.isfile(path):
        raise KvlabError(f"the notebook {path.name} is missing: there is no file {path}")
    try:
        content = parsed(read_text(path))["cells"]
    except (json.JSONDecodeError, LookupError, TypeError):
        content = None
    if not isinstance(content, list) or not all(map(_is_cell, content)):
        raise KvlabError(f"{path} is not a notebook (version 4 of the format)")
    return content


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, dict):
        return False
    metadata, text = cell.get("metadata", {}), cell.get("source", "")
    lines = text if isinstance(text, list) else [text]
    return (
        isinstance(metadata, dict)
        and isinstance(metadata.get("tags", []), list)
        and all(isinstance(line, str) for line in lines)
    )


def source(cell: dict[str, Any]) -> str:
    """The text of a cell, which the format stores as a string or as a list of lines."""
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(text)


def is_parameters(cell: dict[str, Any]) -> bool:
    """Whether a cell carries the tag `parameters`."""
    return "parameters" in cell.get("metadata", {}).get("tags", [])


def code(path: Path) -> list[str]:
    """The sources of the code cells, in order."""
    return [source(cell) for cell in cells(path) if cell.get("cell_type") == "code"]


RUN = "run"
"""The name of the run in notebooks."""
SHOWING = ("figure", "tell")
"""Methods of a run that only show what was found."""
SHOWN = ("figure", "text")
"""Arguments of `run.record` that only show what was found."""
RENDERING = ("kvlab.render",)
"""Packages whose functions only show what was found."""


def measuring_code(path: Path) -> list[str]:
    """The sources of the code cells, in order, without the parts that only show results.

    Those are comments, layout, imports of `kvlab.render`, and statements that are a call of `run.figure` or `run.tell`.
    The arguments `figure` and `text` of `run.record` are left out, too.

    A cell that is not plain Python, as with magics, stays as it is.
    """
    return [text for cell in code(path) if (text := _measuring(cell))]


@functools.lru_cache(maxsize=1024)  # a sweep asks for the same cells with each of its jobs
def _measuring(text: str) -> str:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and method_of_run(node) == "record":
            node.keywords = [each for each in node.keywords if each.arg not in SHOWN or _assigns(each)]
    tree.body = [statement for statement in tree.body if not _only_shows(statement)]
    return ast.unparse(tree)


def _only_shows(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return any(f"{statement.module}.".startswith(f"{name}.") for name in RENDERING)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or _assigns(call):
        return False
    only_a_name = len(call.args) == 1 and not call.keywords
    return method_of_run(call) in SHOWING or (method_of_run(call) == "record" and only_a_name)


def method_of_run(call: ast.Call) -> str:
    """The name of the method of a notebook's `run` that a call calls; empty for any other call."""
    of_run = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == RUN
    return call.func.attr if of_run and isinstance(call.func, ast.Attribute) else ""


def _assigns(node: ast.AST) -> bool:
    return any(isinstance(each, ast.NamedExpr) for each in ast.walk(node))


def parameters_of(path: Path) -> dict[str, Any]:
    """Name -> default of the one cell tagged `parameters`; None where the default is not a plain literal.

    Raises KvlabError if no cell, or more than one, carries the tag, or the cell is not Python.
    """
    tagged = [cell for cell in cells(path) if is_parameters(cell)]
    if len(tagged) != 1:
        raise KvlabError(f"{path.name} must have one cell tagged `parameters`, and has {len(tagged)}")
    try:
        tree = ast.parse(source(tagged[0]))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"{error.msg} in line {error.lineno}" if isinstance(error, SyntaxError) else "it cannot be read"
        raise KvlabError(f"the parameters cell of {path.name} is not Python: {where}") from None
    return _assigned(tree)


def reads(path: Path, name: str) -> bool:
    """Whether the code of a notebook reads the variable `name`; a parameter that it only declares changes no number.

    Cells that are not plain Python, as with magics, count as reading whatever they mention.
    """
    return any(_reads(text, name) for text in code(path))


def _reads(text: str, name: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return name in text
    return any(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in nodes)


def plain_values(code: str) -> dict[str, Any] | None:
    """Name -> value of a cell that only assigns plain values, as a parameters cell does; None for other cells."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not tree.body or not all(isinstance(statement, (ast.Assign, ast.AnnAssign)) for statement in tree.body):
        return None
    return _assigned(tree)


def _assigned(tree: ast.Module) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                values[target.id] = _literal(value)
    return values


def _is_dict_by_names(call: ast.Call) -> bool:
    """Whether a call is like `dict(tokens=24)`."""
    is_dict = isinstance(call.func, ast.Name) and call.func.id == "dict"
    return is_dict and not call.args and all(keyword.arg for keyword in call.keywords)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and _is_dict_by_names(node):
        return {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
    return list(value) if isinstance(value, tuple) else value
