"""A name becomes a language model: weights, tokenizer and the hash that a result carries in its signature.

The names below are imported when they are first used, so that a look at the catalogue does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvlab.inputs.models.catalogue import DEFAULT, MODELS, KnownModel

if TYPE_CHECKING:
    from kvlab.inputs.models.conversion import pull
    from kvlab.inputs.models.lm import LM, lm_of
    from kvlab.inputs.models.loading import load, random_lm, tokenizer

__all__ = ["DEFAULT", "LM", "MODELS", "KnownModel", "lm_of", "load", "pull", "random_lm", "tokenizer"]

_HOMES = {"conversion": ("pull",), "lm": ("LM", "lm_of"), "loading": ("load", "random_lm", "tokenizer")}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
