"""Seeded inputs for the tests: one layer or several of random queries, keys and values, and small converters."""

from __future__ import annotations

import numpy as np
import torch


def layer(seed, heads=6, kv_heads=2, head_dim=16, prompt=48, new=0, n=None, spread=1.5, layers=None):
    """float32 queries [heads, n, d] of the last n tokens, keys and values [kv_heads, prompt + new, d].

    With `layers` each gets that leading dimension. `spread` sharpens the attention, so that scores lie well apart.
    """
    generator = torch.Generator().manual_seed(seed)
    total = prompt + new
    n = total if n is None else n
    lead = [] if layers is None else [layers]
    queries = spread * torch.randn(*lead, heads, n, head_dim, generator=generator)
    keys = torch.randn(*lead, kv_heads, total, head_dim, generator=generator)
    values = torch.randn(*lead, kv_heads, total, head_dim, generator=generator)
    return queries, keys, values


def exact(*tensors):
    """The same numbers as float64 arrays, for the oracles."""
    arrays = [np.asarray(t, dtype=np.float64) for t in tensors]
    return arrays if len(arrays) > 1 else arrays[0]


def shaken(*arrays, seed=0, size=1e-5):
    """The arrays with relative noise far above float32's: an input whose decisions survive it has no near-ties."""
    random = np.random.default_rng(seed)
    return [a * (1 + size * random.standard_normal(a.shape)) for a in arrays]


def with_attention(rows):
    """Queries and keys of one head whose attention is exactly `rows` (lower triangular, each summing to 1)."""
    rows = np.asarray(rows, dtype=np.float64)
    n = len(rows)
    logits = np.log(np.where(rows > 0, rows, 1e-30))
    return np.sqrt(n) * logits[None], np.eye(n)[None]


def sets(positions):
    """[kv_heads, kept], -1 padded at the end -> a list of ascending positions for each KV head."""
    result = []
    for row in np.asarray(positions).tolist():
        kept = [p for p in row if p >= 0]
        assert row == kept + [-1] * (len(row) - len(kept)), "padding stands at the end"
        assert kept == sorted(set(kept)), "ascending, without duplicates"
        result.append(kept)
    return result
