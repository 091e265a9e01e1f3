"""The server behind jobs that start warm: a process that has imported what notebooks need, and forks itself for each.

`warm_start.Server` starts it as `python -m kvlab.workbench.jobs.fork_server`. It has no thread but its first. It opens
no connection and no model, reads no workspace, and uses no random number. A fork of it is like a fresh process that
has imported the same. Requests and replies are JSON messages on a pipe that nobody else can use. When its owner is
gone, it ends with everything that it has started.

`multiprocessing`'s forkserver does not replace it. There the first `start()` blocks while the server imports (5.9 s).
Every child runs the user's main script again. A process has one server with one environment.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvlab.lib import environment

MODULES = (
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "papermill",
    "nbconvert",
    "torch",
    "kvlab.workbench.store.tracking",
    "transformers",
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "matplotlib.pyplot",
    "seaborn",
    "scipy.stats",
    "kvlab.workbench.jobs.kernels",
    "kvlab.workbench.jobs.worker",
)
PACKAGES = ("kvlab.analyses", "kvlab.render.figures")  # with all their modules
NAME = "kvlab-worker"  # as the system lists it
TICK, IDLE = 0.02, 300.0  # seconds between looks at the jobs, and after which a server without any ends
HARMLESS = {"jemalloc_bg_thd"}  # threads of libraries that see to forks themselves


class Server:
    """Forks a worker for each request, and reports when it has ended.

    Attributes:
        children: process number -> number of the job.
        waiting: requests that came while the modules were imported.
    """

    def __init__(self, owner: int, pipe: int) -> None:
        self.owner, self.pipe = owner, Connection(pipe)
        self.environment = dict(os.environ)
        self.children: dict[int, int] = {}
        self.waiting: list[dict[str, Any]] = []
        self.retiring = False

    def serve(self) -> dict[str, Any] | None:
        """Returns in every fork what it has to do, and None in the server when it is no longer needed."""
        busy = time.monotonic()
        while self.is_wanted() and self._listen(TICK if self.children else 1.0):
            self._reap()
            while self.waiting:
                request = self.waiting.pop(0)
                sys.stdout.flush()
                sys.stderr.flush()
                try:
                    pid = os.fork()
                except OSError:  # too many processes, or no memory; the jobs under way must not suffer
                    self.reply(job=request["job"], unborn=True)
                    continue
                if not pid:
                    self.pipe.close()
                    return request
                self.children[pid] = request["job"]
                self.reply(job=request["job"], pid=pid)
            if self.children:
                busy = time.monotonic()
            elif self.retiring or time.monotonic() - busy > IDLE:
                return None
        for pid in self.children:
            _end(pid)
        return None

    def is_wanted(self) -> bool:
        """Whether its owner lives."""
        return os.getppid() == self.owner

    def reply(self, **fields: Any) -> None:
        """Tell the owner; if it is gone, the next look at it ends this server."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(json.dumps(fields).encode())

    def _listen(self, seconds: float) -> bool:
        """Take in what was asked within `seconds`; False when nothing can be asked any more."""
        try:
            while self.pipe.poll(seconds):
                self._take(json.loads(self.pipe.recv_bytes()))
                seconds = 0
        except (EOFError, OSError):
            return False
        return True

    def _take(self, request: dict[str, Any]) -> None:
        if "spec" in request:
            self.waiting.append(request)
        elif "drop" in request:
            self.waiting = [other for other in self.waiting if other["job"] != request["drop"]]
            for pid in [pid for pid, job in self.children.items() if job == request["drop"]]:
                _end(pid)
        else:
            self.retiring = True

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if (job := self.children.pop(pid, None)) is not None:
                self.reply(job=job, code=os.waitstatus_to_exitcode(status))


def _end(pid: int) -> None:
    import psutil

    from kvlab.workbench.jobs import processes

    with contextlib.suppress(psutil.NoSuchProcess):
        processes.end(psutil.Process(pid))


