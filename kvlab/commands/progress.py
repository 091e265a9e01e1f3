"""Progress bars of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY = 20.0  # seconds between the lines through a pipe


@contextmanager
def bar(label: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on stderr, with the time left; yields rich's `update` of it. Through a pipe it is a line now and then."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(label, total=total)
        yield partial(shown.update, task) if console.is_terminal else _lines(shown, task)


def _lines(shown: Progress, task: TaskID) -> Callable[..., None]:
    """`update` of a task that nobody sees, which prints a plain line every EVERY seconds."""
    import typer

    from kvlab.lib.durations import duration

    before = monotonic()

    def update(**fields: Any) -> None:
        nonlocal before
        shown.update(task, **fields)
        now = shown.tasks[0]
        if monotonic() - before < EVERY:
            return
        before = monotonic()
        left = "" if now.time_remaining is None else f", about {duration(now.time_remaining)} left"
        # Behind the name of a policy the share would read like its score.
        work, colon, at = now.description.partition(": ")
        typer.echo(f"{work} ({now.percentage:.0f} %){colon}{at}{left}", err=True)

    return update


@contextmanager
def counting(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar of answers; yields the function that moves it, of (label, done, total)."""
    with bar(label) as update:
        yield lambda phase, done, total: update(
            description=f"{label}, {done} of {total}: {phase}"[:60], completed=done, total=total
        )


@contextmanager
def feeding(tokens: int) -> Iterator[Callable[[str, int], None]]:
    """A bar of tokens fed into the model; yields the function that moves it, of (label, tokens fed since)."""
    with bar("loading the model", tokens) as update:
        yield lambda phase, fed: update(description=phase, advance=fed)
