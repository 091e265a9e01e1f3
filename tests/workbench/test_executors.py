"""Jobs on a Dask cluster: the same runs as here, and one sentence for every cluster that cannot be used."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.projects import BODY, EXPERIMENT, PARAMETERS, blank_store, cell, experiment, notebook
from support.refusals import refusal
from support.runs import ARTIFACTS, artifacts, runs

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.lib import workspace
from kvlab.workbench import project as projects
from kvlab.workbench.jobs import executors, launch, sweep, warm_start, workspace_bundle
from kvlab.workbench.store import database, findings_table

distributed = pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
dask = pytest.importorskip("dask", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.roundtrip


@pytest.fixture(scope="module")
def cluster():
    """A scheduler and one worker process on this machine's loopback, which waits for a killed one to be replaced."""
    # Usually 15 seconds, which a worker may take to begin where other tests run.
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": 600})
    alone = {"n_workers": 1, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    with patient, distributed.LocalCluster(**alone) as made:
        yield made


def test_a_cluster_keeps_what_this_machine_would_have_kept(project, console, cluster):
    experiment(project, grid={"reduction": [0.55, 0.62]})
    found = launch.run(EXPERIMENT, cluster=cluster.scheduler_address, console=console)
    assert [result.state for result in found] == ["finished", "finished"], console.file.getvalue()
    by_id = {run.info.run_id: run for run in runs("job")}
    for result, value in zip(found, (0.55, 0.62), strict=True):
        run = by_id[result.run_id]
        assert run.info.status == "FINISHED" and run.data.metrics["reduction/0.20"] == value
        assert artifacts(run) == ARTIFACTS
    again = launch.run(EXPERIMENT, cluster=cluster.scheduler_address, console=console)
    assert [result.state for result in again] == ["done earlier"] * 2


def test_the_example_of_a_workspace_runs_on_a_cluster(made, console, cluster):
    """Its policy, the figure that the paper prints and its claims are on the worker, whose folder is another one."""
    (made / "mlruns" / "mlflow.db").write_bytes(blank_store())
    small = {"tokens": 60, "new_tokens": 3, "budget": 8, "documents": ["sotu/1962", "squad/Oxygen"]}
    (result,) = launch.run("first_tokens", overrides=small, cluster=cluster.scheduler_address, console=console)
    assert result.state == "finished", console.file.getvalue()
    (run,) = runs("trial", "first_tokens")
    assert {"claims.json", "figures/table_1.png", "tables/losses.json"} <= artifacts(run)
    assert run.data.tags["kvlab.workspace"] == str(workspace.code_hash())[:16]
    for claim in papers.claims(paper="streaming"):
        assert claim.metrics <= findings_table.numbers(run).keys()
    (again,) = launch.run("first_tokens", overrides=small, cluster=cluster.scheduler_address, console=console)
    assert again.state == "done earlier"


def test_what_goes_along_with_a_job_is_the_workspace_less_what_is_large(made, tmp_path, monkeypatch):
    (made / "policies" / "__pycache__").mkdir()
    (made / "policies" / "__pycache__" / "ends.pyc").write_bytes(b"compiled")
    files = workspace_bundle.packed()
    assert set(files) == {
        "pyproject.toml",
        "policies/ends.py",
        "tasks/.gitkeep",
        "papers/streaming.yaml",
        "papers/figures/streaming_table1.csv",
    }
    workspace_bundle.unpack(files, tmp_path / "there")
    assert workspace.code_hash(tmp_path / "there") == workspace.code_hash()
    (made / "policies" / "weights.bin").write_bytes(bytes(workspace_bundle.MOST))
    for asked in (workspace_bundle.packed, lambda: executors.connect("tcp://127.0.0.1:1")):
        assert "8.0 MiB, more than 8; move large files such as policies/weights.bin out" in refusal(asked)
    monkeypatch.setenv("KVLAB_ROOT", str(tmp_path))
    assert workspace_bundle.packed() == {}, "only a workspace is sent"


def test_code_that_is_not_that_of_the_jobs_key_does_not_run(made, monkeypatch):
    """It was edited while it was read: the job is begun again, with a new key."""
    spec = {"code": projects.code_hash(), "workspace": workspace.code_hash(), "notebook": "x.ipynb"}
    files = workspace_bundle.packed() | {"policies/ends.py": b"boom"}
    monkeypatch.setattr(executors, "_begun_elsewhere", lambda environment: False)
    code, left = executors.work(spec, b"", files, {}, 1)
    assert code == 1 and set(left) == {executors.LOG} and b"was edited" in left[executors.LOG]


@pytest.mark.skipif(not warm_start.possible(), reason="nothing forks here")
def test_jobs_on_a_cluster_start_warm_and_their_server_ends_with_its_worker(project, console, cluster):
    seen = (
        "import pathlib, psutil\nparents = psutil.Process().parents()\n"
        f"path = pathlib.Path({str(project)!r}) / f'{{reduction}}.txt'\n"
        "path.write_text(f'{parents[0].name()} {parents[1].pid}')"
    )
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(seen))
    experiment(project, grid={"reduction": [0.5, 0.6, 0.7]})
    found = launch.run(EXPERIMENT, cluster=cluster.scheduler_address, console=console)
    assert [result.state for result in found] == ["finished"] * 3, console.file.getvalue()
    told = {path.read_text() for path in project.glob("*.txt")}
    assert len(told) == 1, "one server for all three"
    name, server = told.pop().split()
    assert name == "kvlab-worker"
    server = psutil.Process(int(server))
    server.parent().kill()
    assert psutil.wait_procs([server], timeout=20)[1] == []


