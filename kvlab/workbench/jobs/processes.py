"""A job in a process of this machine, and how it is ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

LOG = "log.txt"


class Process:
    """A job in a process of its own, which runs `worker.py`."""

    def __init__(self, spec: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> None:
        written = write(spec, folder, os.getpid())
        with (folder / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvlab.workbench.jobs.worker", str(written)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
            )

    def code(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        stop(self.process)


def write(spec: Mapping[str, Any], folder: Path, parent: int) -> Path:
    """Write a job's spec for its worker, which ends when its `parent` (a process number) has ended."""
    written = folder / "spec.json"
    written.write_text(json.dumps({**spec, "parent": parent}), encoding="utf-8")
    return written


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a worker and its kernel, which lives in a session of its own."""
    if process.poll() is not None:
        return  # its process number may belong to another process by now
    with contextlib.suppress(psutil.NoSuchProcess):
        end(psutil.Process(process.pid))
    process.wait()


def end(process: psutil.Process) -> None:
    """End a process and all that it started, and wait for them; those that do not end are killed."""
    try:
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        family = []
    for signal in ("terminate", "kill"):
        for member in family:
            try:
                getattr(member, signal)()
            except psutil.NoSuchProcess:
                continue
        family = psutil.wait_procs(family, timeout=3)[1]


def be_called(name: str) -> None:
    """Give this process a name of at most 15 letters in the system's lists: a fork has its parent's command line."""
    Path("/proc/self/comm").write_text(name, encoding="ascii")
