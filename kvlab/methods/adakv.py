"""Ada-KV (Feng et al., 2024): the heads of a layer compete for one budget."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import ScorerWrapper


class AdaKV(ScorerWrapper):
    """Keeps the best entries of all KV heads of a layer together, whatever the heads' shares; prefill only.

    Ada-KV (Feng et al. 2024), algorithms 1 and 2: the scores of all heads compete for heads x budget entries. Heads
    with spread attention keep more. Each head keeps at least `floor` of the budget. Every generated token is also kept.
    Cost: that of the scorer; the heads hold different numbers of entries.

    Choices: the floor is a share of what the scorer leaves free (the window is every head's own), as in the authors'
    code. Of equal scores the earlier position stays, then the earlier head.

    Parameters:
        budget: entries for each layer and KV head on average.
        scorer: a policy that scores tokens, by name or as an object ("snapkv").
        floor: share of the budget that each head keeps in any case (0.2).
    """

    name: ClassVar[str] = "adakv"
    summary: ClassVar[str] = "another's scores, the heads of a layer competing for one budget"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["adakv"]

    floor: Annotated[float, Field(ge=0, le=1)] = 0.2

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.positions_of(best_of_all_heads(self.importance(prompt, budget), budget, self.floor))


def best_of_all_heads(scores: Tensor, budget: int, floor: float) -> Tensor:
    """Mark the scores `[rows, kv_heads, length]` that are among the best kv_heads x budget of their row, bool.

    Each head is sure of the share `floor` of the budget.
    """
    _, heads, length = scores.shape
    always = int(scores.isposinf().sum(-1).amax())
    sure = ranking.top_positions(scores, always + int(floor * (budget - always)))
    scores = scores.scatter(-1, sure, torch.inf)
    # Heads last, so that of equal scores the earlier position comes first.
    together = scores.transpose(1, 2).flatten(1)
    best = ranking.top_positions(together, heads * budget)
    chosen = torch.zeros_like(together, dtype=torch.bool).scatter(-1, best, True)
    return chosen.unflatten(1, (length, heads)).transpose(1, 2)
