"""The parameters of a running notebook, read from its own parameters cell in the kernel.

papermill's `-p` passes a list or a mapping as the text from the command line; here it becomes a list or a mapping.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any

from kvlab.errors import KvlabError
from kvlab.workbench.experiments import experiment as experiments
from kvlab.workbench.experiments import notebooks, parameter_values


def shell() -> Any:
    """IPython's shell that runs the calling notebook; None outside IPython, which is not imported for this."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def parameters(experiment: str | None = None) -> dict[str, Any]:
    """The parameters of the calling notebook, with their present values.

    Where the kernel keeps no history (nbval runs cells so), the parameters cell is read from the file of the
    `experiment`'s notebook.

    The parameters cell is the first cell with only plain values. Only cells that ran since the last run was started in
    this kernel count. papermill runs the parameters cell before the cell with the values from its command line.

    A list or a mapping may have come as text: as JSON, with commas, or as its only entry, as for `kvlab run -p`. The
    list or mapping itself then replaces the text in the notebook's namespace.

    Raises:
        KvlabError: called outside a notebook, no such cell ran, or a value does not have the type of the cell's.
    """
    interpreter = shell()
    if interpreter is None:
        raise KvlabError("outside a notebook the parameters must be given: tracking.start(NAME, {...})")
    declared, wanted = None, True
    for source in interpreter.user_ns["In"][:-1]:
        if "tracking.start(" in source:
            wanted = True
        elif wanted and (assigned := notebooks.plain_values(source)):
            declared, wanted = assigned, False
    if declared is None and experiment is not None and experiment in experiments.names():
        declared = notebooks.parameters_of(experiments.load(experiment).path)
        declared = declared if set(declared) <= set(interpreter.user_ns) else None
    if declared is None:
        raise KvlabError("no parameters cell has run: run the notebook from its first cell")
    return typed(interpreter.user_ns, declared)


def typed(namespace: MutableMapping[str, Any], declared: dict[str, Any]) -> dict[str, Any]:
    """The values of the declared parameters in `namespace`; those that came as text are also replaced there.

    Raises:
        KvlabError: a value does not have the type of the declared one.
    """
    for name, default in declared.items():
        value = namespace[name]
        if isinstance(default, (list, dict)) and isinstance(value, (str, int, float)):
            value = parameter_values.read(str(value), default)
        namespace[name] = parameter_values.checked(name, value, default, "this notebook")
    return {name: namespace[name] for name in declared}
