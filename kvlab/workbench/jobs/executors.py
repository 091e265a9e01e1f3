"""Where jobs run: processes of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvlab.errors import KvlabError
from kvlab.lib import workspace, yaml_loader
from kvlab.lib.durations import duration
from kvlab.workbench import project
from kvlab.workbench.jobs import workspace_bundle
from kvlab.workbench.jobs.processes import LOG
from kvlab.workbench.jobs.warm_start import STARTER, Starter
from kvlab.workbench.store import database

if TYPE_CHECKING:
    from distributed import Client, Future

# Files that a job leaves in its folder, on whatever machine it ran: the worker's note, and its output.
RESULT = "result.json"
CONNECT_S = 15
QUOTA = Path("/sys/fs/cgroup/cpu.max")
SLURM = "slurm"


class Task(Protocol):
    """A job under way."""

    def code(self) -> int | None:
        """The exit code of its process, and None while it runs. Once there is a code, all files are in its folder."""

    def stop(self) -> None:
        """End it, with the kernel it started."""


class Place(Protocol):
    """Where jobs run, `workers` at once."""

    workers: int
    limits: bool  # whether the place itself stops jobs at their time limit (they may wait there before they run)

    @property
    def deserted(self) -> bool:
        """Whether there is nobody to run a job at the moment."""
        ...

    def start(self, spec: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Task:
        """Begin a job, which leaves its notebook, its note and its log in `folder`."""
        ...

    def close(self) -> None:
        """Close connections, and end what was started for the jobs."""


def cores() -> int:
    """The cores this process may use, by its affinity and by its container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, min(usable, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return usable


def threads(at_once: int) -> dict[str, str]:
    """Variables that give each of the jobs its share of the cores: with more threads than cores all become slow."""
    share = str(max(1, cores() // max(1, at_once)))
    return {
        "OMP_NUM_THREADS": share,
        "MKL_NUM_THREADS": share,
        "TOKENIZERS_PARALLELISM": "false",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


# ---------------------------------------------------------------- this machine


class Here:
    """Processes of this machine."""

    limits, deserted = False, False

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.starter = Starter()

    def start(self, spec: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Task:
        return self.starter.start(spec, folder, {**threads(self.workers), **os.environ}, environment)

    def close(self) -> None:
        self.starter.close()


# ---------------------------------------------------------------- a Dask cluster


class Cluster:
    """The workers of a Dask scheduler. The notebook is sent to them with the code and the papers of the workspace, and
    the job's files are sent back.

    A scheduler runs any code that its clients send: connect only to one of your own.
    """

    limits = True

    def __init__(self, client: Client, owned: Any = None, workers: int | None = None) -> None:
        self.client, self._owned = client, owned
        self.shares = Counter()
        for worker in client.scheduler_info(n_workers=-1)["workers"].values():
            self.shares[worker["host"]] += worker["nthreads"]
        self.workers = workers or max(1, sum(self.shares.values()))

    @property
    def deserted(self) -> bool:
        return not self.client.scheduler_info(n_workers=-1)["workers"]

    def start(self, spec: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Remote:
        notebook = Path(spec["notebook"]).read_bytes()
        from distributed.client import ClosedClientError

        at_once = max(self.shares.values(), default=1)
        try:
            # pure=False: Dask must not answer a second call with the result of the first.
            future = self.client.submit(
                work,
                {**spec, "code": project.code_hash(), "workspace": workspace.code_hash()},
                notebook,
                workspace_bundle.packed(),
                dict(environment),
                at_once,
                pure=False,
                retries=0,
                key=f"kvlab-{environment['MLFLOW_RUN_ID']}",
            )
        except (OSError, RuntimeError, CancelledError, ClosedClientError) as error:
            raise KvlabError(f"the Dask scheduler went away ({type(error).__name__})") from error
        return Remote(future, folder)

    def close(self) -> None:
        self.client.close()
        if self._owned is not None:
            self._owned.close()


class Remote:
    """A job on a worker of a cluster."""

    def __init__(self, future: Future, folder: Path) -> None:
        self.future, self.folder = future, folder
        self._code: int | None = None

    def code(self) -> int | None:
        if self._code is None and self.future.done():
            try:
                self._code, files = self.future.result()
            except CancelledError as error:  # not by us: we never wait for a job that we have cancelled
                raise KvlabError("the Dask scheduler went away") from error
            except Exception as error:  # a lost worker; Dask has many errors for that
                self._code, files = 1, {LOG: f"{type(error).__name__}: {error}".encode()}
            for name, content in files.items():
                (self.folder / Path(name).name).write_bytes(content)
        return self._code

    def stop(self) -> None:
        # If the cluster is gone, so is the job.
        with contextlib.suppress(Exception):
            self.future.cancel(force=True)


def work(
    spec: dict[str, Any], notebook: bytes, files: dict[str, bytes], environment: dict[str, str], at_once: int
) -> tuple[int, dict]:
    """On a worker of the cluster: run one job in a process of its own, and return its exit code and its files.

    `files` are those of the workspace, whose code must have the hash that the job's key was made of.
    """
    if about()[1] != spec["code"]:
        return 1, {RESULT: _failed(f"{socket.gethostname()} has another version of kvlab's code by now").encode()}
    if _begun_elsewhere(environment):
        return 1, {LOG: b"its first worker was lost, and a run is logged into once"}
    folder = Path(tempfile.mkdtemp(prefix="kvlab-job-"))
    try:
        source = folder / "source" / Path(spec["notebook"]).name
        source.parent.mkdir()
        source.write_bytes(notebook)
        workspace_bundle.unpack(files, folder)
        if workspace.code_hash(folder) != spec["workspace"]:
            return 1, {LOG: b"the workspace was edited while its files were sent"}
        output = folder / Path(spec["output"]).name
        local = {
            **spec,
            "notebook": str(source),
            "output": str(output),
            "result": str(folder / RESULT),
            "cwd": str(folder),
        }
        own = {**environment, "KVLAB_ROOT": str(folder)}
        job = STARTER.start(local, folder, {**threads(at_once), **os.environ}, own)
        begun, limit = time.monotonic(), spec.get("limit")
        while (code := job.code()) is None:
            time.sleep(0.2)
            if _cancelled():
                job.stop()
            elif limit and time.monotonic() - begun > limit:
                job.stop()
                note_late(folder, limit)
        names = [output, output.with_suffix(".html"), folder / RESULT, folder / LOG]
        return code, {path.name: path.read_bytes() for path in names if path.exists()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def note_late(folder: Path, limit: float) -> None:
    """Write the note of a job that was stopped at its time limit, since its worker can write none any more."""
    (folder / RESULT).write_text(_failed(f"took longer than its limit of {duration(limit)}"), encoding="utf-8")


def _failed(error: str) -> str:
    """The text of a note that a job failed, for a job whose worker has written none."""
    return json.dumps({"ok": False, "error": error, "html": None})


def _begun_elsewhere(environment: Mapping[str, str]) -> bool:
    """Whether another worker has begun this very run.

    Dask gives the tasks of a lost worker to another one by itself. That must not happen here, because the first worker
    may have logged into the run already. Only the sweep may begin a job again, with a new run.
    """
    client, run = database.client(environment["MLFLOW_TRACKING_URI"]), environment["MLFLOW_RUN_ID"]
    if "kvlab.worker" in client.get_run(run).data.tags:
        return True
    client.set_tag(run, "kvlab.worker", socket.gethostname())
    return False


def _cancelled() -> bool:
    """Whether the sweep has cancelled the job, or is gone: then nobody waits for its files."""
    from distributed import get_worker

    # It is made in dask.context, but we depend on distributed, not on dask itself.
    from distributed.worker import thread_state  # pyright: ignore[reportPrivateImportUsage]

    state = get_worker().state.tasks.get(thread_state.key)
    return state is None or state.state in ("cancelled", "released", "forgotten")


def connect(address: str, workers: int | None = None) -> Cluster:
    """The cluster at a scheduler's address (tcp://HOST:8786), or one made on Slurm ("slurm").

    Raises:
        KvlabError: nobody answers, there are no workers, they run other code, or they cannot reach the store.
    """
    try:
        from distributed import Client
    except ImportError:
        raise KvlabError("--cluster needs Dask: pip install 'kvlab[cluster]'") from None
    workspace_bundle.packed()  # refuses a workspace that is too large to send, before anything is started
    if address == SLURM:
        return _on_slurm(workers)
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise KvlabError(
            f"no Dask scheduler answers at {address} ({type(error).__name__}); start one with `dask "
            "scheduler`, and workers with `dask worker ADDRESS --nthreads 1`"
        ) from None
    try:
        _check(client, address)
        return Cluster(client, workers=workers)
    except BaseException:
        client.close()
        raise


def _on_slurm(workers: int | None) -> Cluster:
    """Start Slurm jobs with one worker each. Waits for the first worker; the others join when Slurm starts them."""
    from distributed import Client

    owned, jobs = _slurm(workers)
    try:
        client = Client(owned)
        print("waiting for Slurm to start a worker (squeue shows its state; Ctrl-C gives up) ...", file=sys.stderr)
        client.wait_for_workers(1)
        _check(client, SLURM)
        return Cluster(client, owned, jobs)
    except BaseException:
        owned.close()
        raise


def _check(client: Client, address: str) -> None:
    # This client is not asynchronous, so `run` returns the workers' answers.
    answers = cast("dict[str, tuple[str, str]]", client.run(about))
    if not answers:
        raise KvlabError(
            f"the scheduler at {address} has no workers; start some with `dask worker {address} --nthreads 1`"
        )
    away = {host for host, _ in answers.values()} - {socket.gethostname()}
    if away and database.database_path(database.store_uri()):
        raise KvlabError(
            f"the workers on {', '.join(sorted(away))} cannot share this machine's sqlite store; start "
            "`mlflow server` and name it in MLFLOW_TRACKING_URI"
        )
    outdated = {host for host, code in answers.values() if code != project.code_hash()}
    if outdated:
        raise KvlabError(
            f"the workers on {', '.join(sorted(outdated))} have another version of kvlab's code; install the "
            "same there and start them again"
        )


def about() -> tuple[str, str]:
    """Name of this host, and hash of the code as it is now: it may have been edited since this worker began."""
    project.code_hash.cache_clear()
    return socket.gethostname(), project.code_hash()


def _slurm(workers: int | None) -> tuple[Any, int]:
    """A cluster of Slurm jobs, and how many jobs.

    Its settings are those of `slurm.yaml` in the project: keywords of `dask_jobqueue.SLURMCluster` (queue, account,
    walltime, memory, ...), and `jobs`, the number of jobs to start.
    """
    try:
        from dask_jobqueue.slurm import SLURMCluster
    except ImportError:
        raise KvlabError("--cluster slurm needs dask-jobqueue: pip install 'kvlab[cluster]'") from None
    path = project.root() / "slurm.yaml"
    if not path.exists():
        raise KvlabError(
            f"--cluster slurm reads {path}, which is not there; it holds the settings of your cluster, such as "
            "'queue: short', 'walltime: \"02:00:00\"', 'memory: 16GB', 'jobs: 4'"
        )
    if shutil.which("sbatch") is None:
        raise KvlabError(
            "--cluster slurm needs Slurm's sbatch, which this machine does not have: run kvlab on a login "
            "node, or name a scheduler's address"
        )
    settings = yaml_loader.load(path)[0] or {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise KvlabError(f"{path.name} must be a mapping of settings, such as 'queue: short'")
    jobs = settings.pop("jobs", None) or workers or 1
    if not isinstance(jobs, int) or jobs < 1:
        raise KvlabError(f"{path.name}: jobs must be a whole number from 1 on, not {jobs!r}")
    # Defaults, which slurm.yaml may replace. Nobody looks at the scheduler's dashboard.
    usual = {
        "cores": 1,
        "processes": 1,
        "memory": "8GB",
        "python": sys.executable,
        "scheduler_options": {"dashboard": False},
    }
    try:
        cluster = SLURMCluster(**{**usual, **settings})
        cluster.scale(jobs=workers or jobs)
    except (TypeError, ValueError) as error:
        raise KvlabError(f"{path.name}: {error}") from None
    return cluster, workers or jobs
