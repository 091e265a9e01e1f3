"""A job under way, what can be read from its folder meanwhile, and how it ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.lib.addresses import without_password
from kvlab.workbench import project
from kvlab.workbench.experiments import Job

if TYPE_CHECKING:
    from kvlab.workbench.jobs.executors import Task
    from kvlab.workbench.store.tracking import Run


PROGRESS = "progress"  # the file in a job's folder that its notebook's bars write


@dataclass(frozen=True)
class Result:
    """How a job ended: `state` is "finished", "done earlier", "failed" or "killed".

    For a failure, `error` says why, and `copy` is the path of the executed notebook.
    """

    job: Job
    state: str
    run_id: str
    seconds: float = 0.0
    error: str = ""
    copy: Path | None = None


@dataclass
class Running:
    """A job under way.

    Attributes:
        number: its place in the queue.
        folder: where its notebook, its note and its log are written.
        begun, glanced: when it began, and when its notebook was last looked at (time.monotonic).
    """

    job: Job
    number: int
    run: Run
    task: Task
    folder: Path
    begun: float = field(default_factory=time.monotonic)
    glanced: float = 0.0

    @property
    def output(self) -> Path:
        return self.folder / self.job.notebook.name


def keep_copy(running: Running) -> Path | None:
    """Copy a failed notebook, executed as far as it went, into mlruns/failed; None where there is none."""
    if not running.output.exists():
        return None
    folder = project.root() / "mlruns" / "failed" / running.job.experiment
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(running.output, folder / f"{running.run.id}.ipynb"))


def far(running: Running) -> str:
    """How far a job is: which cell runs, and how many documents or replays of it are done, if it counts them."""
    note = ""
    with contextlib.suppress(OSError):
        note = (running.folder / PROGRESS).read_text(encoding="utf-8")
    return "; ".join(filter(None, (cells_done(running.output), note)))


def cells_done(path: Path) -> str:
    """Which cell of a notebook under way is running: "cell 3 of 12"; empty while its file cannot be read."""
    try:
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError):  # papermill is writing it
        return ""
    done = sum(cell["metadata"].get("papermill", {}).get("status") == "completed" for cell in cells)
    return f"cell {min(done + 1, len(cells))} of {len(cells)}"


def last_words(log: Path) -> str:
    """The last line of a log, in words, for a process that died."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return (
        f"its last words: {without_password(lines[-1])[:300]}"
        if lines
        else "it left no message; it may have run out of memory"
    )
