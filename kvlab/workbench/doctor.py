"""`kvlab doctor`: checks of everything that kvlab needs; a check that finds a problem says how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.lib import extras, workspace
from kvlab.lib.files import first_line, why
from kvlab.workbench import project

if TYPE_CHECKING:
    from rich.console import Console

GOOD, REMARK, BAD = "ok", "remark", "bad"
MARKS = {GOOD: ("✓", "green"), REMARK: ("!", "yellow"), BAD: ("✗", "red")}
# Disk for the default model, the texts and the traces of the quick profile; memory for one of its jobs.
DISK_GB, MEMORY_GB = 5, 4
GPU_SHAPE = "llama-3.1-8b"


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, its state ("ok", "remark" or "bad"), what was found, and a mend, if any."""

    what: str
    state: str
    found: str
    mend: str = ""


def findings() -> Iterator[Finding]:
    """All checks, one after the other; an error within a check is a finding, too."""
    for check in (python, versions, experiments, model, models, texts, store, disk, machine, gpu, jupyter):
        try:
            yield check()
        except KvlabError as error:
            yield Finding(_name(check), BAD, str(error))
        except Exception as error:  # the user wants to know of any error here
            yield Finding(_name(check), BAD, f"{type(error).__name__}: {first_line(error)}")


def _name(check: Callable[[], Finding]) -> str:
    return check.__name__.replace("_", " ")


def python() -> Finding:
    """The interpreter, and whether kvlab runs in an environment of its own."""
    version = ".".join(map(str, sys.version_info[:3]))
    own = sys.prefix != sys.base_prefix
    return Finding(
        "python",
        GOOD if own else REMARK,
        f"{version} in {sys.prefix}",
        "" if own else "kvlab is not in an environment of its own; `make env` makes one",
    )


