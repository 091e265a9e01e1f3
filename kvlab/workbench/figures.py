"""The former name of `kvlab.render.figures`, for notebooks that import from here."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name.startswith("__"):
        raise AttributeError(name)
    warnings.warn(
        f"kvlab.workbench.figures is kvlab.render.figures now: from kvlab.render.figures import {name}",
        FutureWarning,
        stacklevel=2,
    )
    return importlib.import_module(f"kvlab.render.figures.{name}")
