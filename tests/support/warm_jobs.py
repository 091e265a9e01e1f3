"""A job under way in a folder of its own, and what its notebook finds around it: for tests of warm starts."""

from __future__ import annotations

import json
import os
import time

import psutil

from kvlab.workbench.jobs import executors, processes
from support.projects import cell, notebook

LONG = 800  # seconds, on a machine with much else to do
WORKER, KERNEL = "kvlab-worker", "kvlab-kernel"
# What a notebook finds around it once it has imported what most notebooks import.
LOOK = """
import gc, json, logging, os, pathlib, random, resource, sys, warnings
import ipywidgets, matplotlib, matplotlib.pyplot as plt, mlflow, numpy, pandas, psutil, seaborn, torch
import tqdm.auto, transformers
import kvlab
from kvlab.render.figures import plots
shell = get_ipython()
found = {
    "names": sorted(set(dir()) - {"found", "shell"}),
    "environment": dict(os.environ), "folder": os.getcwd(), "path": sys.path, "program": sys.argv[0],
    "rc": {name: repr(value) for name, value in matplotlib.rcParams.items()},
    "width": pandas.get_option("display.width"), "print": repr(numpy.get_printoptions()),
    "dtype": str(torch.get_default_dtype()), "threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
    "bars": [kind.__module__ for kind in tqdm.auto.tqdm.__mro__], "home": str(kvlab.home()),
    "targets": sorted(shell.kernel.comm_manager.targets), "collects": gc.isenabled(),
    "limit": resource.getrlimit(resource.RLIMIT_AS), "warns": any(entry[0] == "error" for entry in warnings.filters),
    "cuda": torch.cuda.is_initialized(), "session": os.getsid(0) == os.getpid(), "mark": getattr(kvlab, "mark", None),
}
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
parents = psutil.Process().parents()
family = {"pids": [one.pid for one in parents], "names": [one.name() for one in parents]}
cached = sorted(
    f"{name}.{thing}" for name, module in list(sys.modules.items()) if name.startswith("kvlab")
    for thing, value in list(vars(module).items()) if hasattr(value, "cache_info") and value.cache_info().currsize
    and value.__module__.startswith("kvlab")
)
pathlib.Path("look.json").write_text(json.dumps({"found": found, "drawn": drawn, "family": family, "cached": cached}))
"""
SOIL = """
import kvlab, matplotlib, numpy, os, pandas, random, torch, warnings
left_over = 1
os.environ["LEFT_OVER"] = os.environ["OMP_NUM_THREADS"] = "7"
os.environ["KVLAB_HOME"] = "/left/over"
os.chdir("/")
matplotlib.rcParams["lines.linewidth"] = 77
pandas.set_option("display.width", 777)
numpy.set_printoptions(precision=1)
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
torch.set_default_dtype(torch.float64), torch.set_num_threads(3), torch.set_grad_enabled(False)
warnings.simplefilter("error")
kvlab.mark = 1
"""
WAIT = """
import pathlib, time
pathlib.Path("here").write_text("1")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""


class Begun:
    """A job under way, in a folder of its own."""

    def __init__(self, start, folder, *sources, **variables):
        folder.mkdir()
        self.folder = folder
        notebook(folder / "job.ipynb", cell("a = 1", "parameters"), *map(cell, sources))
        spec = {
            "notebook": str(folder / "job.ipynb"),
            "output": str(folder / "out.ipynb"),
            "parameters": {},
            "result": str(folder / executors.RESULT),
            "cwd": str(folder),
            "limit": None,
            "more": True,
        }
        shared = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", **variables}
        shared.pop("PYTEST_CURRENT_TEST", None)  # another one in each test
        self.task = start(spec, folder, shared, {"MLFLOW_RUN_ID": folder.name})

    def end(self):
        """Wait for it; returns its exit code and its note."""
        deadline = time.monotonic() + LONG
        while (code := self.task.code()) is None:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.02)
        note = self.folder / executors.RESULT
        return code, json.loads(note.read_text()) if note.exists() else None

    def look(self):
        code, note = self.end()
        assert (code, note["error"]) == (0, None), (self.folder / "log.txt").read_text()
        return json.loads((self.folder / "look.json").read_text())

    def outputs(self):
        cells = json.loads((self.folder / "out.ipynb").read_text())["cells"]
        return [output for one in cells for output in one.get("outputs", [])]


def cold(spec, folder, shared, own):
    return processes.Process(spec, folder, {**shared, **own})


def appears(path):
    deadline = time.monotonic() + LONG
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} does not appear"
        time.sleep(0.02)
    return path.read_text()


def gone(pids):
    """Whether these processes end within a while."""
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
