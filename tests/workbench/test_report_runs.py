"""The runs that claims rest on are those that reading the whole store would find, asked for a few at a time."""

from __future__ import annotations

import math
import random

import pytest
from mlflow.entities import Metric
from support.projects import EXPERIMENT
from support.runs import job

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench.report import evidence, ledger, runs
from kvlab.workbench.report import page as report
from kvlab.workbench.store import artifacts, database, run_index, tracking

METRICS = ["m", "n", "m/low", "m/high"]
MODELS = ["toy@0", "other", "it's"]


def claim(**fields) -> papers.Claim:
    needed = {"id": "p.toy", "paper": "p", "where": "w", "summary": "s", "metric": "m", "paper_value": None}
    tests = {"direction": {"kind": "greater", "than": 0.0}, "size": {"kind": "greater", "metric": "n", "than": 0.0}}
    return papers.Claim.model_validate({**needed, "experiment": EXPERIMENT, **tests, **fields})


def logged(metrics: dict[str, float], model: str, profile: str = "quick", headlines=None, **fields) -> str:
    """A finished job with exactly these metrics: as older code left it, or with a table and these headlines."""
    tags = {"kvlab.kind": "job", "kvlab.profile": profile, "model": model, **fields}
    run = tracking.create_run(database.client(), EXPERIMENT, {}, tags, "toy", headlines or ())
    if headlines is not None:
        run.log(metrics)
        run.finish()
        return run.id
    stored = [Metric(name, value, 0, 0) for name, value in metrics.items()]
    database.client().log_batch(run.id, stored, synchronous=True)
    run.finish()
    return run.id


def questions(monkeypatch) -> list[str]:
    """The queries that reach the store from now on."""
    asked, search = [], run_index._found

    def counted(connection, experiment, query, page_size):
        asked.append(query)
        return search(connection, experiment, query, page_size)

    monkeypatch.setattr(run_index, "_found", counted)
    return asked


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_reading_every_run_finds(project, seed):
    draw = random.Random(seed)
    history = []
    for _ in range(14):
        model, names = draw.choice(MODELS), draw.sample(METRICS, draw.randint(0, 4))
        headlines = draw.choice([None, ["m"], ["other"]])
        ends = [] if headlines else [-math.inf, math.inf]
        values = {name: draw.choice([0.5, -2.0, *ends]) for name in names}
        history.append((logged(values, model, headlines=headlines), model, set(names)))
    last = runs.newest([EXPERIMENT, "nothing"], "model").get(EXPERIMENT, {})
    for model in MODELS:
        newest_first = [(run, names) for run, of, names in reversed(history) if of == model]
        assert (model in last) == bool(newest_first)
        if model not in last:
            continue
        found = runs.Runs(database.client(), last[model])
        assert found.newest.info.run_id == newest_first[0][0]
        for size in ({"kind": "greater", "than": 0.0}, {"kind": "greater", "metric": "n", "than": 0.0}):
            asked = claim(size=size)
            own = [run for run, names in newest_first if "m" in names]
            whole = [run for run, names in newest_first if asked.metrics <= names]
            best = found.measuring(asked)
            assert (best and best.info.run_id) == next(iter([*whole, *own][: 1 if whole else None]), None)


@pytest.mark.parametrize("headlines", [None, ["n"]])
def test_a_store_is_asked_no_more_when_it_grows(project, monkeypatch, headlines):
    asked = questions(monkeypatch)
    monkeypatch.setattr(ledger, "claims", lambda: [claim(), claim(id="p.other", metric="absent")])

    def read() -> int:
        asked.clear()
        judged = report.entries()
        assert [entry.verdict.value for entry in judged if entry.claim.id == "p.toy"] == [0.5]
        return len(asked)

    logged({"m": 0.5, "n": 1.0}, "toy@0", headlines=headlines)
    logged({}, "toy@0", headlines=headlines)
    few = read()
    for _ in range(20):
        logged({}, "toy@0", headlines=headlines)
    assert read() == few


def test_values_of_a_tag_are_found_however_they_are_spelt(project):
    for model, profile in [("toy@0", "quick"), ("it's", "full"), ("toy@0", "full"), ("other", "quick")]:
        job(0.1, model=model, profile=profile)

    def values(tag: str, **tags: str) -> dict[str, set[str]]:
        return {name: set(found) for name, found in runs.newest([EXPERIMENT, "nothing"], tag, **tags).items()}

    assert values("model") == {EXPERIMENT: {"toy@0", "it's", "other"}}
    assert values("model", profile="full") == {EXPERIMENT: {"toy@0", "it's"}}
    assert values("kvlab.profile") == {EXPERIMENT: {"quick", "full"}}
    job(0.1, status="FAILED", model="failed")
    assert "failed" not in values("model")[EXPERIMENT]


def test_a_job_whose_code_was_edited_is_passed_over(project):
    kept = logged({"m": 0.5}, "toy@0")
    for _ in range(3):
        logged({"m": 0.7}, "toy@0", **{"kvlab.key": run_index.EDITED})
    best = runs.Runs(database.client(), runs.newest([EXPERIMENT], "model")[EXPERIMENT]["toy@0"]).measuring(claim())
    assert best is not None and best.info.run_id == kept


def test_what_is_asked_for_and_is_not_there_is_named(project):
    job(0.1, model="toy@0", profile="quick")
    with pytest.raises(KvlabError, match="profile 'gpu'.*there are runs of: quick"):
        ledger.refuse(None, "gpu")
    with pytest.raises(KvlabError, match="model 'mine'.*there are runs of: toy"):
        ledger.refuse("mine", None)


@pytest.mark.parametrize("folder", ["plain", "a b#c%20d?e", "ä'"])
def test_files_of_a_run_are_found_wherever_the_project_lies(project, monkeypatch, folder):
    """Its pictures and sentences, without the store reading the run again: it may hold thousands of metrics."""
    (project / folder).mkdir()
    for name in ("notebooks", "experiments", "mlruns"):
        (project / name).rename(project / folder / name)
    monkeypatch.chdir(project / folder)
    run = database.client().get_run(job(0.5, figure=True))
    tracking.Run(database.client(), run.info.run_id, EXPERIMENT).tell("error curves", ["It merges."])

    def again(*_, **__):
        raise AssertionError("the run was read again")

    monkeypatch.setattr("mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore.get_run", again)
    shown = [(path.name, path.exists()) for path in artifacts.files(database.client(), run, "figures", ".png")]
    assert shown == [("error_curves.png", True)]
    assert evidence.saved_sentences(database.client(), run) == {"error_curves": ["It merges."]}
    assert not list(artifacts.files(database.client(), run, "nothing", ".png"))


def test_a_job_of_its_own_kind_or_an_ordinary_one_stands_for_a_job(project):
    key = {"kvlab.key": "k"}
    cell = job(0.1, kind="cell", **key)
    number = runs.experiment_id(database.client(), EXPERIMENT)
    assert number is not None

    def found(kind: str) -> str | None:
        run = run_index.done(database.client(), number, "k", kind)
        return run and run.info.run_id

    assert (found("cell"), found("job")) == (cell, None)
    ordinary = [job(0.1, **key), job(0.2, **key)]
    later = job(0.3, kind="cell", **key)
    assert later != cell and (found("cell"), found("job")) == (ordinary[1], ordinary[1])
