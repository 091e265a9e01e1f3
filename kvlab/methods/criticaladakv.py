"""CriticalKV over Ada-KV (Feng et al., 2025): heads compete for the budget, and each spends its share in two parts."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import ScorerWrapper
from kvlab.methods.adakv import best_of_all_heads
from kvlab.methods.criticalkv import CriticalKV


class CriticalAdaKV(CriticalKV):
    """Shares the budget among a layer's heads by another's scores, and spends each share as `criticalkv` does; prefill
    only.

    CriticalKV (Feng et al. 2025), on top of Ada-KV: the scores of all heads compete for heads x budget entries. This
    sets each head's number of entries, at least `floor` of the budget. The first part of a head's entries goes to the
    highest scores, the rest to the largest (score + epsilon) x |W_o v|_1. Every generated token is also kept. Cost:
    that of `criticalkv`; the heads hold different numbers of entries.

    Choices: those of `adakv` and `criticalkv`. As in kvpress, heads compete by the scores alone.

    Parameters:
        budget: entries for each layer and KV head on average.
        scorer: a policy that scores tokens, by name or as an object ("snapkv").
        first, epsilon: as of criticalkv (0.5; 1e-4); the part is one of each head's own share.
        floor: share of the budget that each head keeps in any case (0.2).
    """

    name: ClassVar[str] = "criticaladakv"
    summary: ClassVar[str] = "heads compete by another's scores, then as criticalkv"
    family: ClassVar[str] = "recent tokens, or layers' and heads' shares"
    kind: ClassVar[str] = "allocation"
    paper: ClassVar[Paper | None] = PAPERS["criticalkv"]

    floor: Annotated[float, Field(ge=0, le=1)] = 0.2

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        scores = ScorerWrapper.importance(self, prompt, budget)
        shares = best_of_all_heads(scores, budget, self.floor).sum(-1)
        # On the CPU, since not every GPU has float64.
        first = (self.first * shares.cpu().double()).long().to(shares.device)
        return ranking.top_positions(self.weighed(prompt, scores, first), shares)
