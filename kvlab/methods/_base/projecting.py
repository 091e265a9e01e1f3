"""How large values are once the output projection has brought them into the model's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.core import attention


def projected_norms(values: Tensor, projection: Tensor, heads: int, order: int) -> Tensor:
    """Norms of W_o v for each query head that reads a value.

    Args:
        values: `[kv_heads, length, head_dim]`.
        projection: W_o, `[hidden, heads x head_dim]`.
        order: 1 or 2.

    Returns:
        `[heads, length]`.
    """
    group = heads // values.shape[0]
    # One head at a time: projected values are as wide as the hidden states.
    norms = [
        (attention.exact(values[head // group]) @ attention.exact(part).T).norm(p=order, dim=-1)
        for head, part in enumerate(projection.chunk(heads, dim=1))
    ]
    return torch.stack(norms)
