"""KVCompose (Akulov et al., 2025): tokens of its own for each head, and layers compete by composite tokens."""

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.core import ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.policy import Budget, Policy
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.repeating import Repetition

WHOLE = 10**9
"""Tokens that are repeated at once: all of a prompt."""


class KVCompose(Policy):
    """Keeps each head's most attended tokens, as many in all heads of a layer; composite tokens set layers' budgets;
    prefill only.

    "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens" (Akulov et al. 2025): the prompt is fed
    once more on top of itself. A token's score is the largest attention from a token of this pass, averaged over the
    GQA group. Its mean over the layer's heads is added. Each head sorts its tokens; the n-th of all heads form the n-th
    composite token, which is worth their mean score. The best composite tokens of all layers stay. Every generated
    token is also kept. All layers are seen before any is compressed. Cost: a second pass over the prompt's tokens.

    Choices: as in kvpress, the first layer's composite tokens get the largest score of any layer. Heads with different
    numbers of entries (the unstructured form) are left out. Every layer keeps one entry at least. Of equal scores the
    earlier position stays, then the earlier layer.

    Parameters:
        budget: entries for each layer and KV head on average, or a fraction of the prompt.
        shared: whether the mean over the layer's heads is added to each head's scores (True).
        value_norm: whether scores are multiplied by the norm of the value first (False).
    """

    name: ClassVar[str] = "kvcompose"
    summary: ClassVar[str] = "what repeating the prompt attends to, budgets by composite tokens"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["kvcompose"]

    budget: Budget
    shared: bool = True
    value_norm: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(repetitions=(self.repetition,))

    @property
    def repetition(self) -> Repetition:
        return Repetition(WHOLE, 0, False, group="mean", asks=False)

    def scores(self, prompt: Prompt) -> Tensor:
        """Attention of the second pass, `[rows, kv_heads, length]`."""
        scores = prompt.repeated(self, self.repetition).float()
        if self.value_norm:
            scores = scores * prompt.values.float().norm(dim=-1)
        return scores + scores.mean(1, keepdim=True) if self.shared else scores

    def survey(self, prompt: Prompt) -> Tensor:
        """The worth of each layer's composite tokens, best first, `[rows, length]`."""
        return self.scores(prompt).sort(-1, descending=True).values.mean(1)

    def plan(self, surveys: Tensor, prompt: Prompt) -> Tensor:
        """Entries of each layer, `[n_layers, batch]`, from composite scores `[n_layers, batch, length]`."""
        layers, _, length = surveys.shape
        worth = surveys.clone()
        worth[0] = surveys.amax(0)
        worth[..., 0] = torch.inf
        # Positions first, so that of equal scores the earlier one comes first.
        together = worth.permute(1, 2, 0).flatten(1)
        best = ranking.top_positions(together, layers * self.entries(length))
        return torch.stack([torch.bincount(row % layers, minlength=layers) for row in best], 1)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        assert prompt.plan is not None, "layers compete before any of them is compressed"
        scores = self.scores(prompt)
        return ranking.top_positions(scores, prompt.plan[:, None].expand(scores.shape[:2]))
