"""Running experiments: each job a papermill process and an MLflow run under its sweep's parent run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from kvlab.errors import KvlabError
from kvlab.workbench import content, experiments, inputs, places, project, store, tracking
from kvlab.workbench.experiments import Job
from kvlab.workbench.places import LOG, RESULT, Here, Place, Task, cores
from kvlab.workbench.progress import Progress

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from rich.console import Console

POLL = 0.2      # seconds between looks at the running processes
TRIES = 3       # how often a job is begun whose process dies, as by want of memory or a lost machine


@dataclass(frozen=True)
class Result:
    """How a job ended: "finished", "done earlier", "failed" or "killed"; for a failure why, and where its copy lies."""

    job: Job
    state: str
    run_id: str
    seconds: float = 0.0
    error: str = ""
    copy: Path | None = None


@dataclass
class Running:
    """A job under way."""

    job: Job
    number: int
    run: tracking.Run
    task: Task
    folder: Path
    begun: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> Path:
        return self.folder / self.job.notebook.name


def run(names: str | Sequence[str], profile: str = "quick", overrides: Mapping[str, Any] | None = None,
        workers: int | None = None, fresh: bool = False, console: Console | None = None,
        cluster: str | None = None) -> list[Result]:
    """Run all jobs of the named experiments, `workers` at once (default: 2, or 1 on a single core).

    Everything is checked before anything runs: names, parameters, notebooks, documents, the store. A finished job with
    the same content key is not run again unless `fresh`. A job that fails does not stop the others; its executed copy
    stays in mlruns/failed and with its run. A job whose process dies is begun anew, `TRIES` times in all. `cluster` is
    a Dask scheduler's address, or "slurm"; all its workers are used by default. Raises KvlabError for what is wrong
    beforehand.
    """
    names = [names] if isinstance(names, str) else list(names)
    loaded = [experiments.load(name) for name in names]
    if workers is not None and workers < 1:
        raise KvlabError(f"the number of jobs at once must be 1 or more, not {workers}")
    queue = [job for experiment in loaded for job in experiments.jobs(experiment, profile, overrides)]
    inputs.prepare([job.parameters for job in queue])
    # A model pulled just now belongs into the keys.
    queue = [job for experiment in loaded for job in experiments.jobs(experiment, profile, overrides)]
    connection = store.client()
    for experiment in loaded:
        _repair(connection, store.experiment_id(connection, experiment.name))
    descriptions = {experiment.name: experiment.summary for experiment in loaded}
    place = places.connect(cluster, workers) if cluster else Here(workers or min(2, cores()))
    try:
        return Sweep(connection, queue, descriptions, place, fresh, console).go()
    finally:
        place.close()


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Set by Ctrl-C or a polite kill, and looked at between jobs: an exception that arises wherever the interpreter
    happens to be is lost in a finaliser. A second Ctrl-C does not wait."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked     # only the main thread hears signals
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Sweep:
    """A queue of jobs, the processes that work on it, and their runs."""

    def __init__(self, connection: MlflowClient, queue: list[Job], descriptions: Mapping[str, str], place: Place,
                 fresh: bool, console: Console | None) -> None:
        self.client, self.queue, self.descriptions, self.place = connection, queue, descriptions, place
        self.fresh = fresh
        self.progress = Progress(queue, place.workers, console)
        self.waiting: list[int] = []
        self.tries: Counter[int] = Counter()
        self.parents: dict[str, tracking.Run] = {}
        self.running: list[Running] = []
        self.results: dict[int, Result] = {}

    def go(self) -> list[Result]:
        """Work through the queue. Whatever stops it early, its processes are ended and their runs marked KILLED, as far
        as the store can still be reached; what has finished stays finished."""
        from mlflow.exceptions import MlflowException

        interrupted = True
        with self.progress, _asked_to_stop() as asked:
            try:
                self.waiting = [number for number in range(len(self.queue)) if not self._done_earlier(number)]
                # A long job that begins last would run alone at the end.
                self.waiting.sort(key=self.progress.expected, reverse=True)
                self.progress.announce()
                while self.waiting or self.running:
                    while self.waiting and len(self.running) < self.place.workers:
                        self._begin(self.waiting.pop(0))
                    time.sleep(POLL)
                    if asked.is_set():
                        raise KeyboardInterrupt
                    for job in [job for job in self.running if self._ended(job)]:
                        self._end(job)
                        self.running.remove(job)
                interrupted = False
            except (MlflowException, KvlabError) as error:
                why = f"the MLflow store went away ({_first_line(error)})"
                raise KvlabError(f"{why}; {self._how_to_go_on()}") from error
            except KeyboardInterrupt:
                self.progress.console.print(f"stopped; {self._how_to_go_on()}", markup=False, highlight=False,
                                            soft_wrap=True)
                raise
            finally:
                self._settle(interrupted)
        return [self.results[number] for number in sorted(self.results)]

    def _how_to_go_on(self) -> str:
        done = sum(result.state in ("finished", "done earlier") for result in self.results.values())
        return f"{done} of {len(self.queue)} jobs are done and kept, and the same command goes on with the others"

    def _settle(self, interrupted: bool) -> None:
        """End what is still running, then the parent runs. A store that is gone must not hide why we are here."""
        from mlflow.exceptions import MlflowException

        lost = (KvlabError, MlflowException) if interrupted else ()
        for job in self.running:
            job.task.stop()
            with contextlib.suppress(*lost):
                self._close(job, "killed", "interrupted")
        for name, parent in self.parents.items():
            mine = [result for result in self.results.values() if result.job.experiment == name]
            failed = any(result.state == "failed" for result in mine)
            with contextlib.suppress(*lost):
                parent.finish("KILLED" if interrupted else "FAILED" if failed else "FINISHED")

    def _done_earlier(self, number: int) -> bool:
        job = self.queue[number]
        where = [store.experiment_id(self.client, job.experiment)]
        kind = "attributes.status = 'FINISHED' and tags.`kvlab.kind` = 'job'"
        alike = self.client.search_runs(where, f"{kind} and tags.`kvlab.profile` = '{job.profile}'", max_results=1)
        seconds = alike[0].data.tags.get("kvlab.seconds") if alike else None
        self.progress.expect(number, float(seconds) if seconds else job.seconds)
        if self.fresh:
            return False
        found = self.client.search_runs(where, f"{kind} and tags.`kvlab.key` = '{job.key}'", max_results=1)
        if not found:
            return False
        self.results[number] = Result(job, "done earlier", found[0].info.run_id)
        self.progress.set(number, "done earlier", f"run {found[0].info.run_id}")
        return True

    def _begin(self, number: int) -> None:
        job = self.queue[number]
        run = tracking.create_run(self.client, job.experiment, job.parameters, {
            "kvlab.kind": "job", "kvlab.profile": job.profile, "kvlab.key": job.key, "kvlab.job": job.name,
            "mlflow.parentRunId": self._parent(job).id, **_model_tags(job.parameters),
        }, name=job.name)
        try:
            self.running.append(self._launch(number, job, run))
        except BaseException:
            run.finish("FAILED")
            raise
        self.progress.set(number, "running")

    def _launch(self, number: int, job: Job, run: tracking.Run) -> Running:
        folder = project.root() / "mlruns" / "work" / run.id
        folder.mkdir(parents=True, exist_ok=True)
        spec = {"notebook": str(job.notebook), "output": str(folder / job.notebook.name),
                "result": str(folder / RESULT), "parameters": job.parameters, "cwd": str(job.notebook.parent),
                "limit": job.timeout}
        environment = {"MLFLOW_RUN_ID": run.id, "MLFLOW_TRACKING_URI": store.store_uri(),
                       "KVLAB_ROOT": str(project.root())}
        return Running(job, number, run, self.place.start(spec, folder, environment), folder)

    def _parent(self, job: Job) -> tracking.Run:
        if job.experiment not in self.parents:
            self.parents[job.experiment] = tracking.create_run(
                self.client, job.experiment, {}, {"kvlab.kind": "sweep", "kvlab.profile": job.profile,
                                                  "mlflow.note.content": self.descriptions[job.experiment]},
                name=f"{job.experiment} {job.profile}")
        return self.parents[job.experiment]

    def _ended(self, running: Running) -> bool:
        if running.task.code() is not None:
            return True
        elapsed = time.monotonic() - running.begun
        if running.job.timeout and not self.place.limits and elapsed > running.job.timeout:
            running.task.stop()
            places.note_late(running.folder, running.job.timeout)
            return True
        self.progress.note(running.number, _cells_done(running.output))
        return False

    def _end(self, running: Running) -> None:
        try:
            result = json.loads((running.folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            code = running.task.code() or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._died(running, f"its process died ({how}); {_last_line(running.folder / LOG)}")
            return
        if result.get("died"):
            self._died(running, result["error"])
            return
        self._close(running, "finished" if result["ok"] else "failed", result.get("error") or "")

    def _died(self, running: Running, why: str) -> None:
        """Begin a job anew whose process or kernel died, unless it has done so often enough."""
        self.tries[running.number] += 1
        tries = self.tries[running.number]
        if tries >= TRIES:
            self._close(running, "failed", f"{why} (tried {tries} times)")
            return
        self._close(running, "killed", why)
        del self.results[running.number]
        self.progress.set(running.number, "waiting", f"{why}; beginning anew, try {tries + 1} of {TRIES}")
        self.waiting.insert(0, running.number)

    def _close(self, running: Running, state: str, error: str) -> None:
        """Keep the artifacts, set the run's status, drop the work folder. A run that cannot be kept has failed."""
        seconds = time.monotonic() - running.begun
        kept = None
        try:
            for path in (running.output, running.output.with_suffix(".html")):
                if path.exists():
                    self.client.log_artifact(running.run.id, str(path), "notebook")
            running.run.tag("kvlab.seconds", f"{seconds:.1f}")
        except Exception as failure:
            state, error = "failed", f"its artifacts could not be kept: {_first_line(failure)}"
        try:
            if state == "failed":
                kept = _keep_copy(running)
                running.run.tag("kvlab.error", error)
                if (running.folder / LOG).exists() and (running.folder / LOG).stat().st_size:
                    self.client.log_artifact(running.run.id, str(running.folder / LOG), "notebook")
            running.run.finish({"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}[state])
        finally:
            shutil.rmtree(running.folder, ignore_errors=True)
        self.results[running.number] = Result(running.job, state, running.run.id, seconds, error, kept)
        self.progress.set(running.number, state, error, seconds)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _model_tags(parameters: Mapping[str, Any]) -> dict[str, str]:
    found = content.model_hash(str(parameters.get("model", "")))
    return {"model_sha256": found} if found else {}


def _keep_copy(running: Running) -> Path | None:
    """The executed copy of a failed notebook, with its error, where a person finds it."""
    if not running.output.exists():
        return None
    folder = project.root() / "mlruns" / "failed" / running.job.experiment
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(running.output, folder / f"{running.run.id}.ipynb"))


def _cells_done(path: Path) -> str:
    try:
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    except (OSError, json.JSONDecodeError, KeyError):
        return ""
    done = sum(cell["metadata"].get("papermill", {}).get("status") == "completed" for cell in cells)
    return f"cell {min(done + 1, len(cells))} of {len(cells)}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"its last words: {lines[-1][:300]}" if lines else "it left no message; it may have run out of memory"


def _repair(connection: MlflowClient, experiment: str) -> None:
    """Mark the runs that a driver on this host left behind as KILLED."""
    for left in connection.search_runs([experiment], "attributes.status = 'RUNNING'"):
        tags = left.data.tags
        ours = tags.get("kvlab.kind") in ("job", "sweep") and tags.get("kvlab.host") == socket.gethostname()
        pid = int(tags.get("kvlab.pid", 0))
        # A process sweeps once at a time, so what it left running itself is left over, too.
        if ours and (pid == os.getpid() or not _alive(pid, float(tags.get("kvlab.pid_started", 0)))):
            connection.set_terminated(left.info.run_id, "KILLED")
            shutil.rmtree(project.root() / "mlruns" / "work" / left.info.run_id, ignore_errors=True)


def _alive(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < 2
    except psutil.Error:
        return False
