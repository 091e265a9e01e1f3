"""Experiments, metrics and figures that a workspace's claims name and nothing has, so that no typo stays silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvlab import papers
from kvlab.errors import nearest
from kvlab.workbench import experiments
from kvlab.workbench.report import runs
from kvlab.workbench.store import artifacts, database
from kvlab.workbench.store.findings_table import numbers
from kvlab.workbench.store.tracking import file_name

if TYPE_CHECKING:
    from mlflow.entities import Run


def mistakes() -> list[str]:
    """A sentence for each name in the workspace's claims that no experiment, no run or no figure of a run has."""
    claims = [claim for paper in papers.own() for claim in paper.claims if claim.experiment]
    if not claims:
        return []
    known = experiments.names()
    ran = runs.newest({str(claim.experiment) for claim in claims}, "model")
    found = []
    for claim in claims:
        of_models = list(ran.get(str(claim.experiment), {}).values())
        if claim.experiment not in known:
            found.append(f"{claim.id}: {nearest(str(claim.experiment), known, 'experiment')}")
        elif of_models:
            found += [f"{claim.id}: {sentence}" for sentence in _in_runs(claim, of_models)]
    return found


def _in_runs(claim: papers.Claim, of_models: Sequence[Run]) -> Iterator[str]:
    """The metrics and figure of the claim that no model's last run of its experiment has."""
    measured = set().union(*map(numbers, of_models))
    excused = claim.profile == "full" or claim.why_lacking([claim.metric]) is not None
    if not excused and claim.metric not in measured:
        bare = {name for name in measured if not name.endswith(("/low", "/high"))}
        yield nearest(claim.metric, bare, f"metric of {claim.experiment}")
    if claim.figure:
        connection = database.client()
        drawn = {path.stem for run in of_models for path in artifacts.files(connection, run, "figures", ".png")}
        if file_name(claim.figure) not in drawn:
            yield nearest(claim.figure, drawn, f"figure of {claim.experiment}")
