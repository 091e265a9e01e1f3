"""The progress of running jobs: a live table in a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvlab.lib.durations import duration

if TYPE_CHECKING:
    from kvlab.workbench.experiments import Job

MARKS = {
    "waiting": ("·", "dim"),
    "running": ("▶", "cyan"),
    "finished": ("✓", "green"),
    "done earlier": ("✓", "dim green"),
    "failed": ("✗", "bold red"),
    "killed": ("✗", "red"),
}


class Screen(Console):
    """A console that stops printing when its reader is gone; rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


@dataclass
class Row:
    """The state of one job on the screen."""

    job: Job
    state: str = "waiting"
    begun: float = 0.0
    seconds: float = 0.0
    cells: str = ""
    expected: float | None = None


class Progress:
    """Follows jobs through their states. A context manager; every method may be called from the driver's loop."""

    def __init__(self, jobs: Iterable[Job], workers: int, console: Console | None = None) -> None:
        self.console = console or Screen(stderr=True)
        self.rows = [Row(job) for job in jobs]
        self.workers = workers
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.__exit__(kind, error, traceback)
            self._live = None

    def say(self, text: str) -> None:
        """Print one line. If the terminal was closed, nothing happens: that must not end a sweep."""
        with contextlib.suppress(OSError):
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def expect(self, number: int, seconds: float | None) -> None:
        """Set how many seconds a job is expected to take; None if that is not known."""
        self.rows[number].expected = seconds

    def expected(self, number: int) -> float:
        """The seconds that a job is expected to take: set by `expect`, else the mean of the other jobs."""
        return self.rows[number].expected or self._usual() or 0.0

    def announce(self) -> None:
        """Print how many jobs wait and how long they may take; a live table shows that anyway."""
        waiting = sum(row.state == "waiting" for row in self.rows)
        if not self._live and waiting > 1:
            remaining = self.remaining()
            left = f", about {duration(remaining)}" if remaining else ""
            self.say(f"{waiting} jobs, {self.workers} at once{left}")

    def set(self, number: int, state: str, why: str = "", seconds: float | None = None) -> None:
        """Move a job to another state; `why` is shown next to it."""
        row = self.rows[number]
        if state == "running":
            row.begun = time.monotonic()
        else:
            row.seconds = seconds if seconds is not None else (time.monotonic() - row.begun if row.begun else 0.0)
        row.state, row.cells = state, why
        if not self._live:
            took = f" in {duration(row.seconds)}" if state in ("finished", "failed") else ""
            left = self.remaining()
            rest = f" (about {duration(left)} left)" if left and state in ("finished", "failed") else ""
            self.say(
                f"[{number + 1}/{len(self.rows)}] {row.job.experiment} ({row.job.name}): {state}{took}"
                f"{': ' + why if why else ''}{rest}"
            )

    def note(self, number: int, cells: str) -> None:
        """Show how far a running notebook is."""
        self.rows[number].cells = cells

    def _usual(self) -> float | None:
        known = [row.seconds for row in self.rows if row.state == "finished"]
        known = known or [row.expected for row in self.rows if row.expected]
        return sum(known) / len(known) if known else None

    def _pace(self) -> float:
        """How long jobs take for each second expected of them. That they take what is expected counts as much as one
        job does, so that the first that ends does not decide.
        """
        known = [(row.seconds, row.expected) for row in self.rows if row.state == "finished" and row.expected]
        if not known:
            return 1.0
        took, expected = (sum(each) for each in zip(*known, strict=True))
        return (took + expected / len(known)) / (expected + expected / len(known))

    def remaining(self) -> float | None:
        """Estimated seconds to the end, at the pace of the jobs that have finished; None while nothing is known."""
        usual, pace = self._usual(), self._pace()
        if usual is None:
            return None
        left = [
            max(
                (row.expected * pace if row.expected else usual)
                - (time.monotonic() - row.begun if row.state == "running" else 0),
                0,
            )
            for row in self.rows
            if row.state in ("waiting", "running")
        ]
        return max([sum(left) / self.workers, *left])

    def _shown(self) -> tuple[list[Row], list[Row]]:
        """The rows that fit on the screen, and the others: waiting jobs are hidden first, then jobs that are done."""
        room = max(self.console.height - 4, 5)
        order = {"running": 0, "failed": 1, "killed": 1, "finished": 2, "done earlier": 3, "waiting": 4}
        kept = {id(row) for row in sorted(self.rows, key=lambda row: order[row.state])[:room]}
        return [row for row in self.rows if id(row) in kept], [row for row in self.rows if id(row) not in kept]

    @staticmethod
    def _ahead(row: Row) -> Text:
        return Text(f"~{duration(row.expected)}" if row.state == "waiting" and row.expected else "", "dim")

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("", "experiment", "job", "state", "time", ""):
            table.add_column(heading, overflow="fold")
        shown, hidden = self._shown()
        for row in shown:
            mark, style = MARKS[row.state]
            elapsed = time.monotonic() - row.begun if row.state == "running" else row.seconds
            table.add_row(
                Text(mark, style),
                row.job.experiment,
                Text(row.job.name, "dim"),
                Text(row.state, style),
                duration(elapsed) if elapsed else self._ahead(row),
                Text(row.cells, "dim"),
            )
        done = sum(row.state not in ("waiting", "running") for row in self.rows)
        left = self.remaining()
        rest = f", about {duration(left)} left" if left and done < len(self.rows) else ""
        rest += f" ({len(hidden)} not shown)" if hidden else ""
        return Group(table, Text(f"{done} of {len(self.rows)} jobs{rest}", "bold"))
