"""The last queries of one layer, remembered while a prompt is fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Observed:
    """Queries `[batch, heads, n, head_dim]`, in the pieces in which they came until somebody asks for them."""

    def __init__(self, pieces: Sequence[Tensor] = ()):
        self._pieces = list(pieces)

    def copy(self) -> Observed:
        return Observed(self._pieces)

    def add(self, queries: Tensor, n: int | None) -> None:
        """Remember the last `n` queries (all for None): of a prompt, and of a response that becomes part of one."""
        if n == 0:
            return
        if n is not None and queries.shape[2] > n:
            # A copy, so that the queries of a long prompt are not kept alive by a window on them.
            queries = queries[:, :, queries.shape[2] - n :].clone()
        self._pieces.append(queries)
        if n is not None and len(self._pieces) > 2 * n:
            del self._pieces[:n]

    def forget(self) -> None:
        self._pieces = []

    @property
    def queries(self) -> Tensor | None:
        """`[batch, heads, n, head_dim]`, at least the last that `add` was asked for; None where there are none."""
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces, 2)]
        return self._pieces[0] if self._pieces else None

    def select(self, rows: Tensor) -> None:
        """Take the sequences `rows` of the batch instead of the present ones."""
        if self.queries is not None:
            self._pieces = [self.queries[rows.to(self.queries.device)]]

    def crop(self, n: int) -> None:
        """Forget the newest `n`."""
        if self.queries is not None:
            self._pieces = [self.queries[:, :, : max(self.queries.shape[2] - n, 0)]]
