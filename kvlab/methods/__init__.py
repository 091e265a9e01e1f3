"""Policies by name: every class with a `name` in a file of this folder. The files are read when the first is asked for.

A policy of a user needs no name: pass the object. A file in the folder `policies` of a workspace gives it one, and so
does an entry point.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

from kvlab.errors import KvlabError
from kvlab.lib import policy_names, workspace
from kvlab.lib.references import Paper
from kvlab.methods._base.budgets import share_out
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt

__all__ = ["Budget", "Paper", "Policy", "Prompt", "installed", "policies", "policy", "registry", "share_out"]


def registry() -> dict[str, type[Policy]]:
    """Every named policy class: kvlab's own by alphabet, the entry points of installed packages, the workspace's.

    Raises KvlabError for a file of the workspace that cannot be read, and for a name that is taken.
    """
    return workspace.joined(installed(), "policies", Policy, "policy")


@cache
def installed() -> dict[str, type[Policy]]:
    """The policy classes of kvlab and of installed packages."""
    classes = {cls.name: cls for cls in _own()}
    for point in entry_points(group=policy_names.GROUP):
        if point.name in classes:
            raise KvlabError(
                f"the entry point {point.value!r} takes the name {point.name!r}, which kvlab's own policy has"
            )
        classes[point.name] = point.load()
    return classes


def _own() -> list[type[Policy]]:
    """The policy classes that the files of this folder define, by alphabet of their names."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Policy) and value.name and value.__module__ == module.__name__
    ]
    return sorted(classes, key=lambda cls: cls.name)


def policies() -> list[str]:
    """Names that `policy` takes with a budget alone, without those that see the response (`oracle_attention`) or need a
    file (`recorded`).

    >>> "snapkv" in policies()
    True
    """
    return [name for name, cls in registry().items() if not cls.sees_response and not _required(cls) - {"budget"}]


def _required(cls: type[Policy]) -> set[str]:
    return {name for name, field in cls.model_fields.items() if field.is_required()}


def policy(name: str | Policy, **parameters) -> Policy:
    """A policy by name, or a given one with other parameters.

    >>> policy("snapkv", budget=256)
    snapkv(budget=256, window=32, kernel=7, sets='group')

    Raises:
        KvlabError: unknown name or parameter (with the nearest ones), or a value that the method cannot work with.
    """
    if isinstance(name, Policy):
        return name.replace(**parameters) if parameters else name
    if not isinstance(name, str):
        raise KvlabError(f"a policy is a name, such as 'snapkv', or what kvlab.policy gives, and not {name!r:.60}")
    if name not in registry():
        raise KvlabError(unknown(name))
    return registry()[name](**parameters)


def has_budget(method: Policy | str) -> bool:
    """Whether a policy, by name or as an object, takes a budget; true of names that do not exist."""
    cls = type(method) if isinstance(method, Policy) else registry().get(method)
    return cls is None or "budget" in cls.model_fields


def unknown(name: str) -> str:
    """The message for an unknown policy: the nearest names, and all that there are."""
    return policy_names.unknown(name, registry())


def listed(wanted: Any, kind: str = "policies") -> list[Any]:
    """Policies, probes and the like as a list; a single name or object becomes a list of one."""
    if isinstance(wanted, str | Policy):
        return [wanted]
    if isinstance(wanted, Iterable):
        return list(wanted)
    raise KvlabError(f"{kind} are names or objects, one or a list of them, and not {wanted!r:.60}")
