"""What MLflow's own pages show of a run: curves, datasets, verdicts in its tags, and the story as its description."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from support.projects import EXPERIMENT

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.workbench.store import database, findings_table, run_index, showing, tracking

LINE = f"toy@0123abcd|sotu/1962@aa11 squad/Oxygen@bb22|{EXPERIMENT}(tokens=100, names='a@b')|0|kvlab 0.1.0"


@pytest.fixture
def findings():
    found = Findings(pandas.DataFrame({"document": ["a"]}))
    for budget in (64, 256):
        found.set("error/{policy}/b{budget}", budget / 1000, policy="snapkv", budget=budget)
        found.set("lost/{ratio:.2f}", 0.1, ratio=budget / 1000)
    return found


def test_effects_over_whole_numbers_are_curves(findings):
    findings.set("error/{policy}", 0.5, policy="full")
    findings.set("found/{policy}/b{budget}", 0.5, policy="full", budget=64)  # one point
    for window in (8, 16):
        findings.set("recall/{policy}/w{window}/b{budget}", window / 10, policy="snapkv", window=window, budget=64)
    findings.set("similarity/n{length}", 0.5, length=10)
    assert showing.curves(findings.rows) == {
        "snapkv": [
            ("over_budget/error", 64, 0.064),
            ("over_budget/error", 256, 0.256),
            ("over_window/recall/b64", 8, 0.8),
            ("over_window/recall/b64", 16, 1.6),
        ],
    }


def test_a_run_has_its_curves_texts_and_verdicts(project, findings):
    run = tracking.start(EXPERIMENT, {"seed": 0}, signature=LINE)
    run.record("errors", findings, text=["Errors grow with the budget."])
    run.log({"reduction/0.20": 0.3}, {"reduction/0.20": (0.2, 0.4)})
    run.claims("zsmerge_error_curves")
    run.finish()
    stored = run.client.get_run(run.id)
    named = [(each.dataset.name, each.dataset.digest) for each in stored.inputs.dataset_inputs]
    assert sorted(named) == [("sotu/1962", "aa11"), ("squad/Oxygen", "bb22")]
    assert "Errors grow with the budget." in stored.data.tags[database.DESCRIPTION]
    assert int(stored.data.tags["verdict.holds_in_direction_only"]) >= 1
    assert sum(int(n) for key, n in stored.data.tags.items() if key.startswith("verdict.")) > 5
    (found,) = run.client.search_runs([stored.info.experiment_id], "tags.`verdict.holds_in_direction_only` != '0'")
    assert found.info.run_id == run.id


def test_each_policys_curve_is_a_run_of_its_own(project, findings):
    """MLflow's charts compare runs. Nothing that reads jobs finds these."""
    for budget in (64, 256):
        findings.set("error/{policy}/b{budget}", 0.5, policy="h2o", budget=budget)
    with tracking.start(EXPERIMENT, {"seed": 0}, **{"kvlab.kind": "job", "kvlab.profile": "quick"}) as run:
        run.record("errors", findings)
    run.finish()
    stored = run.client.get_run(run.id)
    children = run.client.search_runs([stored.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.id}'")
    assert {each.info.run_name for each in children} == {"h2o", "snapkv"} and len(children) == 2
    assert {each.info.status for each in children} == {"FINISHED"}
    (snapkv,) = (each for each in children if each.info.run_name == "snapkv")
    history = run.client.get_metric_history(snapkv.info.run_id, "over_budget/error")
    assert [(each.step, each.value) for each in history] == [(64, 0.064), (256, 0.256)]
    assert not [name for name in run.metrics if name.startswith("over_")], "claims are judged by a run's own numbers"
    assert [each.info.run_id for each in run_index.finished(run.client, stored.info.experiment_id)] == [run.id]


def test_a_run_shows_a_dozen_numbers_and_its_table_all(project):
    """First those of quoted claims, in the ledger's order; what is not measured leaves room for the others."""
    quoted = dict.fromkeys(claim.metric for claim in papers.quoted() if claim.experiment == EXPERIMENT)
    every = dict.fromkeys(claim.metric for claim in papers.claims(experiment=EXPERIMENT))
    assert 1 < len(quoted) < showing.MOST < len(every)
    numbers = {f"other/{n}": float(n) for n in range(30)} | dict.fromkeys(every, 0.25)
    absent = next(iter(quoted))
    del numbers[absent]
    with tracking.start(EXPERIMENT, {}) as run:
        run.log(numbers, {"other/3": (2.0, 4.0)})
        early = set(run.client.get_run(run.id).data.metrics)
        assert early >= quoted.keys() - {absent}, "the chart fills while the notebook runs"
    stored = run.client.get_run(run.id)
    assert stored.data.metrics.keys() > early and len(stored.data.metrics) == showing.MOST
    assert stored.data.metrics.keys() <= every.keys()
    assert findings_table.numbers(stored) == numbers | {"other/3/low": 2.0, "other/3/high": 4.0}
    lines = json.loads(Path(run.client.download_artifacts(run.id, findings_table.FILE)).read_text())
    assert lines["columns"] == ["metric", "value", "low", "high"] and ["other/3", 3.0, 2.0, 4.0] in lines["data"]
    assert {"path": "findings.json", "type": "table"} in json.loads(stored.data.tags[tracking.LISTED])


def test_a_notebook_names_its_own_headlines_and_others_have_their_first_numbers(project):
    with tracking.start(EXPERIMENT, {}, headlines=["b", "never"]) as run:
        run.log({"a": 1, "b": 2, "reduction/0.20": 0.3})
    assert run.client.get_run(run.id).data.metrics == {"b": 2.0}
    with tracking.start("mine", {}) as run:
        run.log({f"loss/{n}": n for n in range(10)})
        run.log({"loss/3": 7.5, "late/1": 1, "late/2": 2, "late/3": 3})
    shown = run.client.get_run(run.id).data.metrics
    assert len(shown) == showing.MOST and shown["loss/3"] == 7.5 and "late/3" not in shown
    with pytest.raises(KvlabError, match="at most 12 headline metrics, and 13 are named"):
        tracking.start("mine", {}, headlines=[str(n) for n in range(13)])


def test_a_run_that_is_opened_again_keeps_its_earlier_numbers(project):
    run = tracking.start(EXPERIMENT, {})
    run.log({"a": 1, "b": 2}, {"a": (0, 2)})
    again = tracking.Run(run.client, run.id, EXPERIMENT)
    again.log({"b": 3, "c": 4})
    kept = findings_table.numbers(run.client.get_run(run.id))
    assert kept == {"a": 1.0, "a/low": 0.0, "a/high": 2.0, "b": 3.0, "c": 4.0}


def test_a_lost_table_is_one_sentence(project):
    with tracking.start(EXPERIMENT, {}) as run:
        run.log({"a": 1})
    for path in (project / "mlruns" / "artifacts").rglob("findings.json"):
        path.unlink()
    with pytest.raises(KvlabError, match=f"findings.json of the run {run.id} cannot be read"):
        findings_table.numbers(run.client.get_run(run.id))
