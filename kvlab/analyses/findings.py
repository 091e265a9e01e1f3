"""What an analysis found: rows, metrics and intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.errors import KvlabError
from kvlab.lib.bootstrap import interval

if TYPE_CHECKING:
    pass


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

    def add_difference(self, name: str, left: pd.Series, right: pd.Series) -> None:
        """The mean of `left - right`, paired by their index (documents, examples), with its interval."""
        if set(left.index) != set(right.index):
            raise KvlabError(f"{name}: the two sides were measured on different documents")
        self.add(name, left - right)

    def __or__(self, other: Findings) -> Findings:
        """Both sets of metrics, with the left one's table."""
        return Findings(self.table, self.metrics | other.metrics, self.intervals | other.intervals)
