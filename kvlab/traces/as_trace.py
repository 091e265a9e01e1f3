"""Traces as functions are given them."""

from __future__ import annotations

from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.traces.trace import Trace


def opened(trace: Trace | str | Path) -> Trace:
    """A trace, or the one that was saved at that path. Raises KvlabError for anything else."""
    if isinstance(trace, Trace):
        return trace
    if isinstance(trace, str | Path):
        return Trace.load(trace)
    raise KvlabError(f"a trace is what kvlab.capture gives, or the path where one was saved, and not {trace!r:.60}")
