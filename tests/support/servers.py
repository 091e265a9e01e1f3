"""What a server of a test needs, and the two that `make lab` starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from support.paths import ROOT


def environment(**changes):
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Lab:
    """`make lab` in a project's folder: JupyterLab and the MLflow server, each on a free port."""

    def __init__(self, project, home):
        self.project, self.home, self.mlflow_port = project, home, free_port()
        self.mlflow = f"http://127.0.0.1:{self.mlflow_port}"
        self.process, self.server = None, {}

    def start(self):
        command = [
            "make",
            "-f",
            str(ROOT / "Makefile"),
            "--old-file",
            ".venv/.stamp",
            "lab",
            f"BIN={Path(sys.executable).parent}",
            f"PORT={self.mlflow_port}",
        ]
        folders = {f"JUPYTER_{name}_DIR": str(self.home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        with (self.home / "log").open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.project,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment(
                    JUPYTER_PORT=str(free_port()), BROWSER="true", IPYTHONDIR=str(self.home / "ipython"), **folders
                ),
            )
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.home / "log").read_text()
            for path in (self.home / "runtime").glob("jpserver-*.json"):
                self.server = json.loads(path.read_text() or "{}")
            try:
                if self.server:
                    urllib.request.urlopen(f"{self.mlflow}/health", timeout=2).close()
                    return self
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError((self.home / "log").read_text())

    def address(self, path, token=True):
        # Without the reset, JupyterLab may open the notebooks of earlier pages, too, in front of this one.
        return f"{self.server['url']}lab/tree/{path}?reset" + (f"&token={self.server['token']}" if token else "")

    def stop(self):
        """Ask it to end, and its kernels with it; kill what stays."""
        if self.process is None or self.process.poll() is not None:
            return
        family = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGTERM)
        _, left = psutil.wait_procs([*family, psutil.Process(self.process.pid)], timeout=20)
        for straggler in left:
            straggler.kill()
        self.process.wait(timeout=60)


class MlflowServer:
    """An MLflow server on loopback, which can go away and come back."""

    def __init__(self, folder):
        self.folder, self.port, self.process = folder, free_port(), None
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--workers",
            "1",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--backend-store-uri",
            f"sqlite:///{self.folder / 'mlflow.db'}",
            "--artifacts-destination",
            str(self.folder / "artifacts"),
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
        )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return self
            except OSError:
                time.sleep(0.3)
        raise AssertionError("the server did not start")

    def stop(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
