"""How a layer turns queries and keys by their positions (RoPE), read from the model and checked against what it did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn

FREQUENCIES, FACTOR = "inv_freq", "attention_scaling"
LEFT_OVER = "original_inv_freq"
# Half-precision models turn in half precision, which is off by less than one part in a hundred.
TOLERANCE = 0.02
CHECKED = 64
"""How many of the last queries a rotation is checked against."""


@dataclass(frozen=True)
class Rotation:
    """A layer's rotation of queries and keys: each pair of channels is turned by position x frequency.

    The first channels of a head are turned, two for each frequency; the others are left as they are.

    Attributes:
        frequencies: of the pairs, in radians for each position; none where the layer does not turn.
        factor: what turned channels are multiplied by (YaRN and its like), 1 for most models.
        interleaved: whether channels 2i and 2i + 1 are a pair, and not i and i + pairs.
        offset: how far the positions that a sequence was fed at are ahead of its tokens' order; positions below are
            by that order.
    """

    frequencies: tuple[float, ...] = ()
    factor: float = 1.0
    interleaved: bool = False
    offset: int = 0

    def fits(self, head_dim: int) -> bool:
        """Whether it can be that of heads of this size."""
        numbers = (*self.frequencies, self.factor)
        return 2 * len(self.frequencies) <= head_dim and all(
            isinstance(number, Real) and math.isfinite(number) for number in numbers
        )

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Vectors as the layer has them at their positions, float32.

        Args:
            x: `[..., n, head_dim]`.
            positions: `[n]`, or `[..., n]`.
        """
        angles = self._angles(positions)
        return mixed(x, angles.cos() * self.factor, angles.sin() * self.factor, self.interleaved)

    def turned_back(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo the layer's rotation of `x` `[..., n, head_dim]`; the result is float32."""
        angles = self._angles(positions)
        return mixed(x, angles.cos() / self.factor, -angles.sin() / self.factor, self.interleaved)

    def mean(self, positions: Tensor, head_dim: int) -> Tensor:
        """The matrix `[head_dim, head_dim]` that takes a vector to its mean over all `positions` `[n]`, float32."""
        angles = self._angles(positions)
        cosines, sines = (x.mean(0) * self.factor for x in (angles.cos(), angles.sin()))
        return mixed(
            torch.eye(head_dim, dtype=torch.float32, device=positions.device), cosines, sines, self.interleaved
        ).T

    def _angles(self, positions: Tensor) -> Tensor:
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        return (positions + self.offset)[..., None].float() * frequencies


def paired(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The two channels of each pair, float32: `[..., head_dim]` -> twice `[..., pairs]`."""
    part = x[..., : 2 * pairs].float()
    return (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])


def mixed(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """Pairs of channels `[..., head_dim]` turned by the angles whose cosines and sines `[..., pairs]` these are, the
    other channels as they are, float32.
    """
    pairs = cosines.shape[-1]
    first, second = paired(x, pairs, interleaved)
    parts = first * cosines - second * sines, second * cosines + first * sines
    both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    rest = x[..., 2 * pairs :].float()
    return torch.cat([both, rest.expand(*both.shape[:-1], rest.shape[-1])], -1)


def candidates(model: nn.Module) -> Iterator[Rotation]:
    """The rotations that a model's own tables stand for, each in both layouts, and none at all.

    Tables that change with the length of a sequence are read as they stand now.
    """
    for module in model.modules():
        # Models whose layers turn differently have several tables, with the kind of layer before the name.
        for name, table in module.named_buffers(recurse=False):
            if not name.endswith(FREQUENCIES) or name.endswith(LEFT_OVER):
                continue
            factor = getattr(module, name.removesuffix(FREQUENCIES) + FACTOR, 1.0)
            found = Rotation(tuple(table.flatten().tolist()), float(factor))
            yield found
            yield replace(found, interleaved=True)
    yield Rotation()


def changes_within(model: nn.Module, length: int) -> bool:
    """Return whether a model turns the tokens of so long a sequence differently when they come in parts.

    Such a model makes its tables for the longest position so far (dynamic NTK, LongRoPE), and `length` is beyond the
    first tables.
    """
    config = cast(Any, model).config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    # Models whose layers turn differently have one for each kind of layer.
    for turn in parameters.values() if all(isinstance(each, dict) for each in parameters.values()) else [parameters]:
        kind = str(turn.get("rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            first = turn.get("original_max_position_embeddings") or config.max_position_embeddings
            if length > first:
                return True
    return False


def agreeing(choices: Sequence[Rotation], before: Tensor, after: Tensor, positions: Tensor) -> Rotation | None:
    """The rotation that comes closest to what the layer has made of its queries; None if none comes close.

    Args:
        choices: of several that come equally close (at position 0 all do) the first.
        before, after: `[batch, heads, n, head_dim]`, before and after RoPE.
        positions: `[batch, n]`.
    """
    fitting = [choice for choice in choices if choice.fits(before.shape[-1])]
    off = [float((choice.turned(before, positions[:, None]) - after.float()).norm()) for choice in fitting]
    closest = min(range(len(off)), key=off.__getitem__)
    return fitting[closest] if off[closest] <= TOLERANCE * float(after.float().norm()) else None
