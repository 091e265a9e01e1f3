"""How tests run a command, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvlab import cli
from support.projects import EXPERIMENT, experiment, project  # noqa: F401

MISTAKES = [
    (["reprodce"], 2, "did you mean 'reproduce'"),
    (["run"], 2, "Missing argument"),
    (["run", EXPERIMENT, "--profil", "quick"], 2, "No such option"),
    (["run", EXPERIMENT, "--jobs", "many"], 2, "valid integer"),
    (["run", EXPERIMENT, "--jobs", "0"], 2, "greater than or equal to 1"),
    (["run", EXPERIMENT, "-p", "seed"], 2, "key=value"),
    (["run", "zsmerge_error_curve"], 1, "did you mean 'zsmerge_error_curves'"),
    (["run", EXPERIMENT, "--profile", "quik"], 1, "did you mean 'quick'"),
    (["run", EXPERIMENT, "-p", "sede=1"], 1, "did you mean 'seed'"),
    (["run", EXPERIMENT, "-p", "seed=one"], 1, "must be a whole number"),
    (["list", "claim"], 1, "did you mean 'claims'"),
    (["list"], 2, "Missing argument 'WHAT'; see kvlab list --help"),
    (["run", "--nope"], 2, "see kvlab run --help"),
    (["eval", "needle", "--budgets", "many"], 2, "see kvlab eval --help"),
    (["--nope"], 2, "see kvlab --help"),
    (["pull", "smollm"], 1, "smollm2-135m"),
    (["report", "--out", "notebooks/toy.ipynb"], 1, "it is a file"),
]


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
