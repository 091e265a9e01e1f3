"""ChunkKV (Liu et al., 2025): whole chunks of neighbouring tokens stay or go."""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import ranking
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import ScorerWrapper


class ChunkKV(ScorerWrapper):
    """Keeps whole chunks of neighbouring tokens, those with the best mean score; one set for a layer; prefill only.

    ChunkKV (Liu et al. 2025), algorithm 1: the prompt is cut into chunks of `chunk` tokens. A chunk's score is that of
    its tokens over all heads, and the best chunks stay. Every generated token is also kept. Cost: that of the scorer.

    Choices: as in the authors' code, all KV heads of a layer share one set. Tokens that the scorer always keeps stay
    whatever their chunk. If a chunk exceeds the rest of the budget, its best tokens fill that rest. The reuse of sets
    by neighbouring layers is left out.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        scorer: a policy that scores tokens, by name or as an object ("snapkv").
        chunk: tokens of a chunk (20); the prompt's last one may be shorter.
    """

    name: ClassVar[str] = "chunkkv"
    summary: ClassVar[str] = "another's scores, whole chunks of neighbouring tokens"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["chunkkv"]

    chunk: Annotated[int, Field(ge=1)] = 20

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        scores = self.importance(prompt, budget)
        always = scores.isposinf().any(1)
        tokens = scores.masked_fill(scores.isinf(), 0).sum(1).masked_fill(always, 0)
        # The tokens of a better chunk come before those of a worse one, and within a chunk the better token.
        chunk_of = torch.arange(prompt.length, device=scores.device) // self.chunk
        chunks = ranking.ranks(self._means(tokens, always)).long()[:, chunk_of]
        order = -(chunks * prompt.length + ranking.ranks(tokens))
        order = order.masked_fill(always, 1)
        return ranking.top_positions(order, budget)[:, None].expand(-1, prompt.kv_heads, -1)

    def _means(self, tokens: Tensor, always: Tensor) -> Tensor:
        """The mean score of each chunk's tokens that may leave, `[rows, length]` -> `[rows, chunks]`."""
        rest = -tokens.shape[-1] % self.chunk
        totals, counts = (
            F.pad(x, (0, rest)).unflatten(-1, (-1, self.chunk)).sum(-1) for x in (tokens, (~always).float())
        )
        return totals / counts.clamp_min(1)
