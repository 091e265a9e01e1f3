"""How tests run a command, in this process or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvlab import cli


def shell(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run `kvlab` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvlab", *arguments], capture_output=True, text=True, env={**os.environ, **variables}
    )


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def complaint(capsys, *arguments: str, code: int = 1) -> str:
    """The one line with which the command refuses and ends with this exit code; nothing goes to stdout."""
    left, out, err = call(capsys, *arguments)
    assert (left, out) == (code, "") and err.startswith("kvlab: ") and err.count("\n") == 1, err
    return err


@contextmanager
def heard(asked: signal.Signals) -> Iterator[None]:
    """A signal does here, and in processes that begin meanwhile, what it does in a terminal: tests may run under nohup
    or in the background, where it is ignored.
    """
    before = signal.signal(asked, signal.default_int_handler if asked == signal.SIGINT else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(asked, before)
