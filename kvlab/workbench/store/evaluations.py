"""An evaluation as one MLflow run: metrics with intervals, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.evaluation import Answer, by_turn, decline, metrics, summary, table
from kvlab.render.figures import evaluation, turns
from kvlab.workbench.store import showing, tracking

EXPERIMENT = "eval"


def log(answers: Sequence[Answer], parameters: Mapping[str, Any]) -> str:
    """Log an evaluation as one run, with the metrics of `kvlab.evaluation.metrics`; returns its id."""
    rows = summary(answers)
    values, intervals = metrics(answers)
    scores = [name for name in values if name.endswith("/score")]
    with tracking.start(EXPERIMENT, parameters, headlines=scores[: showing.MOST]) as run:
        run.tag("mlflow.runName", named(parameters))
        run.log(values, intervals)
        run.table("answers", table(answers))
        run.table("summary", rows)
        run.table("by_kind", summary(answers, by="kind"))
        for name, part in by_turn(answers).items():
            run.table("_".join(["by_turn", *name.split()]), summary(part, "turn"))
            run.table("_".join(["decline", *name.split()]), decline(part))
        if heatmap := evaluation.needles(answers):
            run.figure("needle_heatmap", heatmap)
        if curves := turns.scores(answers):
            run.figure("by_turn", curves)
        run.json("signatures", sorted({answer.signature for answer in answers}))
    return run.id


def named(parameters: Mapping[str, Any]) -> str:
    """The run's name: tasks, policies and budgets."""
    policies = parameters.get("policies", ())
    shown = policies if len(policies) < 6 else [*policies[:4], f"{len(policies)} policies"]
    return " ".join([str(parameters.get("tasks", "")), ",".join(shown), str(parameters.get("budgets", ""))])[:120]
