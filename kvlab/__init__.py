"""kvlab: a laboratory for KV-cache compression in LLMs.

The names below are imported when they are first used, so that `kvlab --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.corpus import Document, document, documents, questions
    from kvlab.errors import KvlabError
    from kvlab.fidelity import closed_against_open, fidelity
    from kvlab.live import compress
    from kvlab.models import LM, home, load, random_lm
    from kvlab.policies import Policy, policies, policy
    from kvlab.replay import replay
    from kvlab.trace import Trace, capture
    from kvlab.workbench.explore import explore

# Beside other work torch's threads wait in vain for one that the system has put aside, spinning on a core that the
# other could use: several times slower on two cores. With a short spin they sleep. The OpenMP library reads this as it
# is loaded; what a user has set stays, and so does OMP_NUM_THREADS.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "2000"

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Document",
    "KvlabError",
    "Policy",
    "Trace",
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
]

_HOMES = {
    "corpus": ("Document", "document", "documents", "questions"),
    "errors": ("KvlabError",),
    "fidelity": ("closed_against_open", "fidelity"),
    "live": ("compress",),
    "models": ("LM", "home", "load", "random_lm"),
    "policies": ("Policy", "policies", "policy"),
    "replay": ("replay",),
    "trace": ("Trace", "capture"),
    "workbench.explore": ("explore",),
}


class _Package(ModuleType):
    """Some functions, such as `policies` and `replay`, share their names with the modules that they live in."""

    def __getattr__(self, name: str) -> Any:
        for module, names in _HOMES.items():
            if name in names:
                return getattr(importlib.import_module(f"kvlab.{module}"), name)
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule binds it here under its own name, where users expect the function.
        if isinstance(value, ModuleType) and name in _HOMES.get(name, ()):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
