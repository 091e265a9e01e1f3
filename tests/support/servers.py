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
