"""Compactor (Chari and Van Durme, 2025): leverage of keys, and attention without a causal mask."""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods.leverage import Leverage

POOLING = 3


class Compactor(Leverage):
    """Keeps the tokens whose keys stand out or that their neighbours attend to, later ones included; prefill only.

    "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores" (Chari and Van Durme
    2025): the score combines leverage and attention. It is `blend` times the leverage (`leverage`) plus the attention.
    Both are standardised within the layer: less the mean, over the standard deviation. Attention is that of all queries
    of a chunk to all keys of the chunk, later ones included. It is summed, averaged over the GQA group, multiplied by
    the norm of the value, and average-pooled over 3 tokens. The first and last tokens always stay. Every generated
    token is also kept. Cost: that of `leverage`, and the attention inside chunks; the queries of the whole prompt.

    Choices: the author's press in kvpress is followed, with the blend of his engine, compactor-vllm; the press takes
    the share that is evicted. Queries and keys are multiplied without the factor 1 / sqrt(d), as in both. The last
    chunk may be shorter. Tokens that always stay take no part. How much a context can lose (the paper's calibration) is
    left out: the budget is given.

    Parameters:
        budget: entries for each layer and KV head, sinks and recent tokens included, or a fraction of the prompt.
        sketch, seed: of the leverage scores (48; 0).
        chunk: tokens that attend to each other (256).
        blend: weight of the leverage (0.5).
        sinks: first tokens that always stay (8).
        recent: last tokens that always stay (4).
    """

    name: ClassVar[str] = "compactor"
    summary: ClassVar[str] = "leverage of keys, and attention without a causal mask"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["compactor"]

    chunk: Annotated[int, Field(ge=1)] = 256
    blend: Annotated[int | float, Field(ge=0)] = 0.5
    sinks: Annotated[int, Field(ge=0)] = 8
    recent: Annotated[int, Field(ge=0)] = 4

    @property
    def minimum(self) -> int:
        return self.sinks + self.recent + 1

    @property
    def observes(self) -> None:
        return None

    def scores(self, prompt: Prompt) -> Tensor:
        """Scores of the tokens between sinks and recent ones, and zeros for these."""
        key = ("compactor", self.sketch, self.seed, self.chunk, self.blend, self.sinks, self.recent)
        return prompt.share(key, lambda: self._blended(prompt))

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        scores = self.scores(prompt).clone()
        scores[..., : self.sinks] = torch.inf
        scores[..., prompt.length - self.recent :] = torch.inf
        return scores

    def _blended(self, prompt: Prompt) -> Tensor:
        blended = torch.zeros(prompt.keys.shape[:3], dtype=torch.float32, device=prompt.keys.device)
        between = slice(self.sinks, prompt.length - self.recent)
        if between.start < between.stop:
            attended = torch.stack([self._attended(prompt, row, between) for row in range(prompt.rows)])
            leverage = self._leverage(prompt, between)
            blended[..., between] = self.blend * _standard(leverage) + _standard(attended)
        return blended

    def _attended(self, prompt: Prompt, row: int, between: slice) -> Tensor:
        """Return the attention of their chunks that a layer's tokens get, weighed and pooled, `[kv_heads, n]`."""
        queries, keys = (attention.exact(x[row, :, between]) for x in (prompt.window(prompt.length), prompt.keys))
        sums = [
            attention.weights(asking, asked, 1.0).sum(-2)
            for asking, asked in zip(queries.split(self.chunk, 1), keys.split(self.chunk, 1), strict=True)
        ]
        mean = torch.cat(sums, -1).unflatten(0, (prompt.kv_heads, -1)).mean(1)
        weighed = mean * attention.exact(prompt.values[row, :, between]).norm(dim=-1)
        return F.avg_pool1d(weighed, POOLING, stride=1, padding=POOLING // 2)


def _standard(scores: Tensor) -> Tensor:
    """Scores `[rows, kv_heads, n]` less the mean of their row, over its standard deviation."""
    flat = scores.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    return (centred / flat.std(1, correction=0, keepdim=True).clamp_min(1e-6)).view_as(scores)
