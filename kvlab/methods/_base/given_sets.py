"""Sets of entries that something else has chosen, as a policy: for replays, live runs and attributions alike."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from pydantic import InstanceOf
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class GivenSets(Policy):
    """Keeps the given positions of one prompt, and every generated token. Not from a paper.

    Parameters:
        budget: entries for each layer and KV head.
        sets: int64 `[layers, kv_heads, n]`, ascending, -1 padded, a set for each layer that a policy compresses.
        source: what chose them, in a few words.
        oracle: whether they were chosen with a view of the response.
    """

    name: ClassVar[str] = "given_sets"
    summary: ClassVar[str] = "sets that something else has chosen"
    family: ClassVar[str] = "reference"
    kind: ClassVar[str] = "reference"
    weighs: ClassVar[bool] = False

    budget: Budget
    sets: InstanceOf[Tensor]
    source: str = ""
    oracle: bool = False

    def __str__(self) -> str:
        mark = hashlib.sha256(self.sets.cpu().numpy().tobytes()).hexdigest()[:8]
        return f"{self.source or self.name}(budget={self.budget!r})@{mark}"

    __repr__ = __str__

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        layers, heads, last = *self.sets.shape[:2], int(self.sets.max())
        if (prompt.n_layers, prompt.kv_heads) != (layers, heads) or last >= prompt.length:
            raise KvlabError(
                f"the sets have {layers} layers, {heads} KV heads and last position {last}; the prompt has "
                f"{prompt.n_layers} layers, {prompt.kv_heads} KV heads and {prompt.length} tokens"
            )
        return self.sets[list(prompt.layers)].to(prompt.keys.device)
