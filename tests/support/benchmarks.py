"""The programs in benchmarks/, which are no package, as modules of a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from support.paths import ROOT


@contextmanager
def imported(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[ModuleType]]:
    """Benchmarks by their names, importable as long as this lasts."""
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    yield [importlib.import_module(name) for name in names]
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def invoked(main: Callable[..., None], *arguments: str) -> Result:
    """A benchmark's function run as the command that it is."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


def cells(done: Result) -> list[list[str]]:
    """The rows of the table in Markdown that a benchmark printed, its header and the line below it among them."""
    assert done.exit_code == 0, done.output
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
