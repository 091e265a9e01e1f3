"""Judges the quoted findings in each cell by itself: on the runs of that cell, and on no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvlab import papers
from kvlab.workbench.jobs.stability_cells import Cell, measurable
from kvlab.workbench.report import runs
from kvlab.workbench.report.stability import Line
from kvlab.workbench.store import database, run_index
from kvlab.workbench.store.findings_table import numbers

if TYPE_CHECKING:
    from mlflow.entities import Run

    from kvlab.workbench.jobs.running_job import Result

DONE = ("finished", "done earlier")


def judged(found: Mapping[Cell, Sequence[Result]], profile: str) -> list[Line]:
    """A line for each quoted claim and cell, as `stability.keep` writes them: finding by finding, in the order of the
    papers. A cell is left out if one of its jobs failed, or if code was edited while it ran.

    Args:
        found: how the jobs of each cell ended.
        profile: that they ran with.
    """
    connection = database.client()
    of_cells: dict[Cell, list[Run]] = {}
    for cell, results in found.items():
        if all(result.state in DONE for result in results):
            mine = [connection.get_run(result.run_id) for result in results]
            if not any(run.data.tags.get("kvlab.key") == run_index.EDITED for run in mine):
                of_cells[cell] = sorted(mine, key=lambda run: run.info.end_time or 0, reverse=True)
    return [
        _line(claim, cell, mine, profile)
        for claim in measurable(papers.quoted(), profile)
        for cell, mine in of_cells.items()
        if cell.experiment == claim.experiment
    ]


def _line(claim: papers.Claim, cell: Cell, mine: Sequence[Run], profile: str) -> Line:
    run = runs.best(mine, claim)
    verdict = papers.judge(claim, numbers(run or mine[0]))
    tags = (run or mine[0]).data.tags
    row = {
        "paper": claim.paper,
        "finding": claim.fact[1],
        "claim": claim.id,
        "model": tags.get("model", cell.model),
        "profile": profile,
        "seed": cell.seed,
        "documents": cell.documents,
        **verdict.model_dump(include={"verdict", "value", "low", "high"}),
        "signature": tags.get("signature", ""),
        "commit": tags.get("kvlab.commit", ""),
        "machine": tags.get("hardware", ""),
    }
    return {name: "" if value is None else str(value) for name, value in row.items()}
