"""Who imports whom in the package, and in its tests."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import kvlab
from support.paths import ROOT


def sources() -> list[Path]:
    return sorted((ROOT / "kvlab").rglob("*.py"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a file imports, in full, wherever in the file."""
    found = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@functools.cache
def _attributes(path: Path) -> frozenset[str]:
    """`kvlab.X` for each such expression in a file: after `import kvlab`, `kvlab.replay` comes from somewhere, too."""
    return frozenset(
        f"kvlab.{node.attr}"
        for node in _nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvlab"
    )


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def behind(name: str, files: Collection[str]) -> str | None:
    """The file of the package that a full name comes from; of a public name of `kvlab`, the file that it is made in."""
    parts = name.split(".")
    if parts[0] != "kvlab" or len(parts) == 1:
        return None
    if parts[1] == "__version__":
        return "kvlab.version"
    home = next((home for home, names in kvlab._HOMES.items() if parts[1] in names), None)
    if home:
        return f"kvlab.{home}"
    return next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in files)


def arrows() -> dict[str, set[str]]:
    """File -> the files that it imports from anywhere in it, also for a type checker alone; without `kvlab` itself."""
    files = {module(path): path for path in sources()}
    found = {name: used_by(path, files) - {name} for name, path in files.items()}
    del found["kvlab"]
    return found


def used_by(path: Path, files: Collection[str]) -> set[str]:
    """The files of the package that a file imports."""
    return {file for name in imports(path) | _attributes(path) if (file := behind(name, files))}


def reached(changed: Collection[str], drawn: Mapping[str, Collection[str]]) -> set[str]:
    """Changed files and all files that import one of them, directly or through others.

    Args:
        changed: names of files.
        drawn: file -> the files that it imports.
    """
    users: dict[str, set[str]] = {}
    for name, used in drawn.items():
        for other in used:
            users.setdefault(other, set()).add(name)
    found, todo = set(), list(changed)
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += users.get(name, ())
    return found
