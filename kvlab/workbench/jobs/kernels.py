"""A job's kernel, forked from its worker as long as that has a single thread; it waits until papermill starts it."""

from __future__ import annotations

import json
import logging
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from kvlab.workbench.jobs.processes import be_called

LAUNCHER = [sys.executable, "-m", "ipykernel_launcher"]
NAME = "kvlab-kernel"  # as the system lists it


class Forked(psutil.Process):
    """jupyter_client's interface to a kernel's process, for a forked child."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        """Its exit code, and None while it runs."""
        try:
            return self.wait(0)
        except psutil.TimeoutExpired:
            return None

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            super().send_signal(sig)


class Reserve:
    """A child that becomes the kernel on request; it ends without one.

    Attributes:
        mine: in the parent, whether the child is still unused.
    """

    def __init__(self, process: Forked, pipe: int) -> None:
        self._process, self._pipe, self.mine = process, pipe, True

    def take(self, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Forked:
        """The child's process, which now runs the kernel that `command` describes."""
        self.mine = False
        request = json.dumps({"command": list(command), "folder": folder, "environment": dict(environment)})
        with open(self._pipe, "w", encoding="utf-8") as pipe:
            pipe.write(request)
        return self._process


def fork() -> Reserve | dict[str, Any]:
    """Fork a kernel in reserve.

    Returns:
        In the parent, the reserve. In the child, the arguments of `run`, as soon as the parent has sent them.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        return Reserve(Forked(pid), writing)
    os.close(writing)
    # As jupyter_client starts kernels: a signal to a kernel's group must not reach its worker.
    os.setsid()
    be_called(NAME)
    with open(reading, encoding="utf-8") as pipe:
        request = pipe.read()
    if not request:  # the worker is gone, or has started another kernel
        os._exit(0)
    return json.loads(request)


def run(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
    """Be the kernel that a command would have started, until it is shut down."""
    from ipykernel.kernelapp import IPKernelApp

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    options = command[len(LAUNCHER) :]
    sys.argv = [str(Path(sys.modules["ipykernel"].__file__ or "").parents[1] / "ipykernel_launcher.py"), *options]
    # The app took its default from the environment when it was imported.
    app = IPKernelApp.instance(parent_handle=int(environment.get("JPY_PARENT_PID", 0)))
    app.initialize(options)
    _show_logs()
    app.start()


def _show_logs() -> None:
    """Let loggers that were set up before there was a notebook write into it."""
    for name in (None, *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__:
                handler.setStream(sys.stderr)


def manager(reserve: Reserve) -> type[AsyncKernelManager]:
    """The class of a kernel manager for papermill whose first kernel is `reserve`, if its kernel spec fits."""

    class Provisioner(LocalProvisioner):
        async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
            if not reserve.mine or cmd[: len(LAUNCHER)] != LAUNCHER:
                return await super().launch_kernel(cmd, **kwargs)
            environment = {**(kwargs.get("env") or os.environ), "JPY_PARENT_PID": str(os.getpid())}
            self.cwd = kwargs.get("cwd") or os.getcwd()
            self.process = reserve.take(cmd, str(self.cwd), environment)
            self.pid = self.pgid = self.process.pid
            return self.connection_info

    class Manager(AsyncKernelManager):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            # A spec that names a provisioner of its own gets that.
            if self.kernel_spec and "kernel_provisioner" not in self.kernel_spec.metadata:
                self.kernel_id = str(uuid.uuid4())
                self.provisioner = Provisioner(kernel_id=self.kernel_id, kernel_spec=self.kernel_spec, parent=self)

    return Manager
