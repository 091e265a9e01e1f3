"""Progress bars of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def bar(label: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar on stderr, with the time left; yields rich's `update` of it."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield partial(shown.update, shown.add_task(label, total=total))


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
