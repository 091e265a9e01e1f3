"""Policies by name. A user's own needs no name: pass the object; or register its class as an entry point."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvlab.errors import KvlabError, nearest
from kvlab.methods.base import Budget, Policy
from kvlab.methods.compilerkv import CompilerKV
from kvlab.methods.dapq import DapQ
from kvlab.methods.duoattention import DuoAttention
from kvlab.methods.dynamickv import DynamicKV
from kvlab.methods.exact_topk import ExactTopK
from kvlab.methods.full import Full
from kvlab.methods.h2o import H2O
from kvlab.methods.hybrid import Hybrid
from kvlab.methods.keyformer import Keyformer
from kvlab.methods.lacache import LaCache
from kvlab.methods.morphkv import MorphKV
from kvlab.methods.prompt import Prompt
from kvlab.methods.pyramidkv import PyramidKV
from kvlab.methods.quest import Quest
from kvlab.methods.random import Random
from kvlab.methods.rocketkv import RocketKV
from kvlab.methods.scissorhands import Scissorhands
from kvlab.methods.snapkv import SnapKV
from kvlab.methods.snapkv_pp import SnapKVPlusPlus
from kvlab.methods.sparq import SparQ
from kvlab.methods.streamingllm import StreamingLLM
from kvlab.methods.zigzagkv import ZigZagKV
from kvlab.methods.zsmerge import ZSMerge

__all__ = ["Budget", "Policy", "Prompt", "policies", "policy", "registry"]

BUILTIN = (
    Full,
    Random,
    StreamingLLM,
    Scissorhands,
    H2O,
    Keyformer,
    SnapKV,
    PyramidKV,
    ZigZagKV,
    DynamicKV,
    LaCache,
    DuoAttention,
    MorphKV,
    ZSMerge,
    DapQ,
    Quest,
    SparQ,
    Hybrid,
    ExactTopK,
    SnapKVPlusPlus,
    RocketKV,
    CompilerKV,
)
GROUP = "kvlab.policies"


@cache
def registry() -> dict[str, type[Policy]]:
    """Every named policy class: kvlab's own, then the entry points of installed packages."""
    found = {cls.name: cls for cls in BUILTIN}
    for point in entry_points(group=GROUP):
        if point.name in found:
            raise KvlabError(
                f"the entry point {point.value!r} takes the name {point.name!r}, which kvlab's own policy has"
            )
        found[point.name] = point.load()
    return found


def policies() -> list[str]:
    """Names that `policy` takes.

    >>> "snapkv" in policies()
    True
    """
    return list(registry())


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


def unknown(name: str) -> str:
    """The sentence for a policy that does not exist: the nearest, and all that there are."""
    told = nearest(name, registry(), "policy", limit=len(registry()))
    return told if "known are" in told else f"{told} (known are: {', '.join(sorted(registry()))})"


def listed(wanted: Any, what: str = "policies") -> list[Any]:
    """Policies, probes and the like as a list: one, by name or as an object, counts as a list of one."""
    if isinstance(wanted, str | Policy):
        return [wanted]
    if isinstance(wanted, Iterable):
        return list(wanted)
    raise KvlabError(f"{what} are names or objects, one or a list of them, and not {wanted!r:.60}")
