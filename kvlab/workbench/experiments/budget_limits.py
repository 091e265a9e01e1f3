"""Refuses budgets that a policy cannot work with before a model is loaded, where parameters name the policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.errors import KvlabError
from kvlab.workbench.experiments.parameter_values import listed, texts

# Parameters whose numbers are budgets of every policy that other parameters name.
BUDGETS = ("budget", "budgets")


def check(parameters: Mapping[str, Any], usual: Mapping[str, Any], where: str) -> None:
    """Raise KvlabError for a budget that a policy of the job refuses.

    A policy is named by a text, by an entry of a list, or by a key of a mapping from policies to budgets. Policies that
    a notebook names in its code have their limits in the experiment's file.

    Args:
        parameters: of the job.
        usual: of the notebook's own cell. Its budgets are known to work and are not checked, because policies are slow
            to import.
        where: name of the experiment, for the message.
    """
    known = set(_asked(usual))
    unknown = [pair for pair in _asked(parameters) if pair not in known]
    if not unknown:
        return
    from kvlab.analyses.tasks.contenders import contender
    from kvlab.analyses.tasks.variants import VARIANTS
    from kvlab.methods import registry

    for place, name, budget in unknown:
        if name in VARIANTS or name in registry():
            try:
                contender(name, budget)
            except KvlabError as error:
                raise KvlabError(f"parameter {place!r} of {where}: {error}") from None


def _asked(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str, int | float]]:
    """Parameter, name of a policy or of anything else, and number, for all that may be a policy's budget."""
    named = [text for value in parameters.values() for text in texts(value)]
    for place, value in parameters.items():
        if isinstance(value, Mapping):
            pairs = [(name, number) for name, numbers in value.items() for number in listed(numbers)]
        else:
            pairs = [(name, number) for name in named for number in listed(value)] if place in BUDGETS else []
        for name, number in pairs:
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield place, name, number
