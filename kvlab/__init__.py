"""kvlab: a laboratory for KV-cache compression in LLMs.

The names below are imported when they are first used, so that `kvlab --help` does not wait for torch. None of them is
also the name of a module, so `import kvlab.X` always gives the module X and `kvlab.replay` always the function.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from kvlab.version import __version__

if TYPE_CHECKING:
    from kvlab.core.storage import storages
    from kvlab.errors import KvlabError
    from kvlab.inputs.corpus import Document, document, documents, questions
    from kvlab.inputs.models import LM, load, random_lm
    from kvlab.inputs.packs import home
    from kvlab.live.fidelity import closed_against_open, fidelity
    from kvlab.live.session import compress
    from kvlab.methods import Policy, policies, policy
    from kvlab.render.explorer.explore import explore
    from kvlab.replays.run import replay
    from kvlab.traces.run import capture
    from kvlab.traces.trace import Trace

# Beside other work torch's threads wait in vain for one that the system has put aside, spinning on a core that the
# other could use: several times slower on two cores. With a short spin they sleep. The OpenMP library reads this as it
# is loaded; what a user has set stays, and so does OMP_NUM_THREADS.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "2000"

# oneDNN, and torch's layer over it, keep their last kernels, half a megabyte each, and meet a new shape with each
# length of a prompt. 256 are enough for the blocks of 8k tokens (`core/onednn.py`); beyond, making them anew costs a
# tenth of the attention. Their own limits of 1024 would fill half a gigabyte.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "256")

__all__ = [
    "LM",
    "Document",
    "KvlabError",
    "Policy",
    "Trace",
    "__version__",
    "capture",
    "closed_against_open",
    "compress",
    "document",
    "documents",
    "explore",
    "fidelity",
    "home",
    "load",
    "policies",
    "policy",
    "questions",
    "random_lm",
    "replay",
    "storages",
]

_HOMES = {
    "core.storage": ("storages",),
    "errors": ("KvlabError",),
    "inputs.corpus": ("Document", "document", "documents", "questions"),
    "inputs.models": ("LM", "load", "random_lm"),
    "inputs.packs": ("home",),
    "live.fidelity": ("closed_against_open", "fidelity"),
    "live.session": ("compress",),
    "methods": ("Policy", "policies", "policy"),
    "replays.run": ("replay",),
    "traces.run": ("capture",),
    "traces.trace": ("Trace",),
    "render.explorer.explore": ("explore",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"kvlab.{module}"), name)
            return value
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
