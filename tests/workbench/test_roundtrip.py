"""Papermill round trips: notebooks into a fresh MLflow store, skipped when done, kept when they fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from support.commands import call, heard
from support.projects import CHECK, EXPERIMENT, PARAMETERS, cell, experiment, notebook
from support.runs import ARTIFACTS, artifacts, runs

from kvlab.errors import KvlabError
from kvlab.workbench.jobs import launch
from kvlab.workbench.jobs.sweep import TRIES
from kvlab.workbench.report import page as report
from kvlab.workbench.store import database, findings_table

pytestmark = pytest.mark.roundtrip


def test_a_sweep_is_logged_skipped_and_reported(project, console):
    experiment(project, grid={"reduction": [0.55, 0.62]})
    first = launch.run(EXPERIMENT, workers=2, console=console)
    assert [result.state for result in first] == ["finished", "finished"], console.file.getvalue()

    (parent,), children = runs("sweep"), runs("job")
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.info.run_id}
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    by_id = {child.info.run_id: child for child in children}
    child = by_id[first[1].run_id]
    assert child.data.metrics == {"reduction/0.20": 0.62}
    assert findings_table.numbers(child) == {
        "reduction/0.20": 0.62,
        "reduction/0.20/low": pytest.approx(0.57),
        "reduction/0.20/high": pytest.approx(0.67),
    }
    assert child.data.params["reduction"] == "0.62" and child.data.params["names"] == '["a", "b"]'
    tags = child.data.tags
    assert tags["kvlab.key"] == first[1].job.key and tags["kvlab.profile"] == "quick" and tags["seed"] == "0"
    assert tags["kvlab.version"] and float(tags["kvlab.seconds"]) > 0
    assert artifacts(child) == ARTIFACTS

    history = database.client().get_metric_history(parent.info.run_id, "reduction/0.20")
    assert sorted((each.step, each.value) for each in history) == [(1, 0.55), (2, 0.62)]
    assert parent.data.metrics.keys() == child.data.metrics.keys() and "figures/curve.png" in artifacts(parent)
    counted = [{key: int(n) for key, n in run.data.tags.items() if key.startswith("verdict.")} for run in children]
    assert len(counted[0]) > 3 and counted[0]["verdict.holds_in_direction_only"] >= 1
    for key in counted[0]:
        assert int(parent.data.tags[key]) == sum(of_job[key] for of_job in counted)
    page = Path(database.client().download_artifacts(child.info.run_id, "notebook/toy.html")).read_text()
    assert not re.search(r'(src|href)="(https?:|")', page) and "0.62" in page
    assert list((project / "mlruns" / "work").iterdir()) == []

    again = launch.run(EXPERIMENT, workers=2, console=console)
    assert [(result.state, result.run_id) for result in again] == [("done earlier", result.run_id) for result in first]
    assert len(runs("job")) == 2 and len(runs("sweep")) == 1
    assert f"done earlier: run {first[0].run_id}" in console.file.getvalue()

    (fresh,) = launch.run(EXPERIMENT, overrides={"reduction": 0.62}, fresh=True, console=console)
    assert fresh.state == "finished" and fresh.run_id not in by_id

    entry = report.ledger().set_index("id").loc["zsmerge.figure4.reduction_20"]
    assert (entry.run_id, entry.verdict, entry.value, entry.model) == (
        fresh.run_id,
        "holds in direction only",
        0.62,
        "toy",
    )


def test_a_failing_job_keeps_its_copy_and_stops_nobody(project, console, capsys):
    experiment(project, grid={"boom": [True, False]})
    failed, finished = launch.run(EXPERIMENT, workers=1, console=console)
    assert (failed.state, finished.state) == ("failed", "finished")
    assert failed.error == "ValueError in cell 4: the roof is on fire"
    copy = json.loads(failed.copy.read_text())
    assert any("the roof is on fire" in json.dumps(cell.get("outputs", [])) for cell in copy["cells"])

    statuses = {run.info.run_id: run.info.status for run in runs("job")}
    assert statuses == {failed.run_id: "FAILED", finished.run_id: "FINISHED"}
    assert runs("sweep")[0].info.status == "FAILED"
    kept = {run.info.run_id: run for run in runs("job")}[failed.run_id]
    assert {"notebook/toy.ipynb", "notebook/toy.html"} <= artifacts(kept)
    assert kept.data.tags["kvlab.error"] == failed.error

    frame = report.ledger().set_index("id")
    assert frame.loc["zsmerge.figure4.reduction_20"].run_id == finished.run_id
    code, _, said = call(capsys, "run", EXPERIMENT)
    assert code == 1
    last = said.strip().splitlines()[-1]
    assert "1 of 2 jobs failed" in last and "boom=True" in last and "roof" in last and "Traceback" not in said


def test_dead_kernels_and_slow_notebooks_fail(project, console):
    notebook(
        project / "notebooks" / "toy.ipynb",
        cell("how = 'die'", "parameters"),
        cell("import os, time\nos._exit(9) if how == 'die' else time.sleep(600)"),
    )
    experiment(project, parameters={"how": "die"}, timeout=120)
    experiment(project, "slow", parameters={"how": "sleep"}, timeout=8)
    dead, slow = launch.run([EXPERIMENT, "slow"], workers=2, console=console)
    assert (dead.state, slow.state) == ("failed", "failed")
    assert "DeadKernelError" in dead.error and slow.error == "took longer than its limit of 8 s"
    assert dead.error.endswith(f"(tried {TRIES} times)")
    assert [run.info.status for run in runs("job")] == ["KILLED"] * (TRIES - 1) + ["FAILED"]
    assert [run.info.status for run in runs("job", "slow")] == ["FAILED"]


@pytest.mark.parametrize("polite", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_marks_runs_killed_and_ends_the_kernels(project, polite):
    marker = project / "alive"
    notebook(
        project / "notebooks" / "toy.ipynb",
        cell(PARAMETERS, "parameters"),
        cell(f"import os, pathlib, time\npathlib.Path({str(marker)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"),
    )
    with heard(polite):
        process = subprocess.Popen(
            [sys.executable, "-m", "kvlab", "run", EXPERIMENT], stderr=subprocess.PIPE, text=True
        )
    deadline = time.monotonic() + 120
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(polite)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "kvlab: interrupted" in said and "Traceback" not in said
    assert {run.info.status for kind in ("job", "sweep") for run in runs(kind)} == {"KILLED"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_nothing_starts_if_one_experiment_is_wrong(project, console):
    experiment(project, "another", parameters={"sede": 1})
    before = (project / "mlruns" / "mlflow.db").read_bytes()
    with pytest.raises(KvlabError, match="did you mean 'seed'"):
        launch.run([EXPERIMENT, "another"], console=console)
    with pytest.raises(KvlabError, match="1 or more"):
        launch.run(EXPERIMENT, workers=0, console=console)
    assert (project / "mlruns" / "mlflow.db").read_bytes() == before


def test_tables_read_back_and_plain_progress(project, console):
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(CHECK))
    experiment(project)
    (result,) = launch.run(EXPERIMENT, console=console)
    said = console.file.getvalue()
    assert f"[1/1] {EXPERIMENT} (quick): running" in said and "finished in" in said
    assert isinstance(report.ledger(), pandas.DataFrame) and result.copy is None


def test_a_trial_takes_no_profiles_place(project, console, capsys):
    experiment(project, parameters={"reduction": 0.62})
    (trial,) = launch.run(EXPERIMENT, overrides={"reduction": 0.1}, console=console)
    assert trial.job.kind == "trial" and len(runs("trial")) == 1
    code, _, said = call(capsys, "report")
    assert code == 1 and "only trials have finished" in said

    def stands():
        entry = report.ledger().set_index("id").loc["zsmerge.figure4.reduction_20"]
        return (
            entry.run_id,
            entry.value,
            report.ledger(profile="quick").run_id.loc[lambda ids: ids != ""].unique().tolist(),
        )

    (own,) = launch.run(EXPERIMENT, console=console)
    assert own.state == "finished" and stands() == (own.run_id, 0.62, [own.run_id])
    (later,) = launch.run(EXPERIMENT, overrides={"reduction": 0.2}, console=console)
    assert later.state == "finished" and stands() == (own.run_id, 0.62, [own.run_id])
    (same,) = launch.run(EXPERIMENT, overrides={"reduction": 0.62}, console=console)
    assert (same.state, same.run_id, same.job.kind) == ("done earlier", own.run_id, "job")
    code, said, _ = call(capsys, "report")
    assert code == 0 and f"left out, since their parameters are not those of a profile: {EXPERIMENT}" in said
    code, _, _ = call(capsys, "report", "--keep", "kept")
    assert code == 0 and "0.62" in (project / "kept" / "toy.csv").read_text()
