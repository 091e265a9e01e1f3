"""Refuses policies that nobody knows before a model is loaded, where parameters name policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib import policy_names
from kvlab.workbench.experiments.parameter_values import texts

PLACES = ("policy", "policies")
"""Parameters that name policies, and nothing else."""


def check(parameters: Mapping[str, Any], usual: Mapping[str, Any], where: str) -> None:
    """Raise KvlabError for the name of a policy that does not exist.

    Args:
        parameters: of the job.
        usual: of the notebook's own cell, which are known to work.
        where: name of the experiment, for the message.
    """
    asked = [
        (place, name)
        for place in PLACES
        if parameters.get(place) != usual.get(place)
        for name in texts(parameters[place])
        if name not in texts(usual.get(place))
    ]
    if not asked:
        return
    from kvlab.analyses.tasks.contenders import SETS
    from kvlab.analyses.tasks.variants import VARIANTS
    from kvlab.methods import registry

    known = {*registry(), *VARIANTS, *SETS}
    for place, name in asked:
        if name not in known:
            raise KvlabError(f"parameter {place!r} of {where}: {policy_names.unknown(name, registry())}")
