"""The files of a run that is at hand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.workbench.store.patience import Patient


def files(connection: Patient, run: Run, folder: str, suffix: str) -> Iterator[Path]:
    """A copy of each file NAME+suffix that lies directly in a folder of a run's artifacts, sorted by name; each is
    there until the next is asked for.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    assert run.info.artifact_uri is not None, "every run that is stored has a place for its files"
    # By the run's id, the store would read the run again for each question, with its thousands of metrics.
    there = get_artifact_repository(run.info.artifact_uri, tracking_uri=connection.tracking_uri)
    listed, download = connection.patiently(there.list_artifacts), connection.patiently(there.download_artifacts)
    for artifact in sorted(listed(folder), key=lambda each: each.path):
        if artifact.path.endswith(suffix) and not artifact.is_dir:
            with tempfile.TemporaryDirectory() as temporary:
                yield Path(download(artifact.path, temporary))
