"""How the class of a policy is made of what its author writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic._internal._model_construction import ModelMetaclass

from kvlab.errors import KvlabError
from kvlab.lib.references import Paper
from kvlab.lib.renamed import warn_renamed
from kvlab.methods._base.contract import CHECKS, checked
from kvlab.methods._base.needs import Needs


class Declaring(ModelMetaclass):
    """Takes a plain class attribute (`observes = 32`) for a property of a policy, and has the verbs of classes outside
    kvlab checked. A class with a name has its own paper or none. `dir` and `help` leave out what is pydantic's.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **how: Any) -> type:
        annotations = namespace.get("__annotations__", {})
        for key in [*namespace, *annotations]:
            if not isinstance(_inherited(bases, key), property) or "ClassVar" in str(annotations.get(key, "")):
                continue
            if key not in namespace:
                raise KvlabError(f"{name}: {key} is no parameter; say what it is, as in `{key} = 32`")
            annotations.pop(key, None)
            if not hasattr(namespace[key], "__get__"):
                namespace[key] = property(_constant(namespace[key]))
        if "settle" in namespace and "evict_pending" not in namespace:
            warn_renamed(name, "settle", "evict_pending", stacklevel=3)
            namespace["evict_pending"] = namespace["settle"]
        if "evict_pending" in namespace:
            namespace["settle"] = _former(namespace["evict_pending"])
        if "needs" in namespace:
            namespace["needs"] = _complete_needs(namespace["needs"])
        if "name" in namespace:
            # A method that is made of another one is not what that one's paper proposes.
            paper = namespace.setdefault("paper", None)
            if not isinstance(paper, Paper | None):
                raise KvlabError(f"{name}: paper is {paper!r:.60}; it is kvlab.methods.Paper(...) or None")
        # kvlab's own methods are checked by its tests, so that their steps cost nothing more.
        if not namespace.get("__module__", "").startswith("kvlab."):
            for verb in CHECKS.keys() & namespace.keys():
                namespace[verb] = checked(verb, namespace[verb])
        return super().__new__(mcs, name, bases, namespace, **how)

    def __dir__(cls) -> list[str]:
        hidden = {key for key in dir(BaseModel) if key != "__init__"}
        return [
            key for key in super().__dir__() if key not in hidden and (not key.startswith("_") or key == "__init__")
        ]


def _inherited(bases: tuple[type, ...], key: str) -> object:
    return next((vars(cls)[key] for base in bases for cls in base.__mro__ if key in vars(cls)), None)


def _constant(value: object) -> Callable[[object], object]:
    return lambda self: value


def _complete_needs(value: object) -> property:
    """Join the needs that a class states with those that follow from its other attributes and its verbs."""
    stated: Callable[[Any], Any] = value.fget if isinstance(value, property) and value.fget else _constant(value)

    def needs(policy: Any) -> Needs:
        # Every step asks. A hidden name, since what is not hidden counts as a parameter.
        known = vars(policy)
        if "_needs" not in known:
            known["_needs"] = stated(policy) | policy.stated_needs
        return known["_needs"]

    needs.__doc__ = stated.__doc__
    return property(needs)


def _former(evict_pending: Callable[..., None]) -> Callable[..., None]:
    """The verb of one class under its former name, which subclasses may call by `super()`."""

    def settle(policy: Any, store: Any) -> None:
        """Former name of `evict_pending`."""
        warn_renamed(type(policy).__name__, "settle", "evict_pending")
        evict_pending(policy, store)

    return settle


def number_meant(value: object) -> int | float | None:
    """The number that a text, or a whole number written as a float, stands for."""
    try:
        number = float(value) if isinstance(value, str | float) else math.nan
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    whole = number.is_integer() and "." not in str(value).removesuffix(".0")
    return int(number) if whole else number if isinstance(value, str) else None
