"""The project in use, and the Python code of a workspace: classes of the user's own, found by the folder they lie in.

A workspace is a project whose pyproject.toml has the table `[tool.kvlab]` with `workspace = true`. Code of any other
folder is never run, whatever its files are called.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tomllib
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from kvlab.errors import KvlabError
from kvlab.lib.files import digest, expanded, first_line, read_text
from kvlab.lib.parameters import Parameters

Named = TypeVar("Named", bound=Parameters)

CODE = ("policies", "tasks")
"""The folders of a workspace whose Python files are its code."""
PACKAGE = "kvlab_workspace"
"""The package that these files are modules of: PACKAGE.policies.NAME."""
_reading: set[str] = set()


def root() -> Path:
    """The nearest folder at or above the working directory with an `experiments/` folder, else the working directory.

    KVLAB_ROOT, if set, is taken instead.
    """
    if named := os.environ.get("KVLAB_ROOT"):
        return expanded(named).resolve()
    try:
        start = Path.cwd().resolve()
    except OSError:
        raise KvlabError("the folder that this runs in is gone; change into another") from None
    return next((folder for folder in (start, *start.parents) if (folder / "experiments").is_dir()), start)


def workspace(folder: Path | None = None) -> Path | None:
    """`folder`, or the project in use, if it is a workspace; else None.

    Raises KvlabError where its pyproject.toml is no TOML.
    """
    try:
        path = (folder or root()) / "pyproject.toml"
        found = path.stat()
    except (OSError, KvlabError):
        return None
    return path.parent if _table(path, found.st_mtime_ns, found.st_size).get("workspace") is True else None


@functools.lru_cache(maxsize=16)
def _table(path: Path, changed: int, size: int) -> Mapping[str, object]:
    """The table `[tool.kvlab]` of a pyproject.toml; size and time are there so that a change is seen."""
    try:
        table = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise KvlabError(f"{path} is not valid TOML: {first_line(error)}") from None
    tool = table.get("tool")
    mine = tool.get("kvlab") if isinstance(tool, dict) else None
    return mine if isinstance(mine, dict) else {}


def made_by(folder: Path) -> str | None:
    """The version of kvlab that made the workspace at `folder`; None where its pyproject.toml does not say it."""
    path = folder / "pyproject.toml"
    found = path.stat()
    version = _table(path, found.st_mtime_ns, found.st_size).get("made_by")
    return version if isinstance(version, str) else None


def files(part: str, pattern: str, folder: Path | None = None) -> list[Path]:
    """The files of a folder of the workspace (of that at `folder`, or the one in use), by name; none without one."""
    folder = workspace(folder)
    return sorted(path for path in (folder / part).glob(pattern) if path.is_file()) if folder else []


def code_hash(folder: Path | None = None, parts: Iterable[str] = CODE) -> str | None:
    """sha256 over the own code of the workspace, of that at `folder` or the one in use; None where there is none."""
    paths = [path for part in parts for path in files(part, "**/*.py", folder)]
    return digest((f"{path.parent.name}/{path.name}", path) for path in paths) if paths else None


def joined(shipped: Mapping[str, type[Named]], part: str, base: type[Named], kind: str) -> dict[str, type[Named]]:
    """kvlab's classes and those of the workspace, by name.

    A class of the workspace is a subclass of `base` with a `name`. Its file is in the folder `part` and has a name that
    does not begin with an underscore. A file that has changed is read again.

    Raises:
        KvlabError: a file that fails when it is read, or a name that is taken.
    """
    classes = dict(shipped)
    for module in _modules(part):
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__):
                continue
            if value.name in classes:
                whose = "kvlab's own" if value.name in shipped else "another of this workspace"
                raise KvlabError(f"{module.__file__}: the {kind} name {value.name!r} is taken by {whose}; take another")
            if value.name:
                classes[value.name] = value
    return classes


def _modules(part: str) -> tuple[ModuleType, ...]:
    folder = workspace()
    # A file that asks for a policy while it is read gets those that kvlab has.
    if folder is None or part in _reading:
        return ()
    found = [(path, path.stat()) for path in files(part, "**/*.py")]
    _reading.add(part)
    try:
        return _read(folder, part, tuple((path, facts.st_mtime_ns, facts.st_size) for path, facts in found))
    finally:
        _reading.discard(part)


@functools.lru_cache(maxsize=len(CODE))
def _read(folder: Path, part: str, found: tuple[tuple[Path, int, int], ...]) -> tuple[ModuleType, ...]:
    """The modules of a folder's files; the sizes and times of the files are there so that a change is seen."""
    _name_package(folder)
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{PACKAGE}.{part}.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    return tuple(
        _module(path, f"{PACKAGE}.{part}.{path.stem}")
        for path, _, _ in found
        if path.parent == folder / part and not path.name.startswith("_")
    )


def _name_package(folder: Path) -> None:
    """Make the workspace's files importable as PACKAGE.FOLDER.NAME, by each other and by notebooks."""
    known = sys.modules.get(PACKAGE)
    if known is None or list(known.__path__) != [str(folder)]:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        package = ModuleType(PACKAGE, "The Python files of the workspace in use.")
        package.__path__ = [str(folder)]
        sys.modules[PACKAGE] = package


def _module(path: Path, name: str) -> ModuleType:
    if not path.stem.isidentifier():
        raise KvlabError(f"{path}: a Python file's name has letters, digits and underscores alone; rename it")
    try:
        return importlib.import_module(name)
    # A script may even call sys.exit when it is imported.
    except (Exception, SystemExit) as error:
        raise KvlabError(
            f"{path}{_line(path, error)} cannot be read: {type(error).__name__}: {_said(error)}"
        ) from error


def _line(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _said(error: BaseException) -> str:
    return error.msg if isinstance(error, SyntaxError) else first_line(error)
