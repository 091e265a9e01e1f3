"""SnapKV (Li et al., 2024): what the last prompt tokens attend to."""

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.policy import Budget, Kernel, Policy, top_and_last
from kvlab.methods._base.prompt import Prompt


class SnapKV(Policy):
    """Keeps the observation window and the older tokens that it attends to most; prefill only.

    SnapKV (Li et al. 2024), section 4 and listing 1: the last `window` queries attend to all keys, causally inside the
    window. Their attention is summed and average-pooled with zeros as padding; the window's own columns are dropped.
    The window and the top (budget - window) stay. Every generated token is also kept. Cost: one window x prompt
    attention for each layer. With `sets="head"` each head of a GQA group stores its own entries, which multiplies the
    cache by the group's size.

    Choices where the paper is silent: on GQA the group's scores are summed and its heads share one set.

    Parameters:
        budget: entries for each layer and KV head, the window included.
        window: last prompt tokens that observe and always stay (32 in most published runs).
        kernel: width of the pooling, odd (7).
        sets: "group" for one set for each KV head; "head" for one set of `budget` entries for each query head, as in
            the authors' code.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "pooled attention of an observation window at the prompt's end"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["snapkv"]

    budget: Budget
    window: Annotated[int, Field(ge=1)] = 32
    kernel: Kernel = 7
    sets: Literal["group", "head"] = "group"

    @property
    def minimum(self) -> int:
        return self.window + 1

    @property
    def observes(self) -> int:
        return self.window

    def scores(self, prompt: Prompt) -> Tensor:
        """Attention of the window, summed over it: `[rows, sets, length]`, a set for each KV head or query head."""
        return prompt.window_sums(self.window) if self.sets == "head" else prompt.window_scores(self.window)

    def pooled(self, prompt: Prompt) -> Tensor:
        """Pooled scores of the tokens older than the window, `[rows, sets, older]`."""

        def pool() -> Tensor:
            older = self.scores(prompt)[..., : prompt.length - self.window]
            return F.avg_pool1d(older, self.kernel, stride=1, padding=self.kernel // 2)

        return prompt.share(("snapkv", type(self).scores, self.window, self.kernel, self.sets), pool)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return F.pad(self.pooled(prompt), (0, self.window), value=torch.inf)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return self.window_and_best(prompt, budget)

    def window_and_best(self, prompt: Prompt, budget: int | Tensor) -> Tensor:
        """The window and the best of the older tokens: `budget` in all, the same or one for each row `[rows]`."""
        scores = F.pad(self.pooled(prompt), (0, self.window), value=torch.inf)
        if isinstance(budget, Tensor):
            return ranking.top_positions(scores, budget[:, None].expand(scores.shape[:2]))
        return top_and_last(scores, budget - self.window, self.window)

    def prefill(self, prompt: Prompt) -> Tensor:
        kept = super().prefill(prompt)
        # A prompt within the budget is kept whole by every set.
        return attention.to_query_heads(kept, prompt.heads) if self.sets == "head" else kept

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        if self.sets == "head":
            store.expand(prompt.heads)
        super().compress(store, prompt)
