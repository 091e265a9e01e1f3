"""The attention of one forward pass for what a policy needs, taken once for several policies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, ClassVar

from pydantic import InstanceOf
from torch import nn

from kvlab.live.session import compress
from kvlab.methods import Policy
from kvlab.methods._base.needs import NOTHING, Needs

if TYPE_CHECKING:
    from kvlab.live.session import Session


class Gather(Policy):
    """Keeps everything, and gathers while a prompt comes in what other policies will want to know of it."""

    name: ClassVar[str] = "gather"

    looks_back: int | None = 0
    sums_up: bool = False
    reads: int = 0
    asks: InstanceOf[Needs] = NOTHING

    @classmethod
    def for_all(cls, policies: Sequence[Policy]) -> Gather:
        """One that gathers what any of `policies` asks for."""
        windows = [policy.observes for policy in policies if policy.observes is not None]
        return cls(
            looks_back=None if len(windows) < len(policies) else max(windows, default=0),
            sums_up=any(policy.accumulates for policy in policies),
            reads=max((policy.reads_perplexity for policy in policies), default=0),
            asks=reduce(or_, (policy.needs for policy in policies), NOTHING),
        )

    @property
    def observes(self) -> int | None:
        return self.looks_back

    @property
    def accumulates(self) -> bool:
        return self.sums_up

    @property
    def reads_perplexity(self) -> int:
        return self.reads

    @property
    def needs(self) -> Needs:
        return self.asks


def gather(model: nn.Module, policies: Sequence[Policy]) -> Session:
    """A session that prefills for several policies at once.

    ```python
    with kvlab.live.gather.gather(model, policies):
        prefilled = model(ids, use_cache=True).past_key_values
    for policy in policies:
        with kvlab.compress(model, policy) as session:
            past = session.branch(prefilled)          # go on from here as after a prefill of its own
    ```
    """
    return compress(model, Gather.for_all(policies))
