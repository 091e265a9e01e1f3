"""Layer budgets from a list: the scores of another method, with a share of the budget for each layer by hand."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.errors import KvlabError
from kvlab.lib.references import Paper
from kvlab.methods._base.budgets import share_out
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import ScorerWrapper


class Layered(ScorerWrapper):
    """Keeps another's best tokens, each layer in proportion to its number in a list; prefill only.

    Not from a paper: layer l gets shares[l] of the budget of all layers, which is `budget` for each on average. Any
    allocation, a paper's or a guess, can be tried around any score. Entries beyond a short prompt's length go to the
    other layers in proportion. A layer gets at least what its scorer needs (its window and one more, say), and the
    others pay for it. Every generated token is also kept. Cost: that of the scorer.

    Parameters:
        budget: entries for each layer and KV head on average, or a fraction of the prompt.
        scorer: a policy that scores tokens, by name or as an object ("snapkv").
        shares: a number for each compressed layer, first to last, not negative; alike for all unless given.
    """

    name: ClassVar[str] = "layered"
    summary: ClassVar[str] = "another's scores, with the budget shared among layers by a list"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = None

    shares: Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Field(strict=False)] = ()

    def budgets(self, n_layers: int, length: int, budget: int) -> Tensor:
        """Entries of each layer for a prompt of `length` tokens, int64 `[n_layers]`."""
        if self.shares and len(self.shares) != n_layers:
            raise KvlabError(f"layered has {len(self.shares)} shares, and this model compresses {n_layers} layers")
        shares = torch.tensor(self.shares or (1.0,) * n_layers, dtype=torch.float64)
        return share_out(shares, n_layers * budget, length, min(self.minimum, budget, length))

    def prefill(self, prompt: Prompt) -> Tensor:
        # In a later turn a layer may hold fewer entries than the mean budget, and still more than its own.
        if prompt.lossy and prompt.seen > self.entries(prompt.length):
            return self.choose(prompt, self.entries(prompt.length))
        return super().prefill(prompt)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        budgets = self.budgets(prompt.n_layers, prompt.seen, budget)[list(prompt.layers)]
        importance = self.importance(prompt, budget)
        return ranking.top_positions(importance, budgets[:, None].expand(importance.shape[:2]).to(importance.device))
