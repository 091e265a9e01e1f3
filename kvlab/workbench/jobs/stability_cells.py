"""An experiment once for each seed and each set of documents: how far do its verdicts depend on either?

Each combination is a cell, whose jobs go through the sweep as all others do. The cell that has the parameters of the
ordinary run is that run. The others are of a kind that the ledger does not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.workbench import experiments
from kvlab.workbench.experiments import CELL, ORDINARY, Experiment, Job
from kvlab.workbench.experiments.notebooks import parameters_of, reads
from kvlab.workbench.jobs import launch
from kvlab.workbench.jobs.running_job import Result

if TYPE_CHECKING:
    from rich.console import Console

ANY = "any"
"""Stands for the seed, or the documents, of an experiment whose notebook has no such parameter or never reads it."""
SEEDS = (0, 1, 2)
DOCUMENTS = ("mixed/8", "mixed/8b")


@dataclass(frozen=True)
class Cell:
    """An experiment on a model (empty: the one that its file names) with a seed and a set of documents, or `ANY`."""

    experiment: str
    model: str
    seed: str
    documents: str


def wanted(profile: str = "quick") -> list[str]:
    """The experiments that a profile needs to measure the quoted findings, in the order of their names.

    Raises:
        KvlabError: no paper's file quotes a finding.
    """
    quoted = papers.quoted()
    if not quoted:
        raise KvlabError("no finding is quoted: name some in a paper's file, as `quoted: [NAME OF A FINDING]`")
    return sorted({claim.experiment for claim in measurable(quoted, profile) if claim.experiment})


def measurable(quoted: Iterable[papers.Claim], profile: str) -> list[papers.Claim]:
    """The claims that a profile measures."""
    return [claim for claim in quoted if claim.profile == "quick" or profile != "quick"]


def run(
    names: Iterable[str],
    profile: str = "quick",
    models: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    documents: Sequence[str] = DOCUMENTS,
    workers: int | None = None,
    fresh: bool = False,
    console: Console | None = None,
    cluster: str | None = None,
) -> dict[Cell, list[Result]]:
    """Run every experiment once for each model, seed and set of documents, as `driver.run` does.

    Args:
        documents: each a name that stands for one document or several (`corpus.SETS`), or the path of a text file.

    Returns:
        How the jobs of each cell ended (several where the experiment has a grid), in the order of the arguments.
    """
    if not seeds or not documents:
        raise KvlabError("a cell has a seed and a set of documents: name at least one of each")
    loaded = [experiments.load(name) for name in names]
    cells: list[Cell] = []

    def queue() -> list[Job]:
        planned = [pair for each in loaded for pair in plan(each, profile, models, seeds, documents)]
        cells[:] = [cell for cell, _ in planned]
        return [job for _, job in planned]

    results = launch.go(loaded, queue, workers, fresh, console, cluster)
    found: dict[Cell, list[Result]] = {}
    for cell, result in zip(cells, results, strict=True):
        found.setdefault(cell, []).append(result)
    return found


def plan(
    experiment: Experiment, profile: str, models: Sequence[str], seeds: Sequence[int], documents: Sequence[str]
) -> Iterator[tuple[Cell, Job]]:
    """The jobs of an experiment with the cell of each."""
    takes_one = "model" in parameters_of(experiment.path)
    for model in dict.fromkeys(models if models and takes_one else ("",)):
        given = {"model": model} if model else {}
        ordinary = {job.key for job in experiments.jobs(experiment, profile, given)}
        for seed in _values(experiment, "seed", seeds):
            for texts in _values(experiment, "documents", documents):
                cell = Cell(experiment.name, model, str(seed.get("seed", ANY)), texts.get("documents", ANY))
                for job in experiments.jobs(experiment, profile, {**given, **seed, **texts}):
                    yield cell, replace(job, kind=ORDINARY if job.key in ordinary else CELL)


def _values(experiment: Experiment, name: str, values: Sequence[Any]) -> list[Mapping[str, Any]]:
    """A parameter with each of its values; without any where the notebook does not read it."""
    if name not in parameters_of(experiment.path) or not reads(experiment.path, name):
        return [{}]
    return [{name: value} for value in dict.fromkeys(values)]
