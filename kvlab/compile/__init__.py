"""CompilerKV's weights of heads, learnt offline: one head at a time on calibration prompts.

`measure` tries every weight of every head alone on captured prompts, and `tables` makes a table of it for each budget;
`kvlab compile` is their command.
"""

from typing import Any

from kvlab.compile.contexts import DOCUMENTS, HELD_APART
from kvlab.compile.evidence import mapped, tables, write
from kvlab.compile.marginal import MarginalSettings, measure
from kvlab.errors import KvlabError

__all__ = ["DOCUMENTS", "HELD_APART", "MarginalSettings", "mapped", "measure", "tables", "write"]

ENDED = ("Learnt", "Samples", "Settings", "learn", "load")
"""Names of joint trials, which kvlab no longer makes."""


def __getattr__(name: str) -> Any:
    if name in ENDED:
        raise KvlabError(
            f"kvlab.compile.{name} was of joint trials, which have ended; kvlab.compile.measure and tables learn one "
            "head at a time"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
