"""SparQ attention (Ribar et al., 2023): finds the entries to read by a few dimensions of the query."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.softmax import Scaling, Softmax
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base import dimensions, pages
from kvlab.methods._base.dimensions import affordable, largest_dimensions, logits, partial_queries, room, shares
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt


class SparQ(Policy):
    """Keeps the whole cache and reads the top entries by approximate scores; the mean value stands in for the rest.

    SparQ (Ribar et al. 2023), algorithm 1: the r largest |q| give approximate scores, softmax(q_r . K_r / sqrt(d x
    |q_r|_1 / |q|_1)); the top k entries are read. The output is alpha x attention + (1 - alpha) x mean of all values.
    alpha is the approximate attention mass of the entries read. Within the budget everything is read and nothing
    blended. Cost: a second copy of the keys, ordered by dimension: storage is 1.5 times the full cache. A running sum
    of the values; at every step r dimensions of the copy are loaded. (The mean value, one vector a step, is left out of
    the budget, as RocketKV leaves it out.)

    Choices: RocketKV's accounting (its appendix A.3), half of the budget finds and half attends. k is budget // 2, and
    r dimensions of all S keys weigh as much; S counts the prompt and the announced new tokens. If finding costs more (r
    is at least 1, or set), fewer entries are read, but at least one. A budget below S / (2 d) + 1 is then exceeded.
    Beyond S, r falls as the sequence grows. On GQA |q| is summed over the group, which shares the dimensions.
    Approximate scores are computed for each head and summed; alpha is each head's own. The own entry is not forced. Of
    equal scores, or |q|, the earlier wins.

    Parameters:
        budget: entries read at each step for each layer and KV head, finding included.
        rank: r; None for int(budget x d / S), at least 1 and at most d.
    """

    name: ClassVar[str] = "sparq"
    summary: ClassVar[str] = "reads the top entries by the query's largest dimensions, stores all and a key copy"
    family: ClassVar[str] = "stores all, reads a selection"
    kind: ClassVar[str] = "selection"
    paper: ClassVar[Paper | None] = PAPERS["sparq"]

    budget: Budget
    rank: Annotated[int, Field(ge=1)] | None = None

    @property
    def minimum(self) -> int:
        return 2

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        super().compress(store, prompt)
        length = prompt.length + prompt.max_new_tokens
        dimensions.begin(store, length, self.rank)
        store.numbers["copied"] = 0
        store.memory.pop("copy", None)
        if length > store.budget:
            self._follow(store)

    def _follow(self, store: LayerStore) -> None:
        """Take what was appended into the copy of the keys `[rows, kv_heads, head_dim, slots]` and the values' sum."""
        copied = store.numbers["copied"]
        if copied == store.length:
            return
        keys, values = store.since(copied)
        if copied == 0:
            store.memory["copy"] = keys.new_empty(store.rows, store.kv_heads, store.head_dim, 0)
            shape = store.rows, store.kv_heads, 1, store.head_dim
            store.memory["value_sum"] = torch.zeros(shape, dtype=torch.float32, device=store.device)
        copy = store.memory["copy"] = pages.extended(store.memory["copy"], store.length)
        copy[..., copied:] = keys.transpose(2, 3)
        store.memory["value_sum"] += values.sum(2, keepdim=True, dtype=torch.float32)
        store.numbers["copied"] = store.length

    def select(self, store: LayerStore, queries: Tensor, scaling: Scaling) -> Tensor | None:
        store.scratch.pop("alpha", None)
        if store.length <= store.budget:
            return None
        self._follow(store)
        kv_heads = store.kv_heads
        grouped = queries[:, :, 0].unflatten(1, (kv_heads, -1))
        rank = affordable(store)
        dims = largest_dimensions(grouped, rank)
        softmax = Softmax.of(scaling)
        found = logits(partial_queries(grouped, dims, scaling), dims, store.memory["copy"])
        weights = shares(softmax.capped(found), softmax)
        slots = ranking.top_positions(weights.sum(2), room(store, store.length, rank))
        alpha = weights.gather(-1, slots[:, :, None].expand(*weights.shape[:3], -1)).sum(-1, keepdim=True)
        if softmax.sinks is not None:
            # The sink weighs among what is read as it does among all keys: only what is not read is stood in for.
            alpha = alpha + (1 - weights.sum(-1, keepdim=True))
        store.scratch["alpha"] = alpha
        return slots

    def amend(self, store: LayerStore, output: Tensor) -> Tensor:
        if "alpha" not in store.scratch:
            return output
        mean = store.memory["value_sum"] / store.length
        out = attention.by_group(attention.exact(output), store.kv_heads)
        return torch.lerp(mean, out, store.scratch["alpha"]).view(output.shape).to(output.dtype)

    def overhead_bytes(self, store: LayerStore) -> int:
        if store.length <= store.budget:
            return 0
        return store.rows * store.kv_heads * store.length * affordable(store) * store.dtype.itemsize
