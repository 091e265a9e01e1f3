"""A small project in a folder: an experiment, its notebook, and an MLflow store that is copied instead of made anew."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
import yaml

from kvlab.workbench.store import database

EXPERIMENT = "zsmerge_error_curves"  # a name that claims belong to, so that the ledger has something to judge

PARAMETERS = "seed = 0\nreduction = 0.6\nboom = False\nnames = ['a', 'b']\nscale = 0.5\n"
BODY = """import pandas
from matplotlib.figure import Figure
from kvlab.workbench.store import tracking
run = tracking.start("zsmerge_error_curves", {"seed": seed}, signature=f"toy@0|seed {seed}", model="toy")
run.log({"reduction/0.20": reduction}, {"reduction/0.20": (reduction - 0.05, reduction + 0.05)})
run.table("errors", pandas.DataFrame({"ratio": [0.2], "reduction": [reduction]}))
figure = Figure(figsize=(3, 2)); figure.subplots().plot([1, 2, 3]); run.figure("curve", figure)
run.claims()"""
CHECK = "if boom:\n    raise ValueError('the roof is on fire')"


def cell(source: str, *tags: str) -> dict:
    """A code cell."""
    return {
        "cell_type": "code",
        "source": source,
        "metadata": {"tags": list(tags)},
        "outputs": [],
        "execution_count": None,
        "id": f"cell-{abs(hash(source)) % 10**8}",
    }


def notebook(path: Path, *cells: dict) -> None:
    """Write a notebook of these cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))


def experiment(root: Path, name: str = EXPERIMENT, **changes: object) -> None:
    """Write an experiment of the toy notebook; a change of None leaves the key out."""
    content = {"notebook": "notebooks/toy.ipynb", "description": "A toy.", **changes}
    (root / "experiments").mkdir(exist_ok=True)
    (root / "experiments" / f"{name}.yaml").write_text(
        yaml.safe_dump({key: value for key, value in content.items() if value is not None})
    )


@functools.cache
def blank_store() -> bytes:
    """An empty MLflow database, made once for each process: making one takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        database._ready_database(Path(folder) / "mlflow.db")
        return (Path(folder) / "mlflow.db").read_bytes()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory is a project with the toy experiment and a fresh store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "mlflow.db").write_bytes(blank_store())
    notebook(tmp_path / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(BODY), cell(CHECK))
    experiment(tmp_path, parameters={"seed": 0})
    monkeypatch.chdir(tmp_path)
    return tmp_path
