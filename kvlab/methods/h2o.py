"""H2O (Zhang et al., 2023): heavy hitters and recent tokens."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.eviction import evict_lowest, part
from kvlab.methods._base.policy import Budget, Policy, top_and_last
from kvlab.methods._base.prompt import Prompt


def accumulated_scores(policy: Policy, prompt: Prompt) -> Tensor:
    """The attention of all prompt queries on each entry, summed over the group, `[rows, kv_heads, length]`."""
    return prompt.share(("h2o",), lambda: attention.sum_over_group(prompt.accumulated(policy), prompt.kv_heads))


class H2O(Policy):
    """Keeps the most recent tokens and those that have gathered most attention; each new token evicts one.

    H2O (Zhang et al. 2023), algorithm 1 and eq. 3-4: a token's score is the attention that it received from all queries
    so far. The prompt's queries count too. After each step the lowest score older than the recent part leaves. Cost:
    one score for each entry, and the attention accumulated over the whole prompt (`capture(..., accumulate=True)`).

    Choices where the paper is silent: a GQA group's attention is summed and its heads share one set. Of equal scores
    the earlier position stays. In a later turn of a chat the old scores go on, and what the new prompt gives is added.

    Parameters:
        budget: entries for each layer and KV head, heavy hitters and recent ones together.
        heavy: share of the budget for heavy hitters (0.5), rounded down; the recent part is the rest, and each has at
            least one entry.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "most accumulated attention and recent tokens, while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["h2o"]

    budget: Budget
    heavy: Annotated[float, Field(gt=0, lt=1)] = 0.5

    @property
    def minimum(self) -> int:
        return 2

    @property
    def accumulates(self) -> bool:
        return True

    def _recent(self, budget: int) -> int:
        return budget - part(self.heavy, budget)

    def scores(self, prompt: Prompt) -> Tensor:
        return accumulated_scores(self, prompt)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.with_last(self.scores(prompt), self._recent(budget))

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return self._best(self.scores(prompt), budget)

    def _best(self, scores: Tensor, budget: int) -> Tensor:
        recent = self._recent(budget)
        return top_and_last(scores, budget - recent, recent)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        store.budget = self.entries(prompt.length)
        scores = self.scores(prompt)
        if store.has_column("score"):
            scores = scores + store.column("score")
        store.add_column("score", scores)
        if store.length > store.budget:
            store.evict(self._best(scores, store.budget), even=True)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        assert weights is not None, "a policy that weighs is given the attention weights"
        score = store.column("score")
        score += attention.sum_over_group(weights, store.kv_heads)
        evict_lowest(store, score, self._recent(store.budget))
