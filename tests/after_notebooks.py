"""What all notebooks logged, looked at after `make test-notebooks` ran them into a store of its own.

Not collected with the other tests: it needs that store, which MLFLOW_TRACKING_URI names.
"""

from __future__ import annotations

import functools
import math
import os

import pytest

from kvlab import papers
from kvlab.workbench import experiments
from kvlab.workbench.store import database, showing
from kvlab.workbench.store.findings_table import numbers
from kvlab.workbench.store.tracking import file_name

MEASURED = [claim for claim in papers.claims() if claim.experiment]
OWN = "tags.`kvlab.kind` != 'policy'"
QUICK = [claim for claim in MEASURED if claim.profile == "quick"]


@functools.cache
def client():
    assert os.environ.get("MLFLOW_TRACKING_URI"), "name the notebooks' store: MLFLOW_TRACKING_URI=sqlite:///..."
    return database.client()


@functools.cache
def run_of(experiment: str):
    """The newest run of an experiment."""
    known = client().get_experiment_by_name(experiment)
    assert known, f"no notebook logs to the experiment {experiment}"
    runs = client().search_runs([known.experiment_id], OWN, order_by=["attributes.start_time DESC"], max_results=1)
    assert runs, f"the notebook of {experiment} logged no run"
    return runs[0]


@functools.cache
def artifacts(run_id: str, folder: str | None = None) -> frozenset[str]:
    return frozenset(artifact.path for artifact in client().list_artifacts(run_id, folder))


@pytest.mark.parametrize("name", experiments.names())
def test_every_notebook_finished_its_run_and_signed_it(name):
    run = run_of(name)
    assert run.info.status == "FINISHED"
    assert len(run.data.tags.get("signature", "").split("|")) >= 3, "a signature says model, document, what and seed"
    assert numbers(run) and all(math.isfinite(value) for value in numbers(run).values())
    assert len(run.data.metrics) <= showing.MOST
    assert int(run.data.tags["parameters"]) > 0 and len(run.data.tags["model_sha256"]) == 64, "run.about(lm) tells"
    declared = set(experiments.jobs(name)[0].parameters)
    assert set(run.data.params) == declared, "tracking.start is given the notebook's parameters, all of them"


@pytest.mark.parametrize("name", sorted({claim.experiment for claim in MEASURED}))
def test_a_notebook_with_claims_judged_them(name):
    assert "claims.json" in artifacts(run_of(name).info.run_id)


@pytest.mark.parametrize("claim", QUICK, ids=lambda claim: claim.id)
def test_what_a_claim_reads_was_logged(claim):
    """Its metric and those that its tests name, the ends of intervals among them; and the figure that shows it."""
    run = run_of(claim.experiment)
    missing = {name for name in claim.metrics if not math.isfinite(numbers(run).get(name, math.nan))}
    assert not missing
    low, high = (numbers(run).get(f"{claim.metric}{end}") for end in ("/low", "/high"))
    if low is not None and high is not None:
        assert low <= high
    resting = claim.provided is None or claim.provided.check(claim.metric, numbers(run).__getitem__, None)[0]
    assert (papers.judge(claim, numbers(run)).verdict != "not measured") == resting
    if claim.figure:
        assert f"figures/{file_name(claim.figure)}.png" in artifacts(run.info.run_id, "figures")


@pytest.mark.parametrize("claim", [claim for claim in MEASURED if claim not in QUICK], ids=lambda claim: claim.id)
def test_what_only_the_full_profile_measures_was_not_logged(claim):
    """Else the claim would say that it waits for a profile that it does not need."""
    verdict = papers.judge(claim, numbers(run_of(claim.experiment)))
    assert verdict.verdict == "not measured" and verdict.why.startswith(papers.FULL_ONLY)
