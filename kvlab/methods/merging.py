"""Merging around a score: what it would evict is merged into the entries that stay."""

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import ScorerWrapper


class Merging(ScorerWrapper):
    """Merges each entry that another policy evicts into the kept entry with the most similar key; prefill only.

    Not from a paper: the mean and the bias are those of ZSMerge (eq. 7-8), around any score. A kept entry becomes the
    mean of itself and those merged into it. Its logit gains alpha x log(count), as if each were still there. Every
    generated token is also kept. Cost: that of the scorer, one product of all evicted keys with all kept ones, and a
    count for each entry.

    Choices: similarity is the cosine of keys as the cache holds them, so positions count. Keys that were turned to
    different positions are averaged as they are (ZSMerge does the same); `averaged="values"` leaves keys alone. Of
    equal cosines the earlier entry takes it.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        scorer: a policy that scores tokens, by name or as an object ("snapkv").
        least: the least cosine of two keys that are merged; others leave as they would without merging (-1).
        alpha: strength of the logit bias, in [0, 1] (1).
        averaged: what becomes a mean, keys and values ("both") or "values" alone.
    """

    name: ClassVar[str] = "merging"
    summary: ClassVar[str] = "another's scores; what they evict is merged into what stays"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "merging"

    least: Annotated[float, Field(ge=-1, le=1)] = -1.0
    alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    averaged: Literal["both", "values"] = "both"

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return self._inner.choose(prompt, budget)

    def rewrite(self, store: LayerStore, prompt: Prompt) -> None:
        if self.fits(prompt.length):
            return
        store.fold(self.targets(prompt.keys, self.prefill(prompt)), keys=self.averaged == "both")

    def targets(self, keys: Tensor, kept: Tensor) -> Tensor:
        """The slot into which each is merged, its own where it is in none, `[rows, kv_heads, length]`.

        Args:
            keys: `[rows, kv_heads, length, head_dim]`.
            kept: slots that stay, `[rows, kv_heads, n]`, -1 padded.
        """
        length = keys.shape[2]
        targets = torch.arange(length, device=keys.device).repeat(*keys.shape[:2], 1)
        heads = zip(keys.flatten(0, 1), ranking.marked(kept, length).flatten(0, 1), targets.flatten(0, 1), strict=True)
        # One head at a time: the cosines of all heads together take a lot of memory.
        for own, stays, target in heads:
            unit = F.normalize(attention.exact(own), dim=-1)
            best = (unit[~stays] @ unit[stays].T).max(-1)
            alike = best.values >= self.least
            target[(~stays).nonzero()[alike, 0]] = stays.nonzero()[best.indices[alike], 0]
        return targets

    def bias(self, store: LayerStore) -> Tensor | None:
        return self.alpha * store.fusion_counts.log() if self.alpha and store.merged else None
