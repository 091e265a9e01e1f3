"""CompilerKV's tables, learnt offline: trials on calibration texts, a log of them, conservative Q-learning.

`learn` does it all; `kvlab compile` is its command.
"""

from kvlab.compile.compiler import Learnt, learn, mapped, write
from kvlab.compile.contexts import DOCUMENTS, HELD_APART
from kvlab.compile.log import Samples, load
from kvlab.compile.settings import Settings

__all__ = ["DOCUMENTS", "HELD_APART", "Learnt", "Samples", "Settings", "learn", "load", "mapped", "write"]
