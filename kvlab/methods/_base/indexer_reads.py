"""Entries that a model's own sparse indexer has chosen to read at each step, as a policy for replays of one trace."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from pydantic import InstanceOf
from torch import Tensor

from kvlab.core.slots import EMPTY
from kvlab.core.softmax import Scaling
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class IndexerReads(Policy):
    """Keeps the whole cache and reads, at every decoding step, what the model's own indexer chose (DSA, DeepSeek-V3.2).

    Cost: that of the model's indexer, whose keys are counted nowhere.

    Parameters:
        budget: entries read at each step for each layer and KV head.
        reads: int64 `[layers, steps, n]`, positions, -1 padded, for each layer that a policy compresses.
    """

    name: ClassVar[str] = "indexer"
    summary: ClassVar[str] = "reads what the model's own sparse indexer chose at each step"
    family: ClassVar[str] = "reference"
    kind: ClassVar[str] = "reference"
    sees_response: ClassVar[bool] = True

    budget: Budget
    reads: InstanceOf[Tensor]

    def __str__(self) -> str:
        mark = hashlib.sha256(self.reads.cpu().numpy().tobytes()).hexdigest()[:8]
        return f"{self.name}(budget={self.budget!r})@{mark}"

    __repr__ = __str__

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        layers, steps, _ = self.reads.shape
        if (prompt.n_layers, prompt.kv_heads, prompt.response(self).shape[2]) != (layers, 1, steps):
            raise KvlabError(
                f"this indexer's choice is that of {steps} steps in {layers} layers of another trace; replay it on the "
                "trace that it is of"
            )
        super().compress(store, prompt)
        store.numbers["prompt"] = prompt.length

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        step = store.seen - store.numbers["prompt"]
        chosen = self.reads[list(store.layers), None, step - 1].to(store.device)
        return chosen[..., : max(int((chosen != EMPTY).sum(-1).max()), 1)]
