"""What MLflow's own pages show of a run: curves, datasets, verdicts in its tags, and the story as its description."""

from __future__ import annotations

import pandas
import pytest
from support.projects import EXPERIMENT

from kvlab.analyses.findings import Findings
from kvlab.workbench.store import database, showing, tracking

LINE = f"toy@0123abcd|sotu/1962@aa11 squad/Oxygen@bb22|{EXPERIMENT}(tokens=100, names='a@b')|0|kvlab 0.1.0"


@pytest.fixture
def findings():
    found = Findings(pandas.DataFrame({"document": ["a"]}))
    for budget in (64, 256):
        found.set("error/{policy}/b{budget}", budget / 1000, policy="snapkv", budget=budget)
        found.set("lost/{ratio:.2f}", 0.1, ratio=budget / 1000)
    return found


def test_effects_over_whole_numbers_are_curves(findings):
    assert showing.curves(findings.rows) == [
        ("over_budget/error/snapkv", 64, 0.064),
        ("over_budget/error/snapkv", 256, 0.256),
    ]


def test_a_run_has_its_curves_texts_and_verdicts(project, findings):
    run = tracking.start(EXPERIMENT, {"seed": 0}, signature=LINE)
    run.record("errors", findings, text=["Errors grow with the budget."])
    run.log({"reduction/0.20": 0.3}, {"reduction/0.20": (0.2, 0.4)})
    run.claims("zsmerge_error_curves")
    run.finish()
    history = run.client.get_metric_history(run.id, "over_budget/error/snapkv")
    assert [(each.step, each.value) for each in history] == [(64, 0.064), (256, 0.256)]
    assert "over_budget/error/snapkv" not in run.metrics, "claims are judged by a run's own numbers"
    stored = run.client.get_run(run.id)
    named = [(each.dataset.name, each.dataset.digest) for each in stored.inputs.dataset_inputs]
    assert sorted(named) == [("sotu/1962", "aa11"), ("squad/Oxygen", "bb22")]
    assert "Errors grow with the budget." in stored.data.tags[database.DESCRIPTION]
    assert int(stored.data.tags["verdict.holds_in_direction_only"]) >= 1
    assert sum(int(n) for key, n in stored.data.tags.items() if key.startswith("verdict.")) > 5
    (found,) = run.client.search_runs([stored.info.experiment_id], "tags.`verdict.holds_in_direction_only` != '0'")
    assert found.info.run_id == run.id