@contextlib.contextmanager
def _as_in_a_notebook() -> Iterator[None]:
    """Let modules that ask at their import whether they are in a notebook get a yes: tqdm and ipywidgets."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.__new__(InteractiveShell)
    shell.config = type(shell.config)({"IPKernelApp": {}})
    InteractiveShell._instance = shell  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        InteractiveShell._instance = None


def load(wanted: Callable[[], bool]) -> str | None:
    """Import what notebooks need, as long as it is `wanted`.

    A module that is not installed is left out: a notebook that needs it will say so itself.

    Returns:
        Why forks of this process cannot be used; None if they can.
    """
    # A kernel sets this before a notebook imports matplotlib, which reads it only at its import.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in MODULES:
        if not wanted():
            return "nobody waits for it any more"
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if name == "ipykernel.ipkernel":
            with _as_in_a_notebook(), contextlib.suppress(ImportError):
                importlib.import_module("tqdm.auto")
        elif name == "torch" and _has_gpu():
            return "a GPU cannot be shared with a fork"
    face = importlib.import_module("kvlab")
    for name in face.__all__:
        getattr(face, name)
    for package in map(importlib.import_module, PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    _export_once()
    return _threads()


def _export_once() -> None:
    """The first export of a notebook imports as much as it writes: lexers, filters, the parts of templates."""
    from nbformat import v4

    from kvlab.workbench.jobs import worker

    outputs = [v4.new_output("stream", text="1"), v4.new_output("display_data", {"text/html": "<p>1</p>"})]
    worker.page(v4.new_notebook(cells=[v4.new_markdown_cell("# 1"), v4.new_code_cell("1", outputs=outputs)]), "first")


def _has_gpu() -> bool:
    import torch

    return torch.accelerator.is_available()


def _threads() -> str | None:
    """Whose threads would be missing in a fork.

    Libraries that see to forks end theirs before one, and begin them again when they need them; so one is made first.
    """
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    tasks = [path for path in Path("/proc/self/task").iterdir() if path.name != str(os.getpid())]
    others = sorted({(path / "comm").read_text(encoding="utf-8").strip() for path in tasks} - HARMLESS)
    return f"a library began threads when it was imported ({', '.join(others)})" if others else None


def _become_worker(environment: dict[str, str], log: str) -> None:
    """From a fork of the server to what a fresh process would be."""
    from kvlab.workbench.jobs.processes import be_called

    os.setsid()
    be_called(NAME)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    os.environ.clear()
    os.environ.update(environment)


def _renew() -> None:
    """Give a fork random numbers of its own, as a fresh process has; Python's own generator sees to that itself."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()


class Exit:
    """Ends a fork once what was registered with `atexit` has run: to take five thousand modules apart takes long."""

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._leave)  # to be made first, since these run in the opposite order

    def _leave(self) -> None:
        if self.code is not None:
            for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.code)


def main() -> int:
    """Serve; in a fork, run the job, or be its kernel."""
    environment.configure()  # forks have it from the server
    leaving = Exit()
    server = Server(*map(int, sys.argv[1:]))
    # Nothing may be imported from the folder that the sweep was started in.
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    if why := load(server.is_wanted):
        server.reply(refused=why)
        return 0
    import gc

    # Imported modules stay in memory. If the collector looked through them, every fork would copy their memory.
    gc.collect()
    gc.freeze()
    request = server.serve()
    if request is None:
        leaving.code = 0
        return 0
    from kvlab.workbench.jobs import kernels, worker

    _become_worker({**server.environment, **request["environment"]}, request["log"])
    _renew()
    kernel = kernels.fork()
    if isinstance(kernel, dict):
        _renew()
        kernels.run(**kernel)
        leaving.code = 0
    else:
        leaving.code = worker.main(request["spec"], kernels.manager(kernel))
    return leaving.code


if __name__ == "__main__":
    sys.exit(main())
