"""Nothing that was logged is lost, and nothing is logged twice: many writers, servers that go away, kills."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.projects import BODY, EXPERIMENT, PARAMETERS, cell, experiment, notebook
from support.runs import runs
from support.servers import MlflowServer, environment

from kvlab.errors import KvlabError
from kvlab.workbench.jobs import launch
from kvlab.workbench.store import database, findings_table

pytestmark = pytest.mark.roundtrip

WRITERS, RUNS, METRICS = 8, 3, 40
WRITER = textwrap.dedent("""
    import multiprocessing
    import sys
    import mlflow
    import pandas
    from kvlab.workbench.store import tracking

    writers, runs, metrics = map(int, sys.argv[1:])

    def write(number):
        for one in range(runs):
            with tracking.start("many", {"number": number, "one": one}) as run:
                for first in range(0, metrics, 10):
                    run.log({f"m{i}": 1000 * number + 100 * one + i for i in range(first, first + 10)})
                run.table("rows", pandas.DataFrame({"number": [number], "one": [one]}))

    # Imports take longest, so they are made once; nothing of the store is touched before the processes part.
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=write, args=(number,)) for number in range(writers)]
    for one in started:
        one.start()
    for one in started:
        one.join(400)
    sys.exit(any(one.exitcode for one in started))
