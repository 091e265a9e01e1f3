"""The programs in benchmarks/, which are no package, as modules of a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from support.paths import ROOT


@contextmanager
def imported(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[ModuleType]]:
    """Benchmarks by their names, importable as long as this lasts."""
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    yield [importlib.import_module(name) for name in names]
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
