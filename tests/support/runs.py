"""Runs in the store: what a sweep left there, and one logged by hand."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from kvlab.workbench.store import database, tracking
from support.projects import EXPERIMENT

ARTIFACTS = {
    "notebook/toy.ipynb",
    "notebook/toy.html",
    "figures/curve.png",
    "figures/curve.svg",
    "tables/errors.parquet",
    "tables/errors.json",
    "claims.json",
    "findings.json",
}
"""What the toy notebook's job leaves in the store."""


def runs(kind: str, name: str = EXPERIMENT) -> list:
    """The runs of a kind of an experiment in the store, oldest first."""
    client = database.client()
    where = [client.get_experiment_by_name(name).experiment_id]
    return client.search_runs(where, f"tags.`kvlab.kind` = '{kind}'", order_by=["attributes.start_time ASC"])


def artifacts(run) -> set[str]:
    client = database.client()
    return {
        file.path
        for folder in client.list_artifacts(run.info.run_id)
        for file in (client.list_artifacts(run.info.run_id, folder.path) if folder.is_dir else [folder])
    }


def job(
    value: float,
    status: str = "FINISHED",
    kind: str = "job",
    profile: str = "quick",
    model: str = "toy@0",
    metric: str = "reduction/0.20",
    figure: bool = False,
    more: Mapping[str, float] | None = None,
    **tags: object,
) -> str:
    """Log a run as the driver would; returns its id."""
    run = tracking.create_run(
        database.client(),
        EXPERIMENT,
        {"seed": 0},
        {"kvlab.kind": kind, "kvlab.profile": profile, "model": model, **tags},
        "toy",
    )
    run.log({metric: value, **(more or {})}, {metric: (value - 0.1, value + 0.1)})
    run.tag("signature", f"{model}|<script>alert(1)</script>")
    if figure:
        picture = Figure(figsize=(3, 2))
        picture.subplots().plot([1, 2, 3])
        run.figure("error_curves", picture)
    run.finish(status)
    return run.id