""")


@pytest.fixture
def server(project, tmp_path, monkeypatch):
    made = MlflowServer(tmp_path / "mlruns")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("KVLAB_PATIENCE", "0")
    yield made.start()
    made.stop()


def write_from_many_processes():
    subprocess.run(
        [sys.executable, "-c", WRITER, str(WRITERS), str(RUNS), str(METRICS)],
        env=environment(),
        check=True,
        timeout=450,
    )


def check_what_many_processes_wrote():
    client = database.client()
    found = client.search_runs([client.get_experiment_by_name("many").experiment_id], max_results=1000)
    assert len(found) == WRITERS * RUNS
    for run in found:
        number, one = int(run.data.params["number"]), int(run.data.params["one"])
        assert run.info.status == "FINISHED"
        assert findings_table.numbers(run) == {f"m{i}": 1000 * number + 100 * one + i for i in range(METRICS)}
        assert [file.path for file in client.list_artifacts(run.info.run_id, "tables")] == [
            "tables/rows.json",
            "tables/rows.parquet",
        ]
    assert len({(run.data.params["number"], run.data.params["one"]) for run in found}) == WRITERS * RUNS


def test_eight_processes_lose_nothing_in_one_sqlite_file(project):
    write_from_many_processes()
    check_what_many_processes_wrote()


def test_eight_processes_lose_nothing_through_a_server(server):
    write_from_many_processes()
    check_what_many_processes_wrote()


def take_down(server, project):
    """The second of three jobs takes the server down in the middle of its notebook; returns the mark that it leaves."""
    gone = project / "server-gone"
    strike = (
        f"import os, pathlib, signal\ngone = pathlib.Path({str(gone)!r})\n"
        f"if reduction == 0.62 and not gone.exists():\n"
        f"    os.killpg({server.process.pid}, signal.SIGKILL); gone.touch()\n"
    )
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(strike), cell(BODY))
    experiment(project, grid={"reduction": [0.55, 0.62, 0.7]})
    return gone


def check_three_jobs():
    finished = [run.data.metrics["reduction/0.20"] for run in runs("job") if run.info.status == "FINISHED"]
    assert sorted(finished) == [0.55, 0.62, 0.7]
    assert "RUNNING" not in {run.info.status for kind in ("job", "sweep") for run in runs(kind)}


def test_a_server_that_goes_away_stops_the_command_with_a_sentence_and_loses_nothing(server, project):
    """After it has come back, only what is missing is run."""
    take_down(server, project)
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KvlabError, match="cannot be reached; 1 of 3 jobs are done"):
        launch.run(EXPERIMENT, workers=1, console=console)
    server.process.wait()
    database._ready.cache_clear()
    server.start()
    found = launch.run(EXPERIMENT, workers=1, console=console)
    assert [result.state for result in found] == ["done earlier", "finished", "finished"]
    check_three_jobs()


def test_a_server_that_is_away_for_a_while_is_waited_for(server, project, monkeypatch, capfd):
    """Driver and notebook hold back what they have, and nothing has to be run again."""
    monkeypatch.setenv("KVLAB_PATIENCE", "200")
    gone = take_down(server, project)

    def bring_back():
        while not gone.exists():
            time.sleep(0.1)
        server.process.wait()
        time.sleep(3)
        server.start()

    helper = threading.Thread(target=bring_back, daemon=True)
    helper.start()
    found = launch.run(EXPERIMENT, workers=2, console=Console(file=io.StringIO(), width=200))
    helper.join()
    assert [result.state for result in found] == ["finished"] * 3
    check_three_jobs()
    assert len(runs("job")) == 3 and len(runs("sweep")) == 1
    struck = next(run for run in runs("job") if run.data.params["reduction"] == "0.62")
    page = database.client().download_artifacts(struck.info.run_id, "notebook/toy.ipynb")
    assert "the MLflow store is back" in Path(page).read_text()


def test_two_sweeps_at_once_share_the_jobs(project):
    experiment(project, grid={"reduction": [0.5, 0.55, 0.6]})
    other = subprocess.Popen(
        [sys.executable, "-m", "kvlab", "run", EXPERIMENT, "--jobs", "1"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    console = Console(file=io.StringIO(), width=200)
    ours = launch.run(EXPERIMENT, workers=1, console=console)
    _, theirs = other.communicate(timeout=300)
    assert other.returncode == 0, theirs
    assert sorted(run.data.params["reduction"] for run in runs("job")) == ["0.5", "0.55", "0.6"]
    assert {run.info.status for run in runs("job")} == {"FINISHED"}
    assert {result.state for result in ours} <= {"finished", "done earlier"} and len(ours) == 3
    assert "another sweep is running it" in console.file.getvalue() + theirs
    assert not list((project / "mlruns" / "work").iterdir())


@pytest.mark.parametrize(
    ("victim", "warm"),
    [("driver", True), ("server", True), ("worker", True), ("kernel", True), ("worker", False), ("kernel", False)],
)
def test_a_kill_at_any_moment_loses_and_doubles_nothing(project, victim, warm):
    """kill -9 of one process at a random moment, then the same command again."""
    wait = cell("import time\ntime.sleep(0.5)")
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), wait, cell(BODY))
    experiment(project, grid={"reduction": [0.5, 0.55, 0.6]})
    command = [sys.executable, "-m", "kvlab", "run", EXPERIMENT, "--jobs", "2"]
    around = environment(KVLAB_WARM=str(int(warm)))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=around)
    awaited(process, victim, warm)
    time.sleep(random.Random(f"{victim} {warm}").uniform(0, 1))
    awaited(process, victim, warm).kill()
    process.communicate(timeout=300)
    again = subprocess.run(command, capture_output=True, text=True, env=around, timeout=400)
    assert again.returncode == 0, again.stderr
    finished = [run.data.params["reduction"] for run in runs("job") if run.info.status == "FINISHED"]
    assert sorted(finished) == ["0.5", "0.55", "0.6"]
    assert "RUNNING" not in {run.info.status for kind in ("job", "sweep") for run in runs(kind)}
    assert not list((project / "mlruns" / "work").iterdir())


def awaited(process, victim, warm):
    """A process of a sweep, as soon as there is one: its driver, its server for warm starts, a worker, or a kernel."""
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            if found := next(family(psutil.Process(process.pid), victim, warm), None):
                return found
        time.sleep(0.02)
    raise AssertionError(f"the sweep ended, and no {victim} was ever there to be killed")


def family(driving, victim, warm):
    """The processes of one kind: warm jobs are forks of their server, and the kernels are forks of them."""
    started = "fork_server" if warm else "worker"
    first = [one for one in driving.children() if f"kvlab.workbench.jobs.{started}" in one.cmdline()]
    workers = [child for server in first for child in server.children()] if warm else first
    kernels = (child for worker in workers for child in worker.children())
    return iter({"driver": [driving], "server": first, "worker": workers}.get(victim, kernels))
