"""The driver's own decisions, with jobs that take no time: edits meanwhile, full disks, leavings, signals."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from rich.console import Console
from support.commands import heard
from support.desks import Desk
from support.projects import CHECK, EXPERIMENT, PARAMETERS, cell, experiment, notebook
from support.runs import runs

from kvlab.errors import KvlabError
from kvlab.workbench.jobs import executors, interrupts, launch, running_job, worker
from kvlab.workbench.jobs.progress import Progress, Screen
from kvlab.workbench.store import database, retries, run_index, tracking


@pytest.fixture
def sweep(project, monkeypatch):
    """Run the experiment with jobs that only call a function; returns how they ended, and what a log says."""

    def run(work=lambda parameters, folder: None, names=EXPERIMENT, **options):
        monkeypatch.setattr(launch, "Here", lambda workers: Desk(work, workers))
        said = io.StringIO()
        return launch.run(names, console=Console(file=said, width=300), **options), said.getvalue()

    return run


def edited(project):
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell("1 + 1"), cell(CHECK))


def states(results):
    return [result.state for result in results]


def test_a_notebook_edited_during_a_sweep_runs_under_the_key_of_what_it_is_then(sweep, project):
    """Put back as it was, the jobs that ran the edited one are no longer taken for done."""
    experiment(project, grid={"reduction": [0.5, 0.6, 0.7]})
    before = (project / "notebooks" / "toy.ipynb").read_text()

    def edit_during_the_second(parameters, _):
        if parameters["reduction"] == 0.6:
            edited(project)

    first, said = sweep(edit_during_the_second, workers=1)
    assert states(first) == ["finished"] * 3
    mixed = {run.info.run_id for run in runs("job") if run.data.tags["kvlab.key"] == run_index.EDITED}
    assert mixed == {first[1].run_id}
    client = database.client()
    counted = run_index.finished(client, client.get_experiment_by_name(EXPERIMENT).experiment_id)
    assert {run.info.run_id for run in counted} == {first[0].run_id, first[2].run_id}
    assert said.count("edited since the sweep began") == 1 and said.count("edited while it ran") == 1
    (project / "notebooks" / "toy.ipynb").write_text(before)
    again, _ = sweep(workers=1)
    assert states(again) == ["done earlier", "finished", "finished"]
    assert states(sweep(workers=1)[0]) == ["done earlier"] * 3
    edited(project)
    assert states(sweep(workers=1)[0]) == ["finished", "finished", "done earlier"]


def test_a_job_is_expected_to_take_as_long_as_the_last_one_on_its_model(project):
    """A model ten times as large takes longer; of a model that never ran the experiment's own estimate is taken."""
    notebook(project / "notebooks" / "toy.ipynb", cell("model = 'small'\nseed = 0", "parameters"))
    experiment(project, profiles={"quick": {"seconds": 7}})
    for model, seconds in (("small", 20), ("large", 400), ("a 'quoted' one", 30), ("small", 10)):
        run = tracking.create_run(
            database.client(),
            EXPERIMENT,
            {},
            {"kvlab.kind": "job", "kvlab.profile": "quick", "model": model, "kvlab.seconds": seconds},
            "done",
        )
        run.finish()
    names = ["small", "large", "new", "a 'quoted' one"]
    queue = list(launch._jobs([launch.experiments.load(EXPERIMENT)], "quick", {}, names))
    ids = {EXPERIMENT: database.experiment_id(database.client(), EXPERIMENT)}
    sweep = launch.Sweep(
        database.client(), queue, ids, {EXPERIMENT: ""}, Desk(None), False, Console(file=io.StringIO())
    )
    sweep._look_back()
    assert [sweep.progress.expected(number) for number in range(4)] == [10, 400, 7, 30]


def test_models_take_turns_and_the_longest_job_of_each_begins_first(sweep, project):
    notebook(project / "notebooks" / "toy.ipynb", cell("model = 'random:a'\nseed = 0", "parameters"))
    notebook(project / "notebooks" / "long.ipynb", cell("model = 'random:a'\nseed = 1", "parameters"))
    experiment(project, profiles={"quick": {"seconds": 5}})
    experiment(project, "long", notebook="notebooks/long.ipynb", profiles={"quick": {"seconds": 50}})
    order = []

    def note(parameters, _):
        order.append((parameters["model"], parameters["seed"]))

    sweep(note, names=[EXPERIMENT, "long"], workers=1, models=["random:b", "random:a"])
    assert order == [("random:b", 1), ("random:b", 0), ("random:a", 1), ("random:a", 0)]