def versions() -> Finding:
    """The installed packages against the pins of a checkout's constraints.txt or a workspace's requirements.txt."""
    if workspace.workspace():
        file, mend = project.root() / "requirements.txt", "pip install -r requirements.txt"
    else:
        file = project.root() / "constraints.txt"
        mend = "pip install -c constraints.txt -e '.[lab,test,docs,lm-eval,math]'"
    if not file.exists():
        missing = _missing()
        return Finding(
            "packages",
            BAD if missing else GOOD,
            f"missing: {', '.join(missing)}"
            if missing
            else f"kvlab {project.version()}; no {file.name} here to compare with",
            "pip install kvlab again" if missing else "",
        )
    pins = dict(re.findall(r"^([\w.\-]+)(?:\[[\w,\-]*\])?==(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    absent, unpinned = [], []
    for name, pin in pins.items():
        try:
            noted = project.version() if name == "kvlab" else importlib.metadata.version(name)
            installed = noted.partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if installed != pin:
            unpinned.append(f"{name} {installed} (pinned: {pin})")
    needed = [name for name in _missing() if name in absent]
    if needed or unpinned:
        wrong = [*(f"{name} is missing" for name in needed), *unpinned]
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        return Finding(
            "packages",
            BAD if needed else REMARK,
            "; ".join(wrong[:4]) + more,
            mend,
        )
    return Finding("packages", GOOD, f"kvlab {project.version()} and {len(pins) - len(absent)} packages as pinned")


def experiments() -> Finding:
    """The project's experiments: `kvlab run` and `kvlab reproduce` need them, all other commands work without."""
    from kvlab.workbench import experiments as files
    from kvlab.workbench.workspace import origin

    try:
        found = f"{len(files.names())} experiments in {project.root()}"
        if not (other := project.other_version()):
            return Finding("project", GOOD, found)
        files_changed = origin.changed(project.root())
        differing = f"; it writes {', '.join(files_changed)} differently" if files_changed else ""
        return Finding(
            "project",
            REMARK,
            f"{found}; {other}{differing}",
            f'compare with a new workspace (kvlab new), then write made_by = "{project.version()}" into pyproject.toml',
        )
    except KvlabError as error:
        problem, _, mend = str(error).partition("; ")
        return Finding("project", REMARK, problem, mend)


def _missing() -> list[str]:
    """Packages that kvlab requires and that are not installed."""
    absent = []
    for line in importlib.metadata.requires("kvlab") or []:
        name = re.split(r"[^\w.\-]", line, maxsplit=1)[0]
        if "extra ==" not in line:
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                absent.append(name)
    return absent


def model() -> Finding:
    """The default model: pulled, and whole."""
    from kvlab.inputs import models

    known = models.MODELS[models.DEFAULT]
    if not known.folder.is_dir():
        return Finding("model", REMARK, f"{known.name} is not here yet", f"kvlab pull {known.name}")
    lm = models.load(known.name)
    text = f"{lm.signature} ({lm.n_layers} layers, {lm.context_length:,} tokens) in {known.folder}"
    return Finding("model", GOOD, text)


def models() -> Finding:
    """The cached files of models, with those of pulls that were cut off."""
    from kvlab.inputs.models import cached
    from kvlab.inputs.packs import gigabytes, home

    downloaded = cached.cached_models()
    if not downloaded:
        return Finding("models", GOOD, f"none in {home() / 'models'}")
    shown = ", ".join(f"{model.name} ({gigabytes(model.size)}, {model.about})" for model in downloaded)
    total = gigabytes(sum(model.size for model in downloaded))
    return Finding("models", GOOD, f"{total} in {home() / 'models'}: {shown}")


def texts() -> Finding:
    """The text packs."""
    from kvlab.inputs import packs

    absent = [name for name, pack in packs.PACKS.items() if not pack.folder.is_dir()]
    if absent:
        return Finding("texts", REMARK, f"not here yet: {', '.join(absent)}", f"kvlab pull {' '.join(absent)}")
    return Finding("texts", GOOD, f"{', '.join(packs.PACKS)} in {packs.home() / 'packs'}")


def store() -> Finding:
    """The MLflow store: it answers, and a store that is a file may be written to."""
    from kvlab.workbench.store import database as mlflow_store

    if problem := extras.missing("mlflow", "sqlalchemy", "requests"):
        return _without(problem, "store")
    if not mlflow_store.exists():
        path = mlflow_store.database_path(mlflow_store.store_uri())
        assert path is not None, "only a file can be missing"
        _writable(path.parent)
        return Finding("store", GOOD, f"none yet; the first run makes {mlflow_store.shown_uri()}")
    connection = mlflow_store.client()
    runs = [experiment.name for experiment in connection.search_experiments()]
    return Finding("store", GOOD, f"{mlflow_store.shown_uri()}, {len(runs)} experiments")


def _without(problem: str, what: str) -> Finding:
    """An extra that is missing: commands that do not need it work."""
    missing, _, mend = problem.partition(": ")
    return Finding(what, REMARK, f"{missing}; only experiments and their report need it", mend)


def _writable(folder: Path) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise KvlabError(f"{existing} cannot be written to: {why(error)}") from None


def disk() -> Finding:
    """Room for the model, the texts, the shared traces and the runs."""
    from kvlab.inputs import packs
    from kvlab.workbench.store import database as mlflow_store

    folders = {"cache": packs.home(), "project": project.root()}
    database = mlflow_store.database_path(mlflow_store.store_uri())
    if database and not database.is_relative_to(project.root()):
        folders["store"] = database.parent
    free = {}
    for name, folder in folders.items():
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        _writable(existing)
        free[name] = shutil.disk_usage(existing).free / 1e9
    shown = ", ".join(f"{gigabytes:.0f} GB free for the {name} ({folders[name]})" for name, gigabytes in free.items())
    if min(free.values()) < DISK_GB:
        return Finding("disk", BAD, shown, f"make {DISK_GB} GB free, or point KVLAB_HOME to a larger disk")
    return Finding("disk", GOOD, shown)


def machine() -> Finding:
    """Cores and memory, and how many jobs at once they are good for."""
    import psutil

    from kvlab.workbench.jobs.executors import cores

    available = psutil.virtual_memory().available / 1e9
    jobs = max(1, min(cores(), int(available // MEMORY_GB)))
    text = f"{cores()} cores, {available:.0f} GB of memory available: good for --jobs {jobs}"
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        text += f"; OMP_NUM_THREADS={threads} is set"
    if available < MEMORY_GB:
        return Finding("machine", BAD, text, f"a job needs about {MEMORY_GB} GB: close something, or use --jobs 1")
    return Finding("machine", GOOD, text)


def gpu() -> Finding:
    """A GPU is welcome, and never needed."""
    import torch

    from kvlab.lib import devices

    device = devices.resolved("auto")
    if device.type == "cpu":
        return Finding("gpu", GOOD, "none: everything runs on the CPU; the gpu profiles want one")
    text, module = f"{devices.name(device)} (device {device.type!r})", torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        memory = module.get_device_properties(device).total_memory
        text += f", {memory / 1e9:.0f} GB: {_prompts_of(memory)}"
    return Finding("gpu", GOOD, text)


def _prompts_of(memory: int) -> str:
    """How long prompts may be for the shape that the gpu profiles are made for, in so many bytes."""
    import torch

    from kvlab.bench import memory_needed
    from kvlab.inputs import shapes

    most = memory_needed.longest(shapes.config(GPU_SHAPE), torch.bfloat16, memory)
    room = f"takes prompts of up to {most // 1000:,}k tokens" if most else "does not fit"
    return f"{GPU_SHAPE} in bfloat16 {room}"


def jupyter() -> Finding:
    """JupyterLab and the kernel that the notebooks name."""
    if problem := extras.missing("jupyter_client", "ipykernel", "jupyterlab"):
        return _without(problem, "jupyter")
    from jupyter_client.kernelspec import KernelSpecManager

    kernels = KernelSpecManager().find_kernel_specs()
    if "python3" not in kernels:
        return Finding(
            "jupyter", BAD, "there is no kernel called python3", f"{sys.executable} -m ipykernel install --sys-prefix"
        )
    return Finding("jupyter", GOOD, f"JupyterLab {importlib.metadata.version('jupyterlab')}, kernel python3")


def show(console: Console) -> bool:
    """Print each check as soon as it is made; True if none is bad."""
    passed = True
    for finding in findings():
        mark, colour = MARKS[finding.state]
        console.print(f"[{colour}]{mark}[/] [bold]{finding.what:<9}[/]", end=" ")
        console.print(finding.found, markup=False, highlight=False, soft_wrap=True)
        if finding.mend:
            console.print(f"            mend: {finding.mend}", markup=False, highlight=False, soft_wrap=True)
        passed = passed and finding.state != BAD
    return passed


def as_json() -> list[dict[str, Any]]:
    """The checks as plain data."""
    return [asdict(finding) for finding in findings()]
