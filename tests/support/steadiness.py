"""Lines of a measurement of stability, as they are kept."""

from __future__ import annotations

from kvlab.workbench.report import stability
from support.report_pages import CLAIM

FINDING = "merging against eviction"
TIGHT = "zsmerge.figure4.tight_budgets"


def lines(*verdicts: str, seeds=("0", "1", "2"), documents=("mixed/8", "mixed/8b"), claim=CLAIM, **fields):
    """A line of a claim for each cell."""
    places = [(seed, name) for seed in seeds for name in documents]
    assert len(places) == len(verdicts)
    return [
        {
            **dict.fromkeys(stability.COLUMNS, ""),
            **{"paper": "zsmerge", "finding": FINDING, "claim": claim, "model": "toy@0", "profile": "quick"},
            **{"seed": seed, "documents": name, "verdict": verdict, **fields},
        }
        for (seed, name), verdict in zip(places, verdicts, strict=True)
    ]
