"""The way into MLflow's UI: the link that a command ends with, or how to start what the link leads to."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from urllib.parse import unquote

import pytest
from support.commands import call
from support.projects import EXPERIMENT, experiment
from support.servers import free_port

from kvlab.workbench import experiments, ui
from kvlab.workbench.jobs import launch
from kvlab.workbench.store import database


@pytest.fixture
def number(project):
    """The MLflow experiment's id."""
    return database.experiment_id(database.client(), EXPERIMENT)


def test_without_a_server_the_command_that_starts_one_is_told(number):
    said = ui.link_text([EXPERIMENT])
    assert said.startswith("kvlab ui ") and f"http://127.0.0.1:5000/#/experiments/{number}/runs" in said


def test_the_ui_says_when_it_answers_and_ends_with_ctrl_c(number, project):
    port = free_port()
    begun = subprocess.Popen(
        [sys.executable, "-m", "kvlab", "ui", "--port", str(port)], stdout=subprocess.PIPE, text=True, cwd=project
    )
    try:
        assert begun.stdout is not None
        address = begun.stdout.readline().split()[0]
        assert address == f"http://127.0.0.1:{port}" and ui.running() == address
    finally:
        begun.send_signal(signal.SIGINT)
        code = begun.wait(timeout=60)
    assert code in (0, 130) and ui.running() is None and not ui.note().exists()


def test_a_port_that_is_taken_is_refused(number, project, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, said = call(capsys, "ui", "--port", str(port))
    assert code == 1 and f"port {port} cannot be used" in said and f"--port {port + 1}" in said


def test_the_ui_of_make_lab_is_known_while_it_answers(number, health):
    ui.note().write_text(health.uri)
    assert ui.link_text([EXPERIMENT]) == f"{health.uri}/#/experiments/{number}/runs?workflowType=machine_learning"
    health.code = 503
    assert ui.running() is None
    ui.note().write_text("")
    assert ui.running() is None


def test_a_tracking_server_is_its_own_ui(number, health, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{health.uri}/")
    assert ui.running() == health.uri


def test_several_experiments_have_one_table(number, project, health):
    ui.note().write_text(health.uri)
    other = database.experiment_id(database.client(), "other")
    link = unquote(ui.link_text([EXPERIMENT, "other", "never run"]))
    assert link.startswith(
        f"{health.uri}/#/compare-experiments/s?experiments={json.dumps([number, other])}".replace(" ", "") + "&"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_run_and_reproduce_end_with_the_link(number, project, health, capsys, monkeypatch, fails):
    ui.note().write_text(health.uri)
    (job,) = experiments.jobs(EXPERIMENT)
    ended = launch.Result(job, "failed" if fails else "finished", "1", error="the roof is on fire" if fails else "")
    monkeypatch.setattr(launch, "run", lambda *_, **__: [ended])
    for command in (("run", EXPERIMENT), ("reproduce",)):
        code, said, _ = call(capsys, *command)
        assert code == int(fails)
        assert f"{health.uri}/#/experiments/{number}/runs" in said


def test_names_of_jobs_tell_what_differs_in_a_sweep_or_from_the_profile(project):
    """And nothing else: neither what all jobs share, nor what was given as it is anyway."""
    experiment(project, grid={"reduction": [0.1, 0.2], "scale": [0.5]})
    named = [job.name for job in experiments.jobs(EXPERIMENT, overrides={"seed": "3", "boom": "false", "names": "x,y"})]
    assert named == ["reduction=0.1 seed=3 names=x,y", "reduction=0.2 seed=3 names=x,y"]
    experiment(project)
    assert [job.name for job in experiments.jobs(EXPERIMENT)] == ["quick"]
    (long,) = experiments.jobs(EXPERIMENT, overrides={"names": ["a" * 200]})
    assert len(long.name) == 120
