"""What a notebook was given: read from its own parameters cell, in the kernel that runs it.

papermill's `-p` hands a list or a mapping over as the text that stood on the command line; here it becomes one.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any

from kvlab.errors import KvlabError
from kvlab.workbench.experiments import notebooks, values


def parameters() -> dict[str, Any]:
    """The parameters of the notebook that calls, with the values that they have now.

    The parameters cell is the first that holds nothing but plain values, of those that ran since a run was last
    started in this kernel; papermill runs it before the cell with what it was told. A list or a mapping that came as
    text (JSON, with commas, or its only entry, as `kvlab run -p` takes it) is put into the notebook's namespace as
    what it stands for.

    Raises:
        KvlabError: called outside a notebook, no such cell ran, or a value is not of the type of the cell's.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        raise KvlabError("outside a notebook say what the parameters are: tracking.start(NAME, {...})")
    declared, wanted = None, True
    for source in shell.user_ns["In"][:-1]:
        if "tracking.start(" in source:
            wanted = True
        elif wanted and (assigned := notebooks.plain_values(source)):
            declared, wanted = assigned, False
    if declared is None:
        raise KvlabError("no parameters cell has run: run the notebook from its first cell")
    return typed(shell.user_ns, declared)


def typed(namespace: MutableMapping[str, Any], declared: dict[str, Any]) -> dict[str, Any]:
    """The values of the declared parameters in `namespace`, those that came as text read there, too.

    Raises:
        KvlabError: a value that is not of the type of the declared one.
    """
    for name, default in declared.items():
        value = namespace[name]
        if isinstance(default, (list, dict)) and isinstance(value, (str, int, float)):
            value = values.read(str(value), default)
        namespace[name] = values.checked(name, value, default, "this notebook")
    return {name: namespace[name] for name in declared}