def test_a_notebook_that_vanishes_fails_its_jobs_and_not_the_sweep(sweep, project):
    experiment(project, grid={"reduction": [0.5, 0.6]})
    found, _ = sweep(lambda *_: (project / "notebooks" / "toy.ipynb").unlink(), workers=1)
    assert states(found) == ["finished", "failed"] and "toy.ipynb is missing" in found[1].error


def test_the_same_job_twice_runs_once(sweep, project):
    experiment(project, grid={"reduction": [0.5, 0.5]})
    found, said = sweep(workers=2)
    assert sorted(states(found)) == ["done earlier", "finished"] and len(runs("job")) == 1
    assert "the same job is running" in said


def test_experiments_with_the_same_notebook_have_runs_of_their_own(sweep, project):
    experiment(project, parameters={"seed": 0})
    sweep(workers=1)
    experiment(project, "another", parameters={"seed": 0})
    both = launch.run([EXPERIMENT, "another"], workers=1, console=Console(file=io.StringIO(), width=200))
    assert states(both) == ["done earlier", "finished"]


def test_a_full_disk_is_one_sentence_that_says_how_to_go_on(sweep, project):
    experiment(project, grid={"reduction": [0.5, 0.6]})

    def fill(parameters, folder):
        if parameters["reduction"] == 0.6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "toy.ipynb"))

    with pytest.raises(KvlabError, match=r"No space left on device .*; 1 of 2 jobs are done and kept, and the same"):
        sweep(fill, workers=1)
    assert sorted(run.info.status for run in runs("job")) == ["FINISHED", "KILLED"]
    assert not list((project / "mlruns" / "work").iterdir())
    assert states(sweep(workers=1)[0]) == ["done earlier", "finished"]


def test_files_are_on_the_disk_before_a_run_counts_as_finished(sweep, project, monkeypatch):
    written, real = [], os.fsync

    def note(handle):
        written.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, {run.info.status for run in runs("job")}))
        real(handle)

    monkeypatch.setattr(os, "fsync", note)
    sweep(workers=1)
    assert {("toy.ipynb", frozenset({"RUNNING"})), ("notebook", frozenset({"RUNNING"}))} <= {
        (name, frozenset(status)) for name, status in written
    }
    assert [run.info.status for run in runs("job")] == ["FINISHED"]


@pytest.mark.parametrize("asked", interrupts.ASKING)
def test_signals_stop_a_sweep_between_jobs(sweep, project, asked):
    """A closed terminal hangs up twice, and a sweep that is ending has to end all the same."""
    experiment(project, grid={"reduction": [0.5, 0.6]})

    def ask(*_):
        for _ in range(1 if asked == signal.SIGINT else 2):
            os.kill(os.getpid(), asked)

    with heard(asked), pytest.raises(KeyboardInterrupt):
        sweep(ask, workers=1)
    assert [run.info.status for run in runs("job")] == ["KILLED"]
    assert not list((project / "mlruns" / "work").iterdir())


def test_what_waits_hears_a_signal():
    flag = retries.Flag()
    threading.Timer(0.1, flag.set).start()
    begun = time.monotonic()
    assert flag.wait(60) and flag.is_set() and time.monotonic() - begun < 30
    assert not retries.Flag().wait(0.01)


def test_who_ignores_a_signal_goes_on(sweep, project):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert states(sweep(lambda *_: os.kill(os.getpid(), signal.SIGHUP), workers=1)[0]) == ["finished"]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "gone"), OSError(errno.EIO, "gone")])
def test_a_sweep_outlives_its_reader(error):
    class Gone(io.StringIO):
        def write(self, _):
            raise error

    with Progress([], 1, Screen(file=Gone())) as progress:
        progress.say("is anybody there?")
        progress.announce()


def test_a_half_written_notebook_says_nothing_yet(tmp_path):
    path = tmp_path / "toy.ipynb"
    whole = json.dumps({"cells": [cell("'×'")]}, ensure_ascii=False).encode()
    path.write_bytes(whole[: whole.index("×".encode()) + 1])
    assert running_job.cells_done(path) == ""
    path.write_bytes(whole)
    assert running_job.cells_done(path) == "cell 1 of 1"


# ---------------------------------------------------------------- leavings


