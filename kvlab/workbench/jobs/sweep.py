"""A sweep: a queue of jobs, each a papermill process and an MLflow run under the run of its experiment."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.lib.files import first_line, why
from kvlab.workbench import project
from kvlab.workbench.experiments import ORDINARY, Job, content_key
from kvlab.workbench.jobs import executors
from kvlab.workbench.jobs.executors import LOG, RESULT, Place
from kvlab.workbench.jobs.interrupts import asked_to_stop
from kvlab.workbench.jobs.parent_run import ParentRun
from kvlab.workbench.jobs.progress import Progress
from kvlab.workbench.jobs.running_job import PROGRESS, Result, Running, far, keep_copy, last_words
from kvlab.workbench.store import database, run_index, tracking

if TYPE_CHECKING:
    from filelock import FileLock
    from rich.console import Console

    from kvlab.workbench.store.retries import RetryingClient

POLL = 0.05  # seconds between looks at the running processes
DESERTED = 20.0  # seconds without any worker before the sweep says so
GLANCE = 1.0  # seconds between looks at larger things: the notebooks under way, and the jobs of other sweeps
FEW = 200  # jobs of an experiment that are asked for one by one; all of its runs are read for more
TRIES = 3  # how often a job is begun if its process dies, because memory ran out or a machine was lost


class Sweep:
    """A queue of jobs, the processes that work on it, and their runs. A job's number is its place in the queue.

    Attributes:
        waiting: numbers of the jobs that are still to begin, in this order.
        running: the jobs under way.
        results: number -> how a job ended.
        tries: number -> how often its process has died.
        locks: number -> the lock that keeps other processes from running the same job.
        elsewhere: numbers of waiting jobs that another process has locked.
        parents: experiment -> the parent run of its jobs' runs.
    """

    def __init__(
        self,
        connection: RetryingClient,
        queue: list[Job],
        ids: Mapping[str, str],
        descriptions: Mapping[str, str],
        place: Place,
        fresh: bool,
        console: Console | None,
    ) -> None:
        self.client, self.queue, self.ids, self.descriptions = connection, queue, ids, descriptions
        self.place, self.fresh = place, fresh
        self.progress = Progress(queue, place.workers, console)
        self.waiting: list[int] = []
        self.tries: Counter[int] = Counter()
        self.parents: dict[str, ParentRun] = {}
        self.running: list[Running] = []
        self.results: dict[int, Result] = {}
        self.locks: dict[int, FileLock] = {}
        self.elsewhere: set[int] = set()
        self.looked = 0.0  # when the locks of `elsewhere` were last tried
        self.counted = self.manned = time.monotonic()  # when workers were last looked for, and when there were any

    def go(self) -> list[Result]:
        """Run the jobs of the queue; returns how each ended, in the order of the queue.

        If anything stops this early, the processes are ended, and their runs are marked KILLED if the store can still
        be reached. Runs that have finished stay finished.
        """
        from mlflow.exceptions import MlflowException

        interrupted = True
        with self.progress, asked_to_stop() as asked:
            self.client.give_up = asked
            try:
                self._look_back()
                self.waiting.sort(key=self._place_in_line)
                self.progress.announce()
                while self.waiting or self.running:
                    self._begin_some()
                    if asked.wait(POLL):
                        raise KeyboardInterrupt
                    for job in [job for job in self.running if self._ended(job)]:
                        self._end(job)
                        self.running.remove(job)
                        self._show_in_parent(job)
                    self._look_for_workers()
                interrupted = False
            except MlflowException as error:
                raise self._stopped(f"the MLflow store went away ({first_line(error)[:300]})") from error
            except OSError as error:
                raise self._stopped(why(error), error.filename) from error
            except KvlabError as error:
                raise self._stopped(first_line(error)[:300]) from error
            except KeyboardInterrupt:
                self.progress.say(f"stopped; {self._how_to_go_on()}")
                raise
            finally:
                self._finish(interrupted)
        return [self.results[number] for number in sorted(self.results)]

    def _look_for_workers(self) -> None:
        """Say so, once, where jobs have waited for a worker longer than a lost one takes to come back."""
        now = time.monotonic()
        if now - self.counted < GLANCE:
            return
        said, self.counted = self.counted - self.manned > DESERTED, now
        if not self.place.deserted:
            self.manned = now
        elif now - self.manned > DESERTED and not said:
            self.progress.say("no worker is left; the jobs wait until one joins the cluster (Ctrl-C stops)")

    def _place_in_line(self, number: int) -> tuple[int, float]:
        """The key that sorts jobs model by model, in the order of the queue, the longest job of each model first.

        The shared traces of one model fit the cache, and those of several may not. If the longest job began last, it
        would run alone at the end.
        """
        models = list(dict.fromkeys(_kind(job)[2] for job in self.queue))
        return models.index(_kind(self.queue[number])[2]), -self.progress.expected(number)

    def _stopped(self, reason: str, file: str | None = None) -> KvlabError:
        return KvlabError(f"{reason}{f' ({file})' if file else ''}; {self._how_to_go_on()}")

    def _how_to_go_on(self) -> str:
        done = sum(result.state in ("finished", "done earlier") for result in self.results.values())
        if not done:
            return "no job is done, and the same command begins again"
        return f"{done} of {len(self.queue)} jobs are done and kept, and the same command goes on with the others"

    def _finish(self, interrupted: bool) -> None:
        """End what is still running, then the parent runs, then give back all locks.

        After an interruption, errors of the store are dropped: they would hide the error that is under way.
        """
        from mlflow.exceptions import MlflowException

        lost = (KvlabError, MlflowException, OSError) if interrupted else ()
        for job in self.running:
            job.task.stop()
            with contextlib.suppress(*lost):
                self._close(job, "killed", "interrupted")
        for name, parent in self.parents.items():
            results = [result for result in self.results.values() if result.job.experiment == name]
            failed = any(result.state == "failed" for result in results)
            with contextlib.suppress(*lost):
                parent.run.finish("KILLED" if interrupted else "FAILED" if failed else "FINISHED")
        for number in list(self.locks):
            self._release(number)

    def _look_back(self) -> None:
        """Sort the queue into jobs that an earlier sweep has finished and jobs that wait.

        A job is expected to take as long as the last one of the same experiment, profile and model took.
        """
        kinds: dict[tuple[str, str, str], float | None] = {_kind(job): job.seconds for job in self.queue}
        for (experiment, profile, model), job_seconds in kinds.items():
            if last := run_index.newest(self.client, self.ids[experiment], model or None, profile=profile):
                kinds[experiment, profile, model] = float(last.data.tags.get("kvlab.seconds", 0)) or job_seconds
        done = {} if self.fresh else {name: self._done(name) for name in self.ids}
        for number, job in enumerate(self.queue):
            self.progress.expect(number, kinds[_kind(job)])
            if run_id := done.get(job.experiment, {}).get((job.key, job.kind)):
                self._is_done(number, run_id)
            else:
                self.waiting.append(number)

    def _done(self, name: str) -> dict[tuple[str, str], str]:
        """(key, kind) -> run of an experiment's finished jobs, of those in the queue or of all with today's code."""
        wanted = {(job.key, job.kind) for job in self.queue if job.experiment == name}
        if len(wanted) > FEW:
            return self._done_with_this_code(name, {kind for _, kind in wanted})
        runs = {one: run_index.done(self.client, self.ids[name], *one) for one in wanted}
        return {one: run.info.run_id for one, run in runs.items() if run}

    def _done_with_this_code(self, name: str, kinds: Collection[str]) -> dict[tuple[str, str], str]:
        found: dict[tuple[str, str], str] = {}
        for kind in sorted({*kinds, ORDINARY}, key=lambda kind: kind != ORDINARY):
            for run in run_index.finished(self.client, self.ids[name], kind=kind, code=project.code_hash()[:16]):
                for stands_for in kinds if kind == ORDINARY else (kind,):
                    found.setdefault((run.data.tags.get("kvlab.key", ""), stands_for), run.info.run_id)
        return found

    def _is_done(self, number: int, run_id: str) -> None:
        self.results[number] = Result(self.queue[number], "done earlier", run_id)
        self.progress.set(number, "done earlier", f"run {run_id}")

    def _begin_some(self) -> None:
        """Begin the next jobs: as many as the place has room for, and only those that no other process has locked."""
        look_again = time.monotonic() - self.looked > GLANCE
        if look_again:
            self.looked = time.monotonic()
        for number in list(self.waiting):
            if len(self.running) == self.place.workers:
                return
            if number in self.elsewhere and not look_again:
                continue
            job = self.queue[number]
            if not (lock := run_index.take(job.experiment, job.key)):
                self._leave_to_others(number)
                continue
            self.locks[number] = lock
            if not self._is_as_it_was(number):
                self._release(number)
                continue
            self.waiting.remove(number)
            # Another sweep may have finished it since ours began.
            if not self.fresh and (run := run_index.done(self.client, self.ids[job.experiment], job.key, job.kind)):
                self._is_done(number, run.info.run_id)
                self._release(number)
            else:
                self._begin(number)

    def _is_as_it_was(self, number: int) -> bool:
        """Whether notebook, inputs and code are still those of the job's key.

        If not, the job stays in the queue under the key of what it would run now; it fails if that cannot be read.
        """
        job = self.queue[number]
        try:
            key = content_key.key_now(job.notebook, job.parameters)
        except (KvlabError, OSError) as error:
            self.waiting.remove(number)
            self.results[number] = Result(job, "failed", "", error=str(error))
            self.progress.set(number, "failed", str(error))
            return False
        if key != job.key:
            self.queue[number] = replace(job, key=key)
            self.progress.set(number, "waiting", "edited since the sweep began; it will run as it is now")
        return key == job.key

    def _leave_to_others(self, number: int) -> None:
        if number not in self.elsewhere:
            self.elsewhere.add(number)
            same = any(running.job == self.queue[number] for running in self.running)
            self.progress.set(number, "waiting", "the same job is running" if same else "another sweep is running it")

    def _release(self, number: int) -> None:
        if lock := self.locks.pop(number, None):
            run_index.release(lock)

    def _begin(self, number: int) -> None:
        job = self.queue[number]
        run = tracking.create_run(
            self.client,
            job.experiment,
            job.parameters,
            {
                "kvlab.kind": job.kind,
                "kvlab.profile": job.profile,
                "kvlab.key": job.key,
                "kvlab.job": job.name,
                "mlflow.parentRunId": self._parent(job).id,
                **_model_tags(job.parameters),
            },
            name=_title(job),
        )
        try:
            self.running.append(self._launch(number, job, run))
        except BaseException:
            shutil.rmtree(run_index.work() / run.id, ignore_errors=True)
            with contextlib.suppress(KvlabError):  # a second error would hide the first
                run.finish("KILLED")
            raise
        self.progress.set(number, "running")

    def _launch(self, number: int, job: Job, run: tracking.Run) -> Running:
        folder = run_index.work() / run.id
        folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "notebook": str(job.notebook),
            "output": str(folder / job.notebook.name),
            "result": str(folder / RESULT),
            "parameters": job.parameters,
            "cwd": str(job.notebook.parent),
            "limit": job.timeout,
            "more": bool(self.waiting),
        }
        environment = {
            "MLFLOW_RUN_ID": run.id,
            "MLFLOW_TRACKING_URI": database.store_uri(),
            "KVLAB_ROOT": str(project.root()),
            progress_bars.NOTE: str(folder / PROGRESS),
        }
        return Running(job, number, run, self.place.start(spec, folder, environment), folder)

    def _parent(self, job: Job) -> tracking.Run:
        if job.experiment not in self.parents:
            names = [queued.name for queued in self.queue if queued.experiment == job.experiment]
            label = f", {len(names)} jobs" if len(names) > 1 else f" {job.name}" if job.name != job.profile else ""
            run = tracking.create_run(
                self.client,
                job.experiment,
                {},
                {
                    "kvlab.kind": "sweep",
                    "kvlab.profile": job.profile,
                    database.DESCRIPTION: self.descriptions[job.experiment],
                },
                name=f"sweep {job.profile}{label}",
            )
            self.parents[job.experiment] = ParentRun(run, self.descriptions[job.experiment])
        return self.parents[job.experiment].run

    def _ended(self, running: Running) -> bool:
        if running.task.code() is not None:
            return True
        elapsed = time.monotonic() - running.begun
        if running.job.timeout and not self.place.limits and elapsed > running.job.timeout:
            running.task.stop()
            executors.note_late(running.folder, running.job.timeout)
            return True
        if elapsed - running.glanced > GLANCE:
            running.glanced = elapsed
            self.progress.note(running.number, far(running))
        return False

    def _end(self, running: Running) -> None:
        try:
            result = json.loads((running.folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            code = running.task.code() or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._died(running, f"its process died ({how}); {last_words(running.folder / LOG)}")
            return
        if result.get("died"):
            self._died(running, result["error"])
            return
        if not result["ok"]:
            self._close(running, "failed", result.get("error") or "")
        elif _is_key(running.job):
            self._close(running, "finished", "")
        else:
            running.run.tag("kvlab.key", run_index.EDITED)
            self._close(running, "finished", "edited while it ran, so it will be run again next time")

    def _show_in_parent(self, ended: Running) -> None:
        result = self.results.get(ended.number)  # none for a job that begins once more
        if result and result.state == "finished":
            self.parents[ended.job.experiment].add(result.run_id, ended.number + 1)

    def _died(self, running: Running, why: str) -> None:
        """Put a job whose process or kernel died back into the queue, or let it fail after `TRIES` tries."""
        self.tries[running.number] += 1
        tries = self.tries[running.number]
        if tries >= TRIES:
            self._close(running, "failed", f"{why} (tried {tries} times)")
            return
        self._close(running, "killed", why)
        del self.results[running.number]
        self.progress.set(running.number, "waiting", f"{why}; starting again, try {tries + 1} of {TRIES}")
        self.waiting.insert(0, running.number)

    def _close(self, running: Running, state: str, error: str) -> None:
        """Log the artifacts, set the run's status, remove the work folder, give back the lock.

        If the artifacts cannot be logged, the job has failed.
        """
        seconds = time.monotonic() - running.begun
        kept = None
        try:
            for path in (running.output, running.output.with_suffix(".html")):
                if path.exists():
                    self.client.log_artifact(running.run.id, str(path), "notebook")
            running.run.tag("kvlab.seconds", f"{seconds:.1f}")
        except Exception as failure:
            state, error = "failed", f"its artifacts could not be kept: {first_line(failure)[:300]}"
        try:
            if state == "failed":
                with contextlib.suppress(OSError):
                    kept = keep_copy(running)
                running.run.tag(tracking.ERROR, error)
                if (running.folder / LOG).exists() and (running.folder / LOG).stat().st_size:
                    self.client.log_artifact(running.run.id, str(running.folder / LOG), "notebook")
            if state == "finished":
                database.write_through(self.client, running.run.id)
            running.run.finish({"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}[state])
        finally:
            shutil.rmtree(running.folder, ignore_errors=True)
            self._release(running.number)
        self.results[running.number] = Result(running.job, state, running.run.id, seconds, error, kept)
        self.progress.set(running.number, state, error, seconds)


def _kind(job: Job) -> tuple[str, str, str]:
    """Experiment, profile and model."""
    return job.experiment, job.profile, str(job.parameters.get("model", ""))


def _is_key(job: Job) -> bool:
    try:
        return content_key.key_now(job.notebook, job.parameters) == job.key
    except (KvlabError, OSError):
        return False


def _title(job: Job) -> str:
    """MLflow's name of a job's run: experiment, model, and its difference from the sweep's other jobs."""
    model = job.parameters.get("model")
    named = [Path(model).name] if isinstance(model, str) and model not in job.name else []
    return " · ".join([job.experiment, *named, job.name])


def _model_tags(parameters: Mapping[str, Any]) -> dict[str, str]:
    sha256 = content_key.model_hash(str(parameters.get("model", "")))
    return {"model_sha256": sha256} if sha256 else {}
