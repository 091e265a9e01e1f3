"""How well stand-ins predict answers on each model: from the store's runs, and kept next to ledgers as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvlab.errors import KvlabError
from kvlab.papers.stand_ins import ACROSS, DOCUMENTS, EXPERIMENT, OUTCOMES, Prediction, Predictions
from kvlab.workbench.report import csv_tables, runs
from kvlab.workbench.report.ledger_models import Subject
from kvlab.workbench.report.provenance import thoroughness
from kvlab.workbench.store import findings_table

if TYPE_CHECKING:
    from mlflow.entities import Run

FOLDER = "stand_ins"
COLUMNS = ["model", "stand_in", "outcome", "rho", "low", "high", "n", "profile", "commit"]
NUMBERS = ("rho", "low", "high")

Line = dict[str, str]


class Weighed(Protocol):
    """An entry of a ledger."""

    model: str
    predictions: Predictions


def weigh(entries: Iterable[Weighed], of_models: Mapping[str, Predictions]) -> None:
    """Tell each entry how well stand-ins predict answers on its model, whatever the hash of its weights."""
    for entry in entries:
        entry.predictions = of_models.get(Subject(entry.model).label, {})


def of_store() -> Mapping[str, Predictions]:
    """Label of a model -> what its last finished job of the experiment measured."""
    return _shown(line for run in _runs() for line in lines(run))


def _runs() -> list[Run]:
    return list(runs.newest({EXPERIMENT}, "model").get(EXPERIMENT, {}).values())


def lines(run: Run) -> list[Line]:
    """A line for each stand-in and outcome that a run has correlated."""
    tags, metrics = run.data.tags, findings_table.numbers(run)
    about = {"profile": tags.get("kvlab.profile", ""), "commit": tags.get("kvlab.commit", "")}
    about["model"] = tags.get("model", "")
    found = []
    for name in metrics:
        kind, *keys = name.split("/")
        if len(keys) == 2 and f"{kind}/" == ACROSS.partition("{")[0] and keys[1] in OUTCOMES:
            pair = dict(zip(("stand_in", "outcome"), keys, strict=True))
            numbers = {
                "rho": metrics[name],
                "low": metrics.get(f"{name}/low", metrics[name]),
                "high": metrics.get(f"{name}/high", metrics[name]),
            }
            shown = {key: f"{value:.4f}" for key, value in numbers.items()}
            found.append(about | pair | shown | {"n": f"{metrics[DOCUMENTS.format(**pair)]:.0f}"})
    return found


def keep(folder: Path, found: Iterable[Line]) -> list[Path]:
    """Write FOLDER/stand_ins/MODEL.csv: of each model one line for each stand-in, outcome and profile.

    Lines of other profiles stay. Columns: model, stand_in, outcome, rho, low, high, n (documents), profile, commit.
    """
    files: dict[Path, list[Line]] = {}
    for line in found:
        files.setdefault(folder / FOLDER / f"{Subject(line['model']).label}.csv", []).append(line)
    for path, mine in files.items():
        before = csv_tables.read(path, COLUMNS, "table of stand-ins") if path.exists() else []
        merged = {(line["outcome"], line["stand_in"], line["profile"]): line for line in [*before, *mine]}
        csv_tables.write(path, (merged[key] for key in sorted(merged)), COLUMNS)
    return list(files)


def keep_store(folder: Path) -> list[Path]:
    """`keep` what the store's last job on each model has measured."""
    return keep(folder, [line for run in _runs() for line in lines(run)])


def read(folder: Path) -> Mapping[str, Predictions]:
    """Label of a model -> what FOLDER/stand_ins keeps of it; nothing where there is no such folder.

    Raises:
        KvlabError: a file cannot be read, or has no numbers.
    """
    paths = sorted((folder / FOLDER).glob("*.csv"))
    return _shown(line for path in paths for line in csv_tables.read(path, COLUMNS, "table of stand-ins"))


def _shown(found: Iterable[Line]) -> Mapping[str, Predictions]:
    """Of each stand-in and outcome the line of the most thorough profile."""
    of_models: dict[str, dict[tuple[str, str], Prediction]] = {}
    for line in sorted(found, key=lambda line: thoroughness(line["profile"]), reverse=True):
        try:
            numbers = {name: float(line[name]) for name in NUMBERS}
            made = Prediction(line["stand_in"], line["outcome"], **numbers, documents=int(line["n"]))
        except ValueError as error:
            raise KvlabError(f"the table of stand-ins of {line['model']} has no readable numbers: {error}") from error
        of_models.setdefault(Subject(line["model"]).label, {})[line["stand_in"], line["outcome"]] = made
    return of_models