def test_what_the_dead_left_on_the_disk_is_cleared_and_what_lives_is_left(project):
    client = database.client()
    ids = {EXPERIMENT: database.experiment_id(client, EXPERIMENT)}
    ended, running = (
        tracking.create_run(client, EXPERIMENT, {}, {"kvlab.kind": kind}, kind)
        for kind in ("interactive", "interactive")
    )
    ended.finish("FAILED")
    held = run_index.take("b", "0")
    for name in (ended.id, running.id, "0" * 32):
        (run_index.work() / name).mkdir()
    (run_index.work() / ".a-0.lock").touch()
    run_index.tidy(client, ids)
    assert {path.name for path in run_index.work().iterdir()} == {running.id, "0" * 32, ".b-0.lock"}
    assert run_index.take("b", "0") is None
    run_index.release(held)


def test_a_run_whose_job_is_locked_lives_whatever_the_clock_says(project):
    """A clock that was set makes the start of a living process look wrong."""
    client = database.client()
    key = "c" * 64
    run = tracking.create_run(
        client, EXPERIMENT, {}, {"kvlab.kind": "job", "kvlab.key": key, "kvlab.pid": 1, "kvlab.pid_started": 0}, "far"
    )
    ids = {EXPERIMENT: database.experiment_id(client, EXPERIMENT)}
    held = run_index.take(EXPERIMENT, key)
    run_index.tidy(client, ids)
    assert client.get_run(run.id).info.status == "RUNNING"
    run_index.release(held)
    run_index.tidy(client, ids)
    assert client.get_run(run.id).info.status == "KILLED"


# ---------------------------------------------------------------- workers


def spec(folder, **changes):
    found = {
        "notebook": str(folder / "notebooks" / "toy.ipynb"),
        "output": str(folder / "out.ipynb"),
        "parameters": {},
        "result": str(folder / executors.RESULT),
        "cwd": str(folder),
        "limit": None,
        "parent": os.getpid(),
    }
    return {**found, **changes}


def test_a_worker_whose_driver_died_before_it_began_leaves_with_all_it_started(project):
    started = project / "started"
    notebook(
        project / "notebooks" / "toy.ipynb",
        cell("seconds = 600", "parameters"),
        cell(
            f"import pathlib, subprocess, sys, time\n"
            f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\ntime.sleep(seconds)"
        ),
    )
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (project / "spec.json").write_text(json.dumps(spec(project, parent=gone.pid)))
    begun = subprocess.Popen([sys.executable, "-m", "kvlab.workbench.jobs.worker", str(project / "spec.json")])
    assert begun.wait(timeout=200) == 3
    if started.exists():
        deadline = time.monotonic() + 20
        while Path(f"/proc/{started.read_text()}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{started.read_text()}").exists()


@pytest.mark.parametrize(
    ("error", "died"),
    [
        (RuntimeError("Kernel died before replying to kernel_info"), True),
        (RuntimeError("Kernel didn't respond in 300 seconds"), True),
        (RuntimeError("out of luck"), False),
        (ValueError("Kernel died"), False),
    ],
)
def test_a_kernel_that_dies_while_it_starts_may_have_another_try(project, monkeypatch, error, died):
    import papermill

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(papermill, "execute_notebook", fail)
    found = worker.execute(spec(project))
    assert (found["ok"], found["died"]) == (False, died)


# ---------------------------------------------------------------- places


def test_a_scheduler_that_goes_away_is_one_sentence_and_burns_no_tries(tmp_path):
    class Lost:
        def __getattr__(self, name):
            def fail(*_, **__):
                raise CancelledError("lost dependencies")

            return (lambda: True) if name == "done" else fail

    remote = executors.Remote(Lost(), tmp_path)
    with pytest.raises(KvlabError, match="Dask scheduler went away"):
        remote.code()
    remote.stop()
    cluster = object.__new__(executors.Cluster)
    cluster.client, cluster.shares = Lost(), {"here": 1}
    (tmp_path / "toy.ipynb").write_text("{}")
    with pytest.raises(KvlabError, match="Dask scheduler went away"):
        cluster.start({"notebook": str(tmp_path / "toy.ipynb")}, tmp_path, {"MLFLOW_RUN_ID": "0"})


def test_a_worker_whose_code_was_changed_does_not_begin(tmp_path):
    code, left = executors.work({"notebook": "toy.ipynb", "code": "other"}, b"{}", {}, {}, 1)
    assert code == 1 and "another version of kvlab's code" in json.loads(left[executors.RESULT])["error"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8), ("nonsense", 8)],
)
def test_a_containers_quota_counts(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(executors, "QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(text)
    assert executors.cores() == expected
