"""Traces as functions are given them."""

from __future__ import annotations

from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.traces.trace import Trace


def opened(given: Trace | str | Path) -> Trace:
    """A trace, or the one that was saved at that path. Raises KvlabError for anything else."""
    if isinstance(given, Trace):
        return given
    if isinstance(given, str | Path):
        return Trace.load(given)
    raise KvlabError(f"a trace is what kvlab.capture gives, or the path where one was saved, and not {given!r:.60}")
