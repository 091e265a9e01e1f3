"""A model's softmax over the products of queries and keys: a factor, a soft cap, and sinks that take their share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from kvlab.lib.renamed import Renamed


@dataclass(frozen=True, eq=False)
class Softmax:
    """How products of queries and keys become attention weights.

    l_i = softcap x tanh(factor x q.k_i / softcap), w_i = exp(l_i) / (exp(sink) + sum_j exp(l_j)): without a soft cap
    and sinks the plain scaled softmax.

    Attributes:
        factor: of the products; 1 / sqrt(head_dim) for None.
        softcap: what logits level off at (Gemma 2); None where they are not capped.
        sinks: `[heads]`, or `[rows, heads]`: one more logit for each head, of no key (gpt-oss). The weights of its keys
            then sum to less than 1. None where there are none.
    """

    factor: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    told = Renamed("scaling")

    @classmethod
    def of(cls, scaling: Scaling) -> Softmax:
        """The plain softmax of a factor; itself where it is one already."""
        return scaling if isinstance(scaling, Softmax) else cls(scaling)

    @property
    def plain(self) -> bool:
        """Whether it is a scaled softmax and nothing else, which fused kernels compute."""
        return self.softcap is None and self.sinks is None

    @property
    def scaling(self) -> Scaling:
        """The scaling that policies receive: only the factor without soft cap and sinks."""
        return self.factor if self.plain else self

    def scale(self, head_dim: int) -> float:
        """The factor, whichever way it is given."""
        return 1 / math.sqrt(head_dim) if self.factor is None else self.factor

    def capped(self, logits: Tensor) -> Tensor:
        """Scaled logits as the softmax sees them, any shape."""
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def shares(self, logits: Tensor) -> Tensor:
        """Attention weights of capped logits `[..., heads, n, length]`: rows sum to 1, less the sink's share."""
        if self.sinks is None:
            return logits.softmax(-1)
        sinks = self.sinks[..., None, None].to(logits.dtype)
        largest = torch.maximum(logits.amax(-1, keepdim=True), sinks)
        raised = (logits - largest).exp()
        return raised / (raised.sum(-1, keepdim=True) + (sinks - largest).exp())

    def row(self, index: int) -> Softmax:
        """That of one row, `[heads, ...]`, where the rows are the layers of a replay or the sequences of a batch."""
        return self if self.sinks is None or self.sinks.dim() == 1 else replace(self, sinks=self.sinks[index])

    def group(self, kv_head: int, kv_heads: int) -> Softmax:
        """That of the query heads that share one KV head."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.chunk(kv_heads, -1)[kv_head])

    def to(self, device: torch.device | str) -> Softmax:
        """The same where `device` is."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.to(device))


Scaling: TypeAlias = float | Softmax | None
"""A plain factor of the logits (1 / sqrt(head_dim) for None), or a `Softmax` of a model that does more with them."""
