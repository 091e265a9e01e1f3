"""R-KV (Cai et al., 2025): what the latest tokens attend to, less what others say already."""

import itertools
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention, ranking
from kvlab.core.store import LayerStore
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base import profile
from kvlab.methods._base.eviction import after_compression
from kvlab.methods._base.policy import Budget, Kernel, Policy, top_and_last
from kvlab.methods._base.prompt import Prompt

# Cosines are computed for so many keys, and so many pairs, at a time: as many as a processor's cache holds.
BLOCK, CACHED, CELLS = 256, 2**19, 2**26


class RKV(Policy):
    """Keeps the latest tokens and those that they attend to and that are not redundant, compressed every few steps.

    R-KV (Cai et al. 2025), section 3: importance is the mean attention of the last `window` queries, the largest of the
    GQA group, max-pooled. Redundancy is the mean cosine of a token's key to all other keys, then a softmax over the
    tokens. For each key, the most recent similar one (cosine above `threshold`) is not counted. The score is mix x
    importance - (1 - mix) x redundancy. Entries gather until the budget is full; then the best stay and leave room for
    `interval` new ones. Cost: `window` cached weights for each entry, and at each compression one product of all stored
    keys with each other.

    Choices: the budget counts the buffer and so bounds the stored entries after every step (the paper adds the two).
    Attention rows are cached as they were attended, over all entries (the authors' softmax leaves the window out). For
    a key without a similar one all count (the authors' code leaves out the first token).

    Parameters:
        budget: entries for each layer and KV head, window and buffer included.
        window: latest tokens that observe and always stay (8).
        kernel: width of the max-pooling, odd (7).
        mix: weight of importance against redundancy (0.07 in the authors' code, 0.1 in the paper).
        interval: tokens between two compressions; None for 128, or an eighth of the budget if that is less.
        threshold: cosine above which two keys are similar (0.5).
    """

    name: ClassVar[str] = "rkv"
    summary: ClassVar[str] = "attention of the latest tokens less the redundancy of keys, while decoding"
    family: ClassVar[str] = "evicts or merges while decoding"
    kind: ClassVar[str] = "decoding"
    paper: ClassVar[Paper | None] = PAPERS["rkv"]

    budget: Budget
    window: Annotated[int, Field(ge=1)] = 8
    kernel: Kernel = 7
    mix: Annotated[float, Field(ge=0, le=1)] = 0.07
    interval: Annotated[int, Field(ge=1)] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.5

    @property
    def minimum(self) -> int:
        return self.window + 1 + (self.interval or 1)

    @property
    def observes(self) -> int:
        return self.window

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(
            ("rkv", self.window, self.kernel, self.mix, self.threshold),
            lambda: self._score(self._rows(prompt), prompt.keys),
        )

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        return ranking.with_last(self.scores(prompt), self.window)

    def choose(self, prompt: Prompt, budget: int) -> Tensor:
        return top_and_last(self.scores(prompt), after_compression(budget, self.interval) - self.window, self.window)

    def compress(self, store: LayerStore, prompt: Prompt) -> None:
        profile.begin(store, self.window, self._rows(prompt))
        super().compress(store, prompt)

    def step(self, store: LayerStore, weights: Tensor | None) -> None:
        assert weights is not None, "a policy that weighs is given the attention weights"
        rows = profile.follow(store, self.window, weights.unflatten(1, (store.positions.shape[1], -1)).amax(2))
        if store.length > store.budget:
            scores = self._score(rows, store.keys)
            top = after_compression(store.budget, self.interval) - self.window
            store.evict(top_and_last(scores, top, self.window), even=True)

    def _rows(self, prompt: Prompt) -> Tensor:
        """Attention of the prompt's last queries, the largest of each group, `[rows, kv_heads, length, n]`."""

        def rows() -> Tensor:
            return prompt.window_attention(
                self.window, lambda w: w.unflatten(0, (prompt.kv_heads, -1)).amax(1).transpose(-1, -2)
            )

        return prompt.share(("rkv rows", self.window), rows)

    def _score(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Scores of the entries older than the window, pooled, and zeros for it, `[rows, kv_heads, slots]`."""
        older = rows.shape[2] - self.window
        if older <= 0:
            return rows.new_zeros(rows.shape[:3])
        attended = rows.mean(-1)[..., :older]
        pooled = F.max_pool1d(attended, self.kernel, stride=1, padding=self.kernel // 2)
        redundancy = self._redundancy(attention.exact(keys)).softmax(-1)[..., :older]
        return F.pad(self.mix * pooled - (1 - self.mix) * redundancy, (0, self.window))

    def _redundancy(self, keys: Tensor) -> Tensor:
        """Mean cosine of each key to the others, without what it is let off, `[rows, kv_heads, slots]`."""
        units = F.normalize(keys, dim=-1).flatten(0, 1)
        n = units.shape[1]
        slots = torch.arange(n, device=keys.device, dtype=keys.dtype)
        # All cosines of a key at once, but for its own: their sum is its cosine to the sum.
        total = (units @ units.sum(1)[..., None])[..., 0] - units.square().sum(-1)
        at_once = max(1, (CACHED if keys.is_cpu else CELLS) // (BLOCK * n))
        parts = zip(units.split(at_once), total.split(at_once), strict=True)
        for (of_heads, found), start in itertools.product(parts, range(0, n, BLOCK)):
            cosines = of_heads[:, start : start + BLOCK] @ of_heads.transpose(-1, -2)
            cosines.diagonal(start, 1, 2).fill_(-1)
            last = torch.where(cosines > self.threshold, slots, -1).amax(-1).long()
            let_off = cosines.gather(-1, last.clamp_min(0)[..., None])[..., 0].masked_fill(last < 0, 0)
            found.scatter_add_(-1, last.clamp_min(0), -let_off)
        return (total / n).view(keys.shape[:3])
