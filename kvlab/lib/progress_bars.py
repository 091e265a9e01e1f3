"""Progress bars with the time that is left, for work that takes long.

`progress` means the same everywhere: None shows a bar after five seconds if somebody watches, True shows it at once in
any case, False never. Where nobody watches, a sweep reads how far it is in the file that KVLAB_PROGRESS names.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

DELAY = 5.0  # seconds
# The fixed cost of a forward pass, in tokens of a prefill: it reads all weights even for one token.
PASS = 20
FORM = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, about {remaining} left"
NOTE = "KVLAB_PROGRESS"  # names the file that says how far the bar is
Item = TypeVar("Item")


def front_end() -> bool | None:
    """Whether the notebook's front end can ask its user something; None outside a notebook.

    papermill and nbconvert say that they cannot.
    """
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return None if kernel is None else bool(kernel.get_parent().get("content", {}).get("allow_stdin"))


def watched() -> bool:
    """Whether somebody sees a bar: on a terminal, or in a notebook that is run by hand."""
    asked = front_end()
    return sys.stderr.isatty() if asked is None else asked


def _bar(label: str, progress: bool | None, **more: Any) -> Any:
    from tqdm.auto import tqdm

    quiet = not watched() if progress is None else not progress
    if quiet and progress is None and os.environ.get(NOTE):
        return _noted(Path(os.environ[NOTE]), label, more)
    return tqdm(desc=label, disable=quiet, delay=0 if progress else DELAY, leave=False, smoothing=0.1, **more)


def _noted(path: Path, label: str, more: dict[str, Any]) -> Any:
    """A bar that nobody sees, which writes "LABEL: UNIT 3 of 8" into a file, once a second at most, while it runs."""
    from tqdm.std import tqdm

    class Noted(tqdm):
        monitor_interval = 0  # no thread next to a kernel that may be forked

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            far = ""
            if self.total:
                counted = f"{self.unit} {self.n} of {self.total}"
                far = f": {self.n / self.total:.0%}" if "bar_format" in more else f": {counted}"
            with contextlib.suppress(OSError):  # on another machine, or the sweep is gone
                path.write_text(f"{label}{far}", encoding="utf-8")

        def close(self) -> None:
            if not self.disable:
                super().close()
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    return Noted(desc=label, file=io.StringIO(), leave=False, mininterval=1.0, miniters=1, **more)


def each(items: Iterable[Item], label: str, unit: str, progress: bool | None = None) -> Iterable[Item]:
    """The items in their order, counted by a bar; it tells no end of a generator's."""
    return _bar(label, progress, iterable=items, unit=unit)


def counting(total: int, label: str, unit: str, progress: bool | None = None, **more: Any) -> Any:
    """A bar to move by hand: `with counting(...) as bar: bar.update()`. `more` goes to tqdm."""
    return _bar(label, progress, total=total, unit=unit, **more)


def work(*passes: int) -> int:
    """The `total` for `layers` of forward passes with these numbers of tokens."""
    return sum(tokens + PASS for tokens in passes)


@contextmanager
def layers(modules: Sequence[nn.Module], total: int, label: str, progress: bool | None = None) -> Iterator[None]:
    """A bar that moves whenever a layer is done, while the block runs: one long prompt has no other steps.

    Args:
        modules: the attention of each layer; its first output is `[batch, tokens, hidden]`.
        total: `work` of all forward passes that the block makes.
    """
    with _bar(label, progress, total=total, bar_format=FORM) as bar:
        if bar.disable:
            yield
            return

        def done(module: nn.Module, given: tuple, output: Any) -> None:
            tokens = (output[0] if isinstance(output, tuple) else output).shape[1]
            bar.update(min(work(tokens) / len(modules), total - bar.n))

        hooks = [module.register_forward_hook(done) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def arriving(bar: Any, folder: Path, size: int, unit: int) -> Iterator[None]:
    """Move a bar by what arrives in a folder while the block runs.

    Args:
        bar: of `counting`.
        size: bytes that will have arrived.
        unit: bytes of one step of the bar.
    """
    over, begun = threading.Event(), bar.n

    def tick() -> None:
        while not over.wait(0.5):
            with contextlib.suppress(OSError):  # a file may go while its size is asked for
                here = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                bar.update(begun + min(here, size) // unit - bar.n)

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        over.set()
        ticking.join()
    bar.update(begun + size // unit - bar.n)


@contextmanager
def waiting(label: str, progress: bool | None = None) -> Iterator[None]:
    """A line with the time spent so far, while the block runs: for work that does not report its progress."""
    over = threading.Event()
    with _bar(label, progress, total=None, bar_format="{desc}, {elapsed}") as bar:

        def tick() -> None:
            while not over.wait(0.5):
                bar.update()

        ticking = threading.Thread(target=tick, daemon=True)
        if not bar.disable:
            ticking.start()
        try:
            yield
        finally:
            over.set()
            if not bar.disable:
                ticking.join()
