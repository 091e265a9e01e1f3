"""The project's folder, its version, and the state of its code."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.lib.files import digest
from kvlab.lib.workspace import made_by, root, workspace
from kvlab.version import __version__

__all__ = ["checkout", "code_hash", "commit", "root", "version"]

# Files and folders of the package that can change a number of a job: they make the content key. All else describes,
# renders or schedules.
MEASURING = (
    "analyses",
    "bench",
    "compile",
    "core",
    "errors.py",
    "evaluation",
    "inputs",
    "instruments",
    "lib",
    "live",
    "methods",
    "papers/figures",  # what an analysis recomputes from a paper's printed tables
    "replays",
    "scores",
    "tasks",
    "traces",
    "workbench/experiments/notebook_parameters.py",
    "workbench/experiments/parameter_values.py",
    "workbench/jobs/fork_server.py",
    "workbench/jobs/kernels.py",
    "workbench/jobs/worker.py",
    "workbench/store/tracking.py",
)
# Files in these folders that only describe or render.
PRESENTING = (
    "lib/addresses.py",
    "lib/durations.py",
    "lib/extras.py",
    "lib/figures.py",
    "lib/policy_names.py",
    "lib/progress_bars.py",
    "lib/references.py",
    "lib/terminal.py",
)
SHOWING = ("papers", "render")
SUFFIXES = {".py", ".csv"}  # what was measured once for a model (`.json`) counts by the parameter that names it


def checkout() -> Path:
    """`root`, which has experiments. Raises KvlabError, with what to do, where there are none."""
    folder = root()
    if next((folder / "experiments").glob("*.yaml"), None) is None:
        raise KvlabError(
            f"there are no experiments in {folder}; change into a workspace or a checkout of kvlab, name it in "
            "KVLAB_ROOT, or run `kvlab new my-lab`"
        )
    return folder


def version() -> str:
    """The version of the code that runs. pip's own note stays behind in a checkout that is updated in place."""
    return __version__


def other_version() -> str | None:
    """A sentence where another version of kvlab made the workspace in use; else None."""
    folder = workspace()
    maker = made_by(folder) if folder else None
    if maker is None or maker == version():
        return None
    return f"kvlab {maker} made this workspace, and kvlab {version()} runs it"


def commit() -> str | None:
    """The git commit of the project, with "+changes" if its tracked files differ from it; None without git."""
    folder = root()
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


def measuring_files(package: Path) -> list[Path]:
    """The files of a package's folder that can change a number of a job, sorted."""
    parts = [package / name for name in MEASURING]
    files = [file for part in parts for file in (part.rglob("*") if part.is_dir() else [part])]
    shown = {package / name for name in PRESENTING}
    return sorted(file for file in files if file.suffix in SUFFIXES and file not in shown)


@functools.cache
def code_hash() -> str:
    """sha256 over the files of the package that can change a number of a job (`MEASURING` less `PRESENTING`)."""
    package = Path(__file__).resolve().parents[1]
    return _hash(package, measuring_files(package))


@functools.cache
def showing_hash() -> str:
    """sha256 over the files of the package that make figures and sentences from findings."""
    package = Path(__file__).resolve().parents[1]
    files = (file for part in SHOWING for file in (package / part).rglob("*"))
    return _hash(package, sorted(file for file in files if file.suffix in SUFFIXES | {".yaml"}))


def _hash(package: Path, files: Iterable[Path]) -> str:
    return digest((file.relative_to(package).as_posix(), file) for file in files)
