"""The run above a sweep's jobs, and what it shows of them: headline metrics, counted verdicts and the first figure."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab import papers
from kvlab.workbench.store import artifacts, showing, tracking
from kvlab.workbench.store.database import DESCRIPTION

if TYPE_CHECKING:
    from mlflow.entities import Run


class ParentRun:
    """The open run above the jobs of one experiment. Finished jobs are added one by one.

    summary: what the experiment is about; the run's description begins with it.
    """

    def __init__(self, run: tracking.Run, summary: str) -> None:
        self.run = run
        self._summary = summary
        self._verdicts: Counter[str] = Counter()
        self._has_figure = False

    def add(self, run_id: str, number: int) -> None:
        """Add a finished job: its headline metrics as step `number`, its verdicts to the counts, and its figure if no
        earlier job had one.
        """
        from mlflow.entities import RunTag

        connection, job = self.run.client, self.run.client.get_run(run_id)
        self._verdicts.update({name: int(n) for name, n in job.data.tags.items() if name.startswith(showing.VERDICT)})
        connection.log_batch(
            self.run.id,
            metrics=showing.metrics(showing.Point(name, number, value) for name, value in job.data.metrics.items()),
            tags=[RunTag(name, str(count)) for name, count in self._verdicts.items()],
        )
        if not self._has_figure:
            self._has_figure = self._show(job)

    def _show(self, job: Run) -> bool:
        """Copy the figure to look at first, and what it shows in sentences; returns whether the job has a figure."""
        claims = [claim for claim in papers.quoted() if claim.experiment == self.run.experiment]
        claims += papers.claims(experiment=self.run.experiment)
        order = [tracking.file_name(claim.figure) for claim in claims if claim.figure]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            drawn = [name for name in artifacts.fetch(self.run.client, job, "figures", folder) if name.endswith(".png")]
            if not drawn:
                return False
            first = next((name for name in order if f"{name}.png" in drawn), Path(drawn[0]).stem)
            self.run.client.log_artifact(self.run.id, str(folder / f"{first}.png"), "figures")
            if f"{first}.md" in artifacts.fetch(self.run.client, job, tracking.STORY, folder):
                told = (folder / f"{first}.md").read_text(encoding="utf-8")
                self.run.tag(DESCRIPTION, f"{self._summary}\n\n{told}")
        return True
