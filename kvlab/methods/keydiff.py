"""KeyDiff (Park et al., 2025): keys that differ from the others stay."""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.slots import pick
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer


class KeyDiff(Scorer):
    """Keeps the tokens whose keys are least similar to the mean of all normalised keys; prefill only.

    KeyDiff (Park et al. 2025), section 3, algorithm 1: the anchor is the mean of the keys' unit vectors. The score is
    the negative cosine between a key and the anchor. With `block` the prompt is judged block by block, as in the paper.
    The first `budget` tokens stay; each further block competes with the kept ones. Every generated token is also kept.
    Cost: one cosine for each entry, and for each block one for each entry kept.

    Choices: the whole prompt was attended to before the blocks are judged, where the paper's model sees what earlier
    blocks left. Decoding evicts nothing.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        block: tokens that are judged at once, 128 in the paper; None judges the prompt as a whole.
    """

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "prompt tokens whose keys differ most from the mean key"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["keydiff"]

    block: Annotated[int, Field(ge=1)] | None = None

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(("keydiff",), lambda: _difference(attention.exact(prompt.keys)))

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        if self.block is None:
            return super().choose(prompt, budget)
        kept = torch.arange(budget, device=prompt.keys.device).expand(prompt.rows, prompt.kv_heads, budget)
        for start in range(budget, prompt.length, self.block):
            block = torch.arange(start, min(start + self.block, prompt.length), device=kept.device)
            rivals = torch.cat([kept, block.expand(*kept.shape[:2], len(block))], -1)
            scores = _difference(attention.exact(pick(prompt.keys, rivals)))
            kept = rivals.gather(-1, ranking.top_positions(scores, budget))
        return kept


def _difference(keys: Tensor) -> Tensor:
    """Negative cosine of each key `[..., length, head_dim]` to the mean of their unit vectors, `[..., length]`."""
    anchor = F.normalize(keys, dim=-1).mean(-2, keepdim=True)
    return -F.cosine_similarity(keys, anchor, dim=-1)
