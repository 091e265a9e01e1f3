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


class SharedPrefill(Policy):
    """Keeps everything, and gathers while a prompt comes in what other policies will want to know of it."""

    name: ClassVar[str] = "gather"

    asks: InstanceOf[Needs] = NOTHING

    @property
    def needs(self) -> Needs:
        return self.asks


def shared_prefill(model: nn.Module, policies: Sequence[Policy]) -> Session:
    """A session that prefills for several policies at once.

    ```python
    with kvlab.live.shared_prefill.shared_prefill(model, policies):
        prefilled = model(ids, use_cache=True).past_key_values
    for policy in policies:
        with kvlab.compress(model, policy) as session:
            past = session.branch(prefilled)          # go on from here as after a prefill of its own
    ```
    """
    return compress(model, SharedPrefill(asks=reduce(or_, (policy.needs.inputs for policy in policies), NOTHING)))
