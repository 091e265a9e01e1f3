"""CriticalKV (Feng et al., 2025): scores count both a token's attention and what its value does to the hidden state."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import ScorerWrapper


class CriticalKV(ScorerWrapper):
    """Spends a part of the budget by another's scores, the rest by these times the size of the projected values;
    prefill only.

    CriticalKV (Feng et al. 2025, version 1), algorithm 1: the first part goes to the tokens that score highest. Of the
    others those with the largest (score + epsilon) x |W_o v|_1 stay, W_o being the layer's output projection. The
    product bounds how far the attention output moves without a token. Every generated token is also kept. Cost: that of
    the scorer, and one product of all values with W_o.

    Choices: the norm is averaged over a GQA group, as in kvpress. Tokens that the scorer always keeps stay, and count
    in the first part. Where the lowest score is negative, it is subtracted from all: a product would reverse the order
    of negative scores. The paper's scores are attention weights.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        scorer: a policy that scores tokens, by name or as an object ("snapkv").
        first: share of the budget that the scores alone decide (0.5), rounded down.
        epsilon: what is added to each score before it is multiplied (1e-4).
    """

    name: ClassVar[str] = "criticalkv"
    summary: ClassVar[str] = "another's scores, then weighed by the size of projected values"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["criticalkv"]

    first: Annotated[float, Field(ge=0, le=1)] = 0.5
    epsilon: Annotated[float, Field(ge=0)] = 1e-4

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(projection=True)

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        """Infinity for the first part and for what the scorer always keeps, weighed scores for the rest."""
        return self.weighed(prompt, super().importance(prompt, budget), int(self.first * budget))

    def weighed(self, prompt: Prompt, scores: Tensor, first: int | Tensor) -> Tensor:
        """Scores weighed by the size of projected values, and infinity for the `first` ones by the scores alone.

        Args:
            scores: `[rows, kv_heads, length]`, infinity for what always stays.
            first: how many, the same for every head or `[rows, kv_heads]` of them.
        """
        lowest = scores.amin(-1, keepdim=True).clamp_max(0)
        weighed = (scores - lowest + self.epsilon) * self._norms(prompt)
        sure = scores.isposinf() | ranking.marked(ranking.top_positions(scores, first), scores.shape[-1])
        return weighed.masked_fill(sure, torch.inf)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.top_positions(self.importance(prompt, budget), budget)

    def _norms(self, prompt: Prompt) -> Tensor:
        """|W_o v|_1, averaged over the GQA group, `[rows, kv_heads, length]`."""

        def compute() -> Tensor:
            heads, rows = prompt.heads, zip(prompt.values, prompt.projection(self), strict=True)
            norms = torch.stack([attention.projected_norms(values, weight, heads, order=1) for values, weight in rows])
            return norms.unflatten(1, (prompt.kv_heads, -1)).mean(2)

        return prompt.share(("projected norms",), compute)
