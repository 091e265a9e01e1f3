"""The papers' analyses as functions: a model or traces in; tidy tables, metrics and intervals out.

Notebooks stay thin because the work is here; each module follows one paper's section.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.spread import interval

if TYPE_CHECKING:
    from kvlab.corpus import Document
    from kvlab.models import LM

SUMMARISE = "\n\nSummarize the text above in one paragraph."


@dataclass
class Findings:
    """What an analysis found: a tidy table, the metrics by name, and an interval where there is one."""

    table: pd.DataFrame
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, repetitions: Iterable[float]) -> None:
        """The mean of repeated measurements under `name`, with its bootstrap interval."""
        values = [float(v) for v in repetitions]
        self.metrics[name] = sum(values) / len(values)
        self.intervals[name] = interval(values)

    def __or__(self, other: Findings) -> Findings:
        """Both sets of metrics, with the left one's table."""
        return Findings(self.table, self.metrics | other.metrics, self.intervals | other.intervals)


def to_summarise(lm: LM, document: Document, tokens: int) -> Document:
    """The start of a document with a request to summarise it, so that the whole prompt has at most `tokens` tokens."""
    from dataclasses import replace

    around = lm.encode(SUMMARISE).shape[-1]
    # The tokens at the seams may merge or split once the parts are joined.
    part = document.window(lm, tokens - around - 8)
    return replace(part, text=part.text + SUMMARISE)
