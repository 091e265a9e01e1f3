"""One decoding query under one policy: which keys it reads, and how much of its attention is lost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.replays.reference import reference
from kvlab.replays.replay import Replay

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace


@dataclass(frozen=True)
class Spot:
    """A decoding query: its layer's number in the model and its query head from 0, its decoding step from 1."""

    layer: int
    head: int
    step: int


@dataclass(frozen=True, eq=False)
class Look:
    """One query's attention under one policy.

    Attributes:
        result: the replay.
        spot: the query.
        name: the name to show for the policy; by default its own.
    """

    result: Replay
    spot: Spot
    name: str = ""

    @property
    def trace(self) -> Trace:
        return self.result.trace

    @property
    def row(self) -> int:
        """Where the query's layer stands among those of the trace."""
        return self.trace.layout.index(self.spot.layer)

    @property
    def title(self) -> str:
        name = self.name or self.result.policy.name
        return f"{name}, budget {self.result.budget:,}" if hasattr(self.result.policy, "budget") else name

    @cached_property
    def weights(self) -> Tensor:
        """Attention with the full cache over every key that the query may see, `[prompt + step]`."""
        return reference(self.trace).at(self.spot.step)[self.row, self.spot.head].cpu()

    def _mask(self, sets: Tensor) -> Tensor:
        """The set of the query head as a mask, bool `[prompt + step]`."""
        of_head = sets[self.spot.head * len(sets) // self.trace.heads]
        mask = torch.zeros(len(self.weights), dtype=torch.bool)
        mask[of_head[(of_head >= 0) & (of_head < len(mask))]] = True
        return mask

    @cached_property
    def read(self) -> Tensor:
        """Which keys the query reads, bool `[prompt + step]`."""
        return self._mask(self.result.kept(self.spot.layer, self.spot.step))

    @cached_property
    def stored(self) -> Tensor:
        """Which keys are stored when the query comes, its own included, read or not; bool `[prompt + step]`."""
        stored = self._mask(self.result.stored(self.spot.layer, self.spot.step - 1))
        stored[-1] = True
        return stored | self.read

    @cached_property
    def lost(self) -> Tensor:
        """Attention on keys that the query cannot read, `[prompt + step]`."""
        return self.weights.masked_fill(self.read, 0)

    @property
    def spread(self) -> float:
        """The effective number of tokens on which attention is lost (see `measures.concentrated_loss`)."""
        lost = self.lost.double()
        return float(lost.sum() ** 2 / lost.square().sum().clamp_min(1e-300))

    @property
    def mass_lost(self) -> float:
        return float(self.result.mass_lost[self.row, self.spot.head, self.spot.step - 1])
