"""Jobs that start warm: on Linux forked from a server that has imported the libraries.

Anywhere else, and where a fork would not do, they start cold: in a fresh process with a fresh kernel.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvlab.lib import progress_bars
from kvlab.workbench.jobs import processes
from kvlab.workbench.jobs.processes import LOG, Process

SWITCH = "KVLAB_WARM"
PACKAGE = Path(__file__).resolve().parents[2]
CLOSING_S = 10
# Variables that may differ between jobs with the same imported libraries. An import may have read any other one.
OWN = frozenset({"MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "KVLAB_ROOT", progress_bars.NOTE})


def possible() -> bool:
    """Whether this system forks safely (macOS's own libraries do not survive it), and nobody has set KVLAB_WARM=0."""
    return sys.platform == "linux" and os.environ.get(SWITCH) != "0"


class Starter:
    """Starts jobs: warm from a server where there is one or other jobs will follow, cold otherwise.

    A server retires when the code of the package or the environment has changed since it began. It ends with its last
    job, and another server replaces it. After a server that died or could not begin, all jobs start cold.
    """

    def __init__(self) -> None:
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._cold = False

    def start(
        self, spec: Mapping[str, Any], folder: Path, environment: Mapping[str, str], own: Mapping[str, str]
    ) -> Process | Forked:
        """Begin the job of `spec` in `folder`.

        Args:
            spec: what `worker.py` reads; with "more", other jobs of the sweep are waiting.
            environment: variables that the jobs of this place share.
            own: variables of this job alone.
        """

        def cold() -> Process:
            return Process(spec, folder, {**environment, **own})

        shared = {name: value for name, value in environment.items() if name not in OWN}
        alone = {name: value for name, value in {**environment, **own}.items() if shared.get(name) != value}
        with self._lock:
            server = self._fitting(shared, bool(spec.get("more"))) if alone.keys() <= OWN else None
        return Forked(server, server.ask(spec, folder, alone), cold) if server else cold()

    def close(self) -> None:
        """End the server, with all jobs that it still has."""
        with self._lock:
            if self._server:
                self._server.close()
            self._server = None

    def _fitting(self, shared: dict[str, str], more: bool) -> Server | None:
        stamp = _stamp()
        if self._server and not self._server.alive():
            self._cold = self._cold or self._server.failed()
            self._server = None
        if self._cold or not possible():
            return None
        if self._server and (self._server.environment, self._server.stamp) != (shared, stamp):
            self._server.retire()
            self._server, more = None, True
        if not self._server and more:
            try:
                self._server = Server(shared, stamp)
            except OSError:  # no memory for another process, say
                self._cold = True
        return self._server


@dataclass
class Known:
    """A server's report on a job: the process that runs it, its exit code, and whether it could not be forked."""

    process: psutil.Process | None = None
    code: int | None = None
    unborn: bool = False


class Server:
    """A process that runs `fork_server.py`, and the pipe to it."""

    def __init__(self, environment: dict[str, str], stamp: object) -> None:
        self.environment, self.stamp = environment, stamp
        self.refused = ""
        self._jobs: list[Known] = []
        self._lock = threading.RLock()
        self._death_said = self._closed = False
        self._pipe, its_end = multiprocessing.Pipe()
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvlab.workbench.jobs.fork_server", str(os.getpid()), str(its_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
                env=environment,
                start_new_session=True,
            )

    def ask(self, spec: Mapping[str, Any], folder: Path, own: Mapping[str, str]) -> int:
        """Have a job begun as soon as the server is ready; returns its number."""
        written = processes.write(spec, folder, self._process.pid)
        (folder / LOG).touch()
        with self._lock:
            number = len(self._jobs)
            self._jobs.append(Known())
            self._say(job=number, spec=str(written.absolute()), log=str((folder / LOG).absolute()), environment=own)
        return number

    def look(self, number: int) -> Known:
        """The state of a job by now."""
        with self._lock:
            self._receive()
            return self._jobs[number]

    def drop(self, number: int) -> None:
        """Have a job not begun, or ended if it has begun meanwhile."""
        with self._lock:
            self._say(drop=number)

    def alive(self) -> bool:
        return self._process.poll() is None

    def failed(self) -> bool:
        """Whether it ended otherwise than it should; says so once."""
        with self._lock:
            self._receive()
            code = self._process.poll()
            if not code or self._closed:
                return bool(self.refused)
            if not self._death_said:
                self._death_said = True
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                print(f"the server for warm starts died ({how}); from now on jobs start cold", file=sys.stderr)
            return True

    def retire(self) -> None:
        """Have it end after the jobs that it has."""
        with self._lock:
            self._say(retire=True)

    def close(self) -> None:
        """End it now, with the jobs that it has."""
        with self._lock:
            self._closed = True
            self._receive()
            self._pipe.close()
            if not any(job.process and job.code is None for job in self._jobs):
                self._process.kill()  # it may be importing for seconds yet
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            processes.stop(self._process)

    def _say(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended; `alive` tells
            self._pipe.send_bytes(json.dumps(fields).encode())

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                self._take(json.loads(self._pipe.recv_bytes()))

    def _take(self, reply: dict[str, Any]) -> None:
        if "refused" in reply:
            self.refused = reply["refused"]
            return
        known = self._jobs[reply["job"]]
        if "pid" in reply:
            with contextlib.suppress(psutil.NoSuchProcess):
                known.process = psutil.Process(reply["pid"])
        known.code, known.unborn = reply.get("code"), "unborn" in reply


class Forked:
    """A job that a server runs in a fork of itself; where the server is gone before that, it begins cold."""

    def __init__(self, server: Server, number: int, cold: Callable[[], Process]) -> None:
        self._server, self._number, self._begin_cold = server, number, cold
        self._cold: Process | None = None
        self._dropped = False

    def code(self) -> int | None:
        if self._cold:
            return self._cold.code()
        alive = self._server.alive()  # asked first, so the server's last messages are read after it
        known = self._server.look(self._number)
        if known.code is not None:
            return known.code
        if self._dropped:
            return -signal.SIGTERM
        if alive and not known.unborn:
            return None
        if not alive:
            self._server.failed()
        if known.process is None:
            self._cold = self._begin_cold()
            return None
        processes.end(known.process)
        return -signal.SIGKILL

    def stop(self) -> None:
        if self._cold:
            self._cold.stop()
            return
        if (known := self._server.look(self._number)).code is not None:
            return
        if known.process is None:
            self._dropped = True
            self._server.drop(self._number)
        else:
            processes.end(known.process)


def _stamp() -> object:
    """A stamp that changes when somebody edits the package: the names, sizes and times of its files."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        with contextlib.suppress(OSError):  # an editor's file, which is gone by now
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
    return found


STARTER = Starter()
"""For the jobs of a Dask worker, which come one by one and from several sweeps."""
