"""kvlab: a laboratory for KV-cache compression in LLMs.

The names below are imported when they are first used, so that `kvlab --help` does not wait for torch. None of them is
also the name of a module, so `import kvlab.X` always gives the module X and `kvlab.replay` always the function.
An import changes nothing in the process: commands and jobs set their variables themselves (`kvlab.lib.environment`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvlab.version import __version__

if TYPE_CHECKING:
    from kvlab.attribution.attribute import attribute
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

__all__ = [
    "LM",
    "Document",
    "KvlabError",
    "Policy",
    "Trace",
    "__version__",
    "attribute",
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
    "attribution.attribute": ("attribute",),
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
