"""Leverage scores (Compactor, Chari and Van Durme, 2025): keys that the others cannot make up for stay."""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvlab.core import attention
from kvlab.lib.references import PAPERS, Paper
from kvlab.methods._base.needs import Needs
from kvlab.methods._base.prompt import Prompt
from kvlab.methods._base.scorer import Scorer

RIDGE = 1e-2


class Leverage(Scorer):
    """Keeps the tokens whose keys before RoPE have the largest leverage among those of their head; prefill only.

    "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores" (Chari and Van Durme
    2025): each key has a leverage score. X is the keys before RoPE, less their mean, times a Gaussian matrix of
    `sketch` columns. The score of token i is the i-th diagonal entry of X (X'X)^-1 X'. It is large where few other keys
    have the same direction. No query is needed. Every generated token is also kept. Cost: two products of all keys with
    small matrices.

    Choices: the leverage scores alone; `compactor` has the whole method. 0.01 is added to the diagonal of X'X, as in
    kvpress. Keys before RoPE are those of the cache, turned back. The draw depends on `seed` and the layer, and is the
    same for all its heads.

    Parameters:
        budget: entries for each layer and KV head, or a fraction of the prompt.
        sketch: columns of the Gaussian matrix (48); with as many as a head has channels the draw changes nothing.
        seed: of the draw.
    """

    name: ClassVar[str] = "leverage"
    summary: ClassVar[str] = "prompt tokens whose keys before RoPE stand out among the others"
    family: ClassVar[str] = "keeps tokens of the prompt"
    kind: ClassVar[str] = "score at prefill"
    paper: ClassVar[Paper | None] = PAPERS["compactor"]

    sketch: Annotated[int, Field(ge=1)] = 48
    seed: int = 0

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True)

    def scores(self, prompt: Prompt) -> Tensor:
        return prompt.share(("leverage", self.sketch, self.seed), lambda: self._leverage(prompt))

    def drawn(self, layer: int, head_dim: int) -> Tensor:
        """The Gaussian matrix of one layer, `[head_dim, sketch]`."""
        return gaussian(self.seed, layer, head_dim, self.sketch)

    def _leverage(self, prompt: Prompt, between: slice = slice(None)) -> Tensor:
        """Leverage scores of the tokens `between`, among themselves, `[rows, kv_heads, n]`."""
        rows = zip(prompt.keys, prompt.positions, prompt.rotation(self), prompt.layers, strict=True)
        scores = []
        for keys, positions, rotation, layer in rows:
            before = rotation.turned_back(attention.exact(keys[:, between]), positions[:, between])
            before = before - before.mean(1, keepdim=True)
            sketched = before @ self.drawn(layer, keys.shape[-1]).to(before)
            # On the CPU, since not every GPU has float64, and the matrices are small.
            gram = (sketched.transpose(1, 2) @ sketched).cpu().double()
            gram += RIDGE * torch.eye(self.sketch, dtype=gram.dtype)
            scores.append((sketched @ torch.linalg.inv(gram).float().to(before) * sketched).sum(-1))
        return torch.stack(scores)


def gaussian(seed: int, layer: int, head_dim: int, columns: int) -> Tensor:
    """The Gaussian matrix of one layer, which shortens vectors and keeps their lengths on average: float32."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
    return torch.randn(head_dim, columns, generator=generator, dtype=torch.float32) / math.sqrt(columns)
