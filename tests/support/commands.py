"""How tests run a command, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys

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
