"""CompilerKV's tables, learnt offline: trials on calibration texts, a log of them, conservative Q-learning.

`learn` does it all; `kvlab compile` is its command. `measure` tries one head and one threshold at a time instead, on
captured prompts, and `tables` makes a table for each budget of it (`kvlab compile --alone`).
"""

from kvlab.compile.compiler import Learnt, learn, mapped, write
from kvlab.compile.contexts import DOCUMENTS, HELD_APART
from kvlab.compile.evidence import tables
from kvlab.compile.log import Samples, load
from kvlab.compile.marginal import MarginalSettings, measure
from kvlab.compile.settings import Settings

__all__ = [
    "DOCUMENTS",
    "HELD_APART",
    "Learnt",
    "MarginalSettings",
    "Samples",
    "Settings",
    "learn",
    "load",
    "mapped",
    "measure",
    "tables",
    "write",
]
