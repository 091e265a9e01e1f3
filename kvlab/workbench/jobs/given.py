"""What a notebook was given: papermill's -p passes a list or a mapping as the text that stood on the command line."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from kvlab.workbench.jobs import experiments

# Of each type that a notebook may name for a parameter, a value to tell what is wanted.
EXAMPLES = {list[str]: ["one", "another"], list[int]: [64, 128], list[float]: [0.1, 0.25], dict: {"tokens": 24}}


def typed(namespace: MutableMapping[str, Any], **types: Any) -> None:
    """Read those parameters of a notebook (its `globals()`) that are lists or mappings, in place, as `kvlab run -p`
    does: a list may be given as such, as a JSON text, with commas, or as its only entry.

    types: parameter -> list[str], list[int], list[float] or dict. Raises KvlabError for what is nothing of the kind.
    """
    for name, kind in types.items():
        example, value = EXAMPLES[kind], namespace[name]
        if isinstance(value, (str, int, float)):
            value = experiments.read(str(value), example)
        namespace[name] = experiments.checked(name, value, example, "this notebook")
