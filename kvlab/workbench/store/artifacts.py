"""The files of a run that is at hand."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.workbench.store.retries import RetryingClient


def left(connection: RetryingClient, run_id: str) -> list[str]:
    """Lines on a job's results: the verdicts of its claims, its story's first sentence, and the paths of its files.

    The files are its executed notebook and its figures. Empty where the store has lost the run since.
    """
    from mlflow.exceptions import MlflowException

    try:
        run = connection.get_run(run_id)
    except MlflowException:
        return []
    place = urlsplit(run.info.artifact_uri or "")
    here = place.scheme in ("", "file")
    folder = _short(Path(url2pathname(place.path))) if here else f"run {run.info.run_id}"
    parts = []
    for path in files(connection, run, "", ".json"):
        if path.name == "claims.json":
            groups: dict[str, Counter[str]] = {}
            for each in json.loads(path.read_text(encoding="utf-8")):
                groups.setdefault(each.get("group", "claims"), Counter())[each["verdict"]] += 1
            for group, counts in sorted(groups.items()):
                parts.append(f"{group}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))
    for path in files(connection, run, "story", ".md"):
        parts.append(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("- "))
        break
    parts += [f"{folder}/notebook/{path.name}" for path in files(connection, run, "notebook", ".html")]
    parts += [f"{folder}/figures/{path.name}" for path in files(connection, run, "figures", ".png")]
    return parts or [f"run {run.info.run_id}"]


def _short(folder: Path) -> str:
    """A folder as it is shortest from where the command was given."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def files(connection: RetryingClient, run: Run, folder: str, suffix: str) -> Iterator[Path]:
    """Yield a copy of each file NAME+suffix that lies directly in a folder of a run's artifacts, sorted by name.

    Each copy is there until the next one is asked for.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    assert run.info.artifact_uri is not None, "every run that is stored has a place for its files"
    # By the run's id, the store would read the run again for each question, with its thousands of metrics.
    there = get_artifact_repository(run.info.artifact_uri, tracking_uri=connection.tracking_uri)
    listed, download = connection.with_retries(there.list_artifacts), connection.with_retries(there.download_artifacts)
    for artifact in sorted(listed(folder), key=lambda each: each.path):
        if artifact.path.endswith(suffix) and not artifact.is_dir:
            with tempfile.TemporaryDirectory() as temporary:
                yield Path(download(artifact.path, temporary))


def fetch(connection: RetryingClient, run: Run, folder: str, into: Path) -> list[str]:
    """Copy all files that lie directly in a folder of a run's artifacts into another one; returns their names."""
    names = []
    for path in files(connection, run, folder, ""):
        shutil.copy(path, into / path.name)
        names.append(path.name)
    return names
