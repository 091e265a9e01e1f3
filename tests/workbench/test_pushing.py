"""`kvlab push-runs`: finished runs are whole in the other store, once, whatever interrupts the copying."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
from mlflow.tracking import MlflowClient
from support.commands import call, complaint
from support.projects import EXPERIMENT, blank_store
from support.runs import job, runs
from support.servers import MlflowServer

from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.workbench.report import page as report
from kvlab.workbench.store import database, findings_table, pushing, showing, tracking

LINE = f"toy@0123abcd|sotu/1962@aa11|{EXPERIMENT}(tokens=100)|0|kvlab 0.1.0"


@pytest.fixture
def team(tmp_path_factory):
    """The address of an empty store."""
    path = tmp_path_factory.mktemp("team") / "mlflow.db"
    path.write_bytes(blank_store())
    return f"sqlite:///{path}"


@pytest.fixture
def finished(project):
    """A sweep of a job with curves, texts, a table and a figure; returns the job's run."""
    sweep = tracking.create_run(database.client(), EXPERIMENT, {}, {"kvlab.kind": "sweep"}, "sweep")
    tags = {"kvlab.kind": "job", "kvlab.profile": "quick", "model": "toy@0", "mlflow.parentRunId": sweep.id}
    run = tracking.start(EXPERIMENT, {"seed": 3, "names": ["a", "b"]}, signature=LINE, **tags)
    found = Findings(pandas.DataFrame({"document": ["a", "b"]}))
    for budget in (64, 256):
        found.set("error/{policy}/b{budget}", budget / 1000, policy="snapkv", budget=budget)
    run.record("errors", found, text=["Errors grow."])
    run.log({"reduction/0.20": 0.62}, {"reduction/0.20": (0.6, 0.7)})
    run.claims()
    run.finish()
    sweep.finish()
    return database.client().get_run(run.id)


def held(uri: str) -> dict[str, dict]:
    """What a store holds: name of a run -> its parts, without what two stores cannot share."""
    client = database.client(uri)
    ids = [each.experiment_id for each in client.search_experiments()]
    everything = client.search_runs(ids)
    names = {run.info.run_id: run.info.run_name for run in everything}
    parts = {}
    for run in everything:
        assert run.info.run_name not in parts, "a run is there twice"
        tags = {name: value for name, value in run.data.tags.items() if not name.startswith("kvlab.pushed")}
        if "mlflow.parentRunId" in tags:
            tags["mlflow.parentRunId"] = names[tags["mlflow.parentRunId"]]
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        folder = client.download_artifacts(run.info.run_id, "") if client.list_artifacts(run.info.run_id) else None
        parts[run.info.run_name] = {
            "tags": tags,
            "parameters": run.data.params,
            "metrics": {name: sorted((p.step, p.value, p.timestamp) for p in all) for name, all in histories.items()},
            "texts": [(each.dataset.name, each.dataset.digest) for each in run.inputs.dataset_inputs],
            "times": (run.info.status, run.info.start_time, run.info.end_time),
            "files": tree(folder),
        }
    return parts


def tree(folder: str | None) -> dict[str, bytes]:
    root = Path(folder) if folder else None
    files = sorted(root.rglob("*")) if root else ()
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files if path.is_file()}


def test_everything_of_finished_runs_is_in_the_other_store_once(finished, team, capsys):
    job(0.1, status="FAILED")
    tracking.start(EXPERIMENT, {"seed": 4})  # still runs
    code, said, _ = call(capsys, "push-runs", team)
    assert code == 0 and said.strip() == f"3 runs copied to {team}"
    here, there = held(database.store_uri()), held(team)
    assert there.keys() == {"sweep", "snapkv", finished.info.run_name} and here.keys() > there.keys()
    for name, copy in there.items():
        assert copy == here[name], name
    whole = there[finished.info.run_name]
    assert whole["tags"]["mlflow.parentRunId"] == "sweep" and whole["texts"] == [("sotu/1962", "aa11")]
    assert {"findings.json", "claims.json", "tables/errors.parquet", "story/errors.md"} <= whole["files"].keys()
    assert [step for step, *_ in there["snapkv"]["metrics"]["over_budget/error"]] == [64, 256]

    code, said, _ = call(capsys, "push-runs", team)
    assert said.strip() == f"0 runs copied to {team}, 3 there already" and held(team) == there


def test_a_report_reads_the_copies(finished, team, monkeypatch):
    before = report.ledger().set_index("id")
    pushing.push(team, [EXPERIMENT])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", team)
    after = report.ledger().set_index("id")
    pandas.testing.assert_frame_equal(after.drop(columns="run_id"), before.drop(columns="run_id"))
    assert after.loc["zsmerge.figure4.reduction_20"].value == 0.62
    (copy,) = runs("job")
    assert copy.info.run_id != finished.info.run_id
    assert findings_table.numbers(copy) == findings_table.numbers(finished)


@pytest.mark.parametrize("call_that_fails", ["log_artifacts", "set_terminated", "log_inputs"])
def test_an_interrupted_copy_is_completed(finished, team, monkeypatch, call_that_fails):
    with monkeypatch.context() as cut:
        cut.setattr(MlflowClient, call_that_fails, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pushing.push(team, [])
    copied = pushing.push(team, [])
    assert copied.copied + copied.there == 3 and copied.copied >= 1
    assert held(team) == held(database.store_uri())


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_numbers_of_older_code_come_along(project, team):
    run = tracking.create_run(database.client(), EXPERIMENT, {}, {"kvlab.kind": "job"}, "old")
    points = [showing.Point("a", 0, 0.5), showing.Point("a", 7, 0.25), showing.Point("b/low", 0, 1.0)]
    run.client.log_batch(run.id, metrics=showing.metrics(points))
    run.finish()
    pushing.push(team, [])
    assert held(team) == held(database.store_uri())
    assert {name: [value for _, value, _ in all] for name, all in held(team)["old"]["metrics"].items()} == {
        "a": [0.5, 0.25],
        "b/low": [1.0],
    }


def test_what_cannot_be_pushed_is_said_in_a_sentence(finished, project, capsys):
    assert "are in" in complaint(capsys, "push-runs", database.store_uri())
    assert "did you mean" in complaint(capsys, "push-runs", "sqlite:///other.db", "zsmerge_eror_curves")
    assert "no MLflow server answers at" in complaint(capsys, "push-runs", "http://127.0.0.1:9")
    with pytest.raises(KvlabError, match="plain folders"):
        pushing.push(str(project / "folder"), [])


def test_runs_go_through_a_server(finished, tmp_path_factory):
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    try:
        server.start()
        pushing.push(server.uri, [])
        assert held(server.uri) == held(database.store_uri())
        assert pushing.push(server.uri, []).copied == 0
    finally:
        server.stop()
