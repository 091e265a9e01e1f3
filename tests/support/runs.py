"""What a sweep left in the store."""

from __future__ import annotations

from kvlab.workbench.store import database
from support.projects import CHECK, EXPERIMENT, PARAMETERS, cell, experiment, notebook, project  # noqa: F401


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
