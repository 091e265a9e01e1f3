"""CurDKV (Sengupta et al., 2025): the leverage of keys and of values together says which tokens stay."""

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvlab.core import attention
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer
from kvlab.methods.leverage import gaussian

RANK = 20
"""Columns of the Gaussian matrix."""


class CurDKV(Scorer):
    """Keeps the first tokens, and those whose key and value have the largest leverage among their neighbours; prefill
    only.

    "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition" (Sengupta et al. 2025): tokens are ranked
    by leverage scores of keys and values. A CUR decomposition picks rows in the same way. Values count as much as keys.
    No query is needed. Every generated token is also kept. Cost: the norms of all keys and values.

    Choices, all as in the press that an author wrote for kvpress. The leverage of a vector is its squared norm over the
    sum within its block. A block has `local` tokens; the last may be shorter. The leverages of key and value are
    multiplied. With `project` keys and values are first multiplied by a Gaussian matrix of 20 columns, the same for all
    heads of a layer.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        sinks: first tokens that always stay (4).
        leverage: "product", "mean", "key" or "value" ("product").
        local: tokens of a block within which leverage is compared (16); None compares all tokens.
        project: whether keys and values are multiplied by a Gaussian matrix first (False).
        seed: of the draw.
    """

    name: ClassVar[str] = "curdkv"
    summary: ClassVar[str] = "prompt tokens whose keys and values are long compared with their neighbours'"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["curdkv"]

    sinks: Annotated[int, Field(ge=0)] = 4
    leverage: Literal["product", "mean", "key", "value"] = "product"
    local: Annotated[int, Field(ge=2)] | None = 16
    project: bool = False
    seed: int = 0

    @property
    def minimum(self) -> int:
        return self.sinks + 1

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(("curdkv", self.leverage, self.local, self.project, self.seed), lambda: self._joint(prompt))

    def importance(self, prompt: Prompt, budget: int) -> Tensor:
        scores = self.scores(prompt).clone()
        scores[..., : self.sinks] = torch.inf
        return scores

    def drawn(self, layer: int, head_dim: int) -> Tensor:
        """The Gaussian matrix of one layer, `[head_dim, 20]`."""
        return gaussian(self.seed, layer, head_dim, RANK)

    def _joint(self, prompt: Prompt) -> Tensor:
        keys, values = (self._shares(prompt, vectors) for vectors in (prompt.keys, prompt.values))
        return {"product": keys * values, "mean": (keys + values) / 2, "key": keys, "value": values}[self.leverage]

    def _shares(self, prompt: Prompt, vectors: Tensor) -> Tensor:
        """The leverage of keys or values `[rows, kv_heads, length, head_dim]`, `[rows, kv_heads, length]`."""
        vectors = attention.exact(vectors)
        if self.project:
            drawn = torch.stack([self.drawn(layer, vectors.shape[-1]) for layer in prompt.layers])
            vectors = vectors @ drawn[:, None].to(vectors)
        squares = vectors.square().sum(-1)
        if self.local is None:
            return squares
        blocks = F.pad(squares, (0, -prompt.length % self.local)).unflatten(-1, (-1, self.local))
        return (blocks / blocks.sum(-1, keepdim=True)).nan_to_num(0.0).flatten(-2)[..., : prompt.length]
