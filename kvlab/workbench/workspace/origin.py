"""The version of kvlab that made a workspace, against the installed one."""

from __future__ import annotations

from pathlib import Path

from kvlab.lib import workspace
from kvlab.workbench import project
from kvlab.workbench.workspace.rendering import render

WRITTEN = ("Makefile", "conftest.py", "tests/test_project.py")
"""Files that `kvlab new` writes alike into every workspace."""


def other_version() -> str | None:
    """A sentence where another version of kvlab made the workspace in use; else None."""
    folder = workspace.workspace()
    maker = workspace.made_by(folder) if folder else None
    if maker is None or maker == project.version():
        return None
    return f"kvlab {maker} made this workspace, and kvlab {project.version()} runs it"


def changed(folder: Path) -> list[str]:
    """Those of `WRITTEN` that are missing or differ from what the installed kvlab writes."""
    return [name for name in WRITTEN if _text(folder / name) != render(f"project/{name}.j2")]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
