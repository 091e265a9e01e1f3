"""NVFP4, the 4-bit float of NVIDIA's Blackwell: blocks of 16 numbers with a scale in 8 bits each.

A number is an e2m1 code x the block's scale in e4m3 x one scale in float32. The codes are 0, 0.5, 1, 1.5, 2, 3, 4 and
6, with a sign. The float32 scale is the largest magnitude / (6 x 448); a block's scale is its largest magnitude / 6,
over that. Both codes and scales go to the nearest, of two equally near to the one whose last bit is zero.

A tensor's float32 scale is here that of a head's keys or values, found when the prompt has been compressed, as `Fp8`
does it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvlab.core.entries import Fp8, Get
from kvlab.core.kivi import pack_codes, unpack_codes

BLOCK = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_SCALE = Fp8.LARGEST


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _levels(device: torch.device) -> Tensor:
    """The number of each of the 16 codes, on a device."""
    levels = torch.tensor(LEVELS)
    return torch.cat([levels, -levels]).to(device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _bounds(device: torch.device) -> Tensor:
    """Where the code of a magnitude changes, on a device."""
    levels = torch.tensor(LEVELS)
    bounds = (levels[1:] + levels[:-1]) / 2
    # `bucketize` sends a bound down. That is right for every other one, below which the code is even.
    bounds[1::2] = torch.nextafter(bounds[1::2], bounds.new_zeros(()))
    return bounds.to(device)


def nearest_codes(x: Tensor) -> Tensor:
    """e2m1 codes of float32 numbers, uint8: the sign is bit 3."""
    return torch.bucketize(x.abs(), _bounds(x.device)).to(torch.uint8) | (x < 0).to(torch.uint8) << 3


class Nvfp4(Fp8):
    """4-bit floats in blocks of 16 along the head."""

    LARGEST = LEVELS[-1] * LARGEST_SCALE

    def rounded(self, name: str, x: Tensor) -> dict[str, Tensor]:
        blocks = (x.float() / self.scales[name][..., None, None]).unflatten(-1, (-1, BLOCK))
        scales = (blocks.abs().amax(-1) / LEVELS[-1]).clamp_max(LARGEST_SCALE).to(torch.float8_e4m3fn)
        steps = scales.float()[..., None]
        codes = nearest_codes(torch.where(steps > 0, blocks / steps, 0)).flatten(-2)
        return {name: pack_codes(codes, 4), f"{name} scale": scales.view(torch.uint8)}

    def restored(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        codes = unpack_codes(get(name), 4)
        found = (
            _levels(codes.device).index_select(0, codes.flatten().int()).view(codes.shape).unflatten(-1, (-1, BLOCK))
        )
        steps = get(f"{name} scale").view(torch.float8_e4m3fn).float()
        scale = self.scales[name] if heads is None else self.scales[name].flatten()[heads]
        return ((found * steps[..., None]).flatten(-2) * scale[..., None, None]).to(self.dtype)
