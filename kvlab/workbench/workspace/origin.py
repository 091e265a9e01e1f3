"""Files of a workspace that differ from those that the installed kvlab writes."""

from __future__ import annotations

from pathlib import Path

from kvlab.workbench.workspace.rendering import render

WRITTEN = ("Makefile", "conftest.py", "tests/test_project.py")
"""Files that `kvlab new` writes alike into every workspace."""


def changed(folder: Path) -> list[str]:
    """Those of `WRITTEN` that are missing or differ from what the installed kvlab writes."""
    return [name for name in WRITTEN if _text(folder / name) != render(f"project/{name}.j2")]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