def test_a_worker_that_is_killed_is_replaced_and_its_job_begun_anew(project, console, cluster):
    """The notebook kills the worker process that it runs under, the first time only."""
    marker = project / "died"
    suicide = (
        f"import os, pathlib, psutil, signal\nmarker = pathlib.Path({str(marker)!r})\n"
        "if not marker.exists():\n"
        "    marker.touch()\n"
        "    parents = psutil.Process().parents()\n"
        "    worker = next(one for one in parents if 'multiprocessing' in ' '.join(one.cmdline()))\n"
        "    os.kill(worker.pid, signal.SIGKILL)\n"
    )
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(suicide), cell(BODY))
    (result,) = launch.run(EXPERIMENT, cluster=cluster.scheduler_address, console=console)
    assert result.state == "finished", console.file.getvalue()
    assert marker.exists()
    finished = [run for run in runs("job") if run.info.status == "FINISHED"]
    assert [run.info.run_id for run in finished] == [result.run_id]


def test_a_sweep_without_workers_says_so_once_and_goes_on_with_one(project, console, monkeypatch):
    monkeypatch.setattr(sweep, "DESERTED", 3.0)
    quiet = {"threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    experiment(project)
    with distributed.LocalCluster(n_workers=1, **quiet) as made, ThreadPoolExecutor(1) as beside:
        connected = executors.connect

        def left_alone(*given):
            place = connected(*given)
            made.scale(0)
            beside.submit(lambda: (time.sleep(12), made.scale(1)))
            return place

        monkeypatch.setattr(executors, "connect", left_alone)
        (result,) = launch.run(EXPERIMENT, cluster=made.scheduler_address, console=console)
    assert result.state == "finished" and console.file.getvalue().count("no worker is left") == 1


def test_a_slow_job_is_stopped_by_its_worker(project, console, cluster):
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell("import time\ntime.sleep(600)"))
    experiment(project, timeout=8)
    (result,) = launch.run(EXPERIMENT, cluster=cluster.scheduler_address, console=console)
    assert (result.state, result.error) == ("failed", "took longer than its limit of 8 s")


def test_a_cluster_that_cannot_be_used_is_one_sentence(project, monkeypatch, cluster):
    monkeypatch.setattr(executors, "CONNECT_S", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(KvlabError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1"):
            executors.connect(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    monkeypatch.setattr(executors.project, "code_hash", lambda: "another")
    with pytest.raises(KvlabError, match="another version of kvlab's code"):
        executors.connect(cluster.scheduler_address)


def test_workers_elsewhere_cannot_share_a_sqlite_file(project, monkeypatch, cluster):
    monkeypatch.setattr(executors.socket, "gethostname", lambda: "the-driver")
    with pytest.raises(KvlabError, match="mlflow server"):
        executors.connect(cluster.scheduler_address)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"slurm.yaml, which is not there"),
        ("queue: [", r"slurm.yaml is not valid YAML"),
        ("- queue", r"slurm.yaml must be a mapping"),
        ("jobs: many", r"jobs must be a whole number"),
        ("quueue: short", r"slurm.yaml: .*quueue"),
    ],
)
def test_settings_for_slurm_that_are_wrong(project, monkeypatch, fake_slurm, content, sentence):
    if content is not None:
        (project / "slurm.yaml").write_text(content)
    with pytest.raises(KvlabError, match=sentence):
        executors.connect("slurm")


def test_without_slurm(project, monkeypatch):
    (project / "slurm.yaml").write_text("queue: short\n")
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(KvlabError, match="sbatch"):
        executors.connect("slurm")


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """`sbatch` that runs its script at once in the background, and `scancel` that ends it."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    # The real one keeps a copy of the script, which its sender removes at once.
    scripts = {
        "sbatch": f'#!/bin/sh\ncp "$1" "{folder}/script"\n'
        f'setsid sh "{folder}/script" >"{folder}/out" 2>&1 </dev/null &\n'
        f'echo $! >"{folder}/pid"\necho "Submitted batch job 7"\n',
        "scancel": f'#!/bin/sh\nkill -- -$(cat "{folder}/pid")\n',
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_jobs_go_through_slurm(project, console, fake_slurm):
    (project / "slurm.yaml").write_text("queue: short\nwalltime: '00:10:00'\nmemory: 2GB\ninterface: lo\njobs: 1\n")
    (result,) = launch.run(EXPERIMENT, cluster="slurm", console=console)
    assert result.state == "finished", console.file.getvalue() + (fake_slurm / "out").read_text()
    assert database.client().get_run(result.run_id).info.status == "FINISHED"
    assert sys.executable in (fake_slurm / "script").read_text()
