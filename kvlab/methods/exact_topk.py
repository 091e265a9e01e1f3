"""Exact top-k: the oracle of selection."""

from typing import ClassVar, Literal

from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.softmax import Scaling
from kvlab.core.store import LayerStore
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class ExactTopK(Policy):
    """Keeps the whole cache and reads, at every decoding step, the entries with the largest true attention.

    RocketKV (Behnam et al. 2025), section 3 and figure 1: the upper bound of selection methods. The step's query
    attends to all stored entries. The attention is summed over the GQA group, and the top `budget` positions are read.
    The own entry is not forced. Within the budget everything is read. Cost: finding reads every key, which no method
    could afford.

    Choices: the paper does not say who selects. Its authors' code selects for each query head (`sets="head"`), and a
    group then reads up to its size times the budget. One set for the group is comparable with methods that have a
    budget for the group.

    Parameters:
        budget: entries read at each step for each layer and KV head.
        sets: "group" for one set for each KV head; "head" for one set of `budget` entries for each query head, as in
            the authors' code.
    """

    name: ClassVar[str] = "exact_topk"
    summary: ClassVar[str] = "reads each step's true top entries, stores all: the oracle of selection"
    family: ClassVar[str] = "stores all, reads a selection"
    kind: ClassVar[str] = "selection"

    budget: Budget
    sets: Literal["group", "head"] = "group"

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        if self.sets == "head":
            store.expand(prompt.heads)
        super().compress(store, prompt)

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        if store.length <= store.budget:
            return None
        weights = attention.weights(queries, store.keys, scaling)[:, :, 0]
        return ranking.top_positions(attention.sum_over_group(weights, store.kv_heads), store.budget)

    def discount_bytes(self, store: LayerStore) -> int:
        # The heads of a group differ in what they read, not in what is stored.
        return store.kv_bytes - store.kv_bytes // store.repeats
