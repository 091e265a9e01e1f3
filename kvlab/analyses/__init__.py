"""The papers' analyses as functions: a model or traces in; tidy tables, metrics and intervals out.

Notebooks stay thin because the work is here; each module follows one paper's section.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.errors import KvlabError
from kvlab.spread import interval

if TYPE_CHECKING:
    from kvlab.corpus import Document
    from kvlab.models import LM
    from kvlab.trace import Trace

DOCUMENTS = ("sotu/1962", "sotu/1975", "sotu/1983", "sotu/1999", "sotu/2012")
"""The texts of the quick profiles: five presidential messages of 6k to 8k tokens."""

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

    def add_difference(self, name: str, left: pd.Series, right: pd.Series) -> None:
        """The mean of `left - right`, paired by their index (documents, examples), with its interval."""
        if set(left.index) != set(right.index):
            raise KvlabError(f"{name}: the two sides were measured on different documents")
        self.add(name, left - right)

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


def common_traces(
    lm: LM, documents: Sequence[str] = DOCUMENTS, tokens: int = 2000, new_tokens: int = 32
) -> list[Trace]:
    """Traces of requests to summarise, with everything that any policy may ask for; captured once for all notebooks.

    Args:
        documents: names, as `kvlab.document` takes them.
        tokens: length of each prompt.
        new_tokens: length of each greedy response.
    """
    from kvlab import captures, corpus
    from kvlab.policies import policies

    prompts = [to_summarise(lm, corpus.document(name), tokens) for name in documents]
    return captures.shared(lm, prompts, new_tokens, window=64, policies=sorted(policies()))
