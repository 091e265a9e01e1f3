"""Latent attention (MLA) as attention over one KV head.

A layer makes the keys and values of all heads from each token's latent vector c and rotary part r. The heads share r. A
head's key is (W_k c, r), its value W_v c. Its query (q, s) has the product (W_k^T q) c + s r with that key. Its output
is W_v times the weighted mean of latents. So the layer is one KV head with key (r, c) and value c, under queries (s,
W_k^T q). kvlab stores, evicts, quantises and counts this head.

A value is written (0, c), as wide as its key; it is a part of the key, and a store holds it once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.core.rotation import paired


def joined(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[..., n, width + rank]` of latents `[..., n, rank]` and rotary parts `[..., n, width]`."""
    keys = torch.cat([rotary, latents], -1)
    return keys, values_in(keys, rotary.shape[-1])


def parted(keys: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The latents and the rotary parts of keys: what transformers' cache holds as keys and as values."""
    return keys[..., width:], keys[..., :width]


def values_in(keys: Tensor, width: int) -> Tensor:
    """The values of keys whose rotary part is `width` wide."""
    return F.pad(keys[..., width:], (width, 0))


@dataclass(frozen=True, eq=False)
class Expansion:
    """How one layer makes its heads' keys and values of latents.

    Attributes:
        keys: W_k, `[heads, channels without rotation, rank]`.
        values: W_v, `[heads, channels of a value, rank]`.
        width: channels of the rotary part.
    """

    keys: Tensor
    values: Tensor
    width: int

    def queries(self, queries: Tensor) -> Tensor:
        """A layer's own queries `[batch, heads, n, head_dim]` as they look at latents, `[..., width + rank]`."""
        still, turned = queries.split([queries.shape[-1] - self.width, self.width], -1)
        return torch.cat([turned, still @ self.keys.to(queries.dtype)], -1)

    def before(self, projected: Tensor, queries: Tensor) -> Tensor:
        """As `queries`, before RoPE.

        Args:
            projected: what the layer's projection put out, `[batch, heads, n, head_dim]`.
            queries: the same after RoPE.
        """
        at = queries.shape[-1] - self.width
        # The channels that RoPE leaves alone show whether the layer has scaled its queries since.
        scale = queries[..., :at].float().norm() / projected[..., :at].float().norm().clamp_min(1e-30)
        turned = _reordered(projected[..., at:], queries[..., at:]) * scale.to(queries.dtype)
        return self.queries(torch.cat([queries[..., :at], turned], -1))

    def outputs(self, attended: Tensor) -> Tensor:
        """The heads' outputs `[batch, heads, n, channels of a value]` of weighted means of values."""
        return attended[..., self.width :] @ self.values.to(attended.dtype).transpose(-1, -2)

    def projection(self, output: Tensor) -> Tensor:
        """An output projection `[hidden, heads x channels of a value]` as it looks at means of values, `[hidden, heads
        x (width + rank)]`.
        """
        by_head = output.unflatten(1, (len(self.values), -1)).transpose(0, 1)
        seen = by_head.float() @ self.values.float()
        return F.pad(seen, (self.width, 0)).to(output.dtype).transpose(0, 1).flatten(1)


def _reordered(before: Tensor, after: Tensor) -> Tensor:
    """Return channels before RoPE in the order in which they come out of it.

    Some layers pair neighbours, and put out the first channels of all pairs and then the second ones.
    """
    apart = torch.cat([before[..., ::2], before[..., 1::2]], -1)
    return apart if _changed(apart, after) < _changed(before, after) else before


def _changed(before: Tensor, after: Tensor) -> float:
    """How far the norms of pairs are from what they were, which no rotation changes, in the better of two layouts."""
    pairs, off = before.shape[-1] // 2, []
    for interleaved in (False, True):
        norms = [torch.hypot(*paired(x, pairs, interleaved)) for x in (before, after)]
        first, second = (x / x.norm().clamp_min(1e-30) for x in norms)
        off.append(float((first - second).norm()))
    return min(off)
