"""The project's folder, its version, and the state of its code."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.lib.workspace import made_by, root, workspace

__all__ = ["checkout", "code_hash", "commit", "root", "version"]

# Files and folders of the package that only show results and cannot change a number: no part of a content key.
PRESENTATION = (
    "__main__.py",
    "cli.py",
    "commands",
    "papers",
    "workbench/report",
    "workbench/jobs/progress.py",
)


def checkout() -> Path:
    """`root`, which has experiments. Raises KvlabError, with what to do, where there are none."""
    folder = root()
    if next((folder / "experiments").glob("*.yaml"), None) is None:
        raise KvlabError(
            f"there are no experiments in {folder}: they are files in a workspace or a checkout of kvlab, in its "
            "folder `experiments`; change into one, name it in KVLAB_ROOT, or make one with `kvlab new my-lab`"
        )
    return folder


def version() -> str:
    """The version of the installed package; "0+unknown" for a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("kvlab")
    except PackageNotFoundError:
        return "0+unknown"


def other_version() -> str | None:
    """A sentence where another version of kvlab made the workspace in use; else None."""
    folder = workspace()
    maker = made_by(folder) if folder else None
    if maker is None or maker == version():
        return None
    return f"kvlab {maker} made this workspace, and kvlab {version()} runs it"


def commit(folder: Path | None = None) -> str | None:
    """The git commit of the project, with "+changes" if its tracked files differ from it; None without git."""
    folder = folder or root()
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
        if head.returncode:
            return None
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


@functools.cache
def code_hash() -> str:
    """sha256 over the package's Python source, less what only shows results (`PRESENTATION`)."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not any(path.is_relative_to(package / shown) for shown in PRESENTATION):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
