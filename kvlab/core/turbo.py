"""TurboQuant (Zandieh, Daliri, Hadian, Mirrokni, 2025, arXiv 2504.19874): rotated vectors in 2 to 4 bits a coordinate.

A vector's norm is stored apart, in float16. The rest is a point of the unit sphere. A fixed rotation gives each of its
coordinates about the same distribution. Its density on [-1, 1] is proportional to (1 - x^2)^((d - 3) / 2) (the paper's
lemma 1). The Lloyd-Max codebook of that distribution rounds each coordinate by itself (the paper's algorithm 1).

The paper rotates by the Q of a Gaussian matrix. Here, as in engines, random signs and a Hadamard matrix do it. For a
head size that is no power of two, the Hadamard matrix has the largest power of two that divides it. The Q of a small
Gaussian matrix then mixes the blocks. All heads and layers share the rotation.

The variant for inner products (the paper's algorithm 2) spends one of the bits on the residual. It stores the signs of
a projection of the residual (QJL), and its norm in float16. Inner products with what is read have no bias. The paper
projects by a Gaussian matrix; here its Q does it, whose rows are orthogonal. (Signs and a Hadamard matrix would leave a
bias, since residuals are no Gaussian vectors.)

A rotation is a fixed sequence of sums, no matrix product, so that a vector is read the same in whatever batch it comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, reduce

import numpy as np
import torch
from torch import Tensor

from kvlab.core.entries import AsIs, Get, Rounded
from kvlab.core.kivi import pack_codes, unpack_codes

CELLS = 2**16
"""Into how many pieces the density is cut to find a codebook."""
ROUNDS, NEAR = 20_000, 1e-10
"""How often levels are moved at most, and the largest move that ends it."""


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def codebook(bits: int, head_dim: int) -> Tensor:
    """The Lloyd-Max levels of one coordinate of a random unit vector, ascending, float32 `[2^bits]`."""
    edges = np.linspace(-1, 1, CELLS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    density = (1 - middle**2) ** ((head_dim - 3) / 2)
    density /= density.sum()
    mass, moment = (np.concatenate([[0.0], np.cumsum(x)]) for x in (density, density * middle))
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass, edges)
    for _ in range(ROUNDS):
        bounds = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
        means = np.diff(np.interp(bounds, edges, moment)) / np.diff(np.interp(bounds, edges, mass))
        moved, levels = np.abs(means - levels).max(), means
        if moved < NEAR:
            break
    return torch.tensor((levels - levels[::-1]) / 2, dtype=torch.float32)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def on_device(device: torch.device, table: Callable[..., Tensor], *of: int) -> Tensor:
    """A table of these arguments, copied to a device once: every step reads it, and a copy waits for a GPU."""
    return table(*of).to(device)


class Rotation:
    """A random orthogonal map of vectors `[..., head_dim]`, the same for the same seed."""

    def __init__(self, head_dim: int, seed: int):
        self.head_dim, self.seed = head_dim, seed
        self.width = head_dim & -head_dim
        blocks = head_dim // self.width
        # This generator's stream never changes.
        random = np.random.RandomState(seed)
        signs = random.choice([-1.0, 1.0], head_dim) / math.sqrt(self.width)
        mix, upper = np.linalg.qr(random.standard_normal((blocks, blocks)))
        self.signs = torch.tensor(signs, dtype=torch.float32)
        self.mix = torch.tensor(mix * np.sign(np.diag(upper)), dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        return self._mixed(self._hadamard(x * self._signs_on(x.device)), self.mix)

    def back(self, x: Tensor) -> Tensor:
        """Undo the rotation."""
        return self._hadamard(self._mixed(x, self.mix.T)) * self._signs_on(x.device)

    def _signs_on(self, device: torch.device) -> Tensor:
        return on_device(device, _signs, self.head_dim, self.seed)

    def _hadamard(self, x: Tensor) -> Tensor:
        step = 1
        while step < self.width:
            first, second = x.unflatten(-1, (-1, 2, step)).unbind(-2)
            x = torch.stack([first + second, first - second], -2).flatten(-3)
            step *= 2
        return x

    def _mixed(self, x: Tensor, by: Tensor) -> Tensor:
        if len(by) == 1:
            return x
        blocks = x.unflatten(-1, (len(by), self.width)).unbind(-2)
        weights = by.tolist()
        made = [reduce(torch.add, (w * block for w, block in zip(row, blocks, strict=True))) for row in weights]
        return torch.cat(made, -1)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def rotation(head_dim: int, seed: int) -> Rotation:
    return Rotation(head_dim, seed)


def _signs(head_dim: int, seed: int) -> Tensor:
    return rotation(head_dim, seed).signs


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def projection(head_dim: int, seed: int) -> Tensor:
    """A random orthogonal matrix, float32 `[head_dim, head_dim]`, the same for the same seed. Sums of its entries are
    exact in any order, since these are multiples of 2^-14.
    """
    made, upper = np.linalg.qr(np.random.RandomState(seed).standard_normal((head_dim, head_dim)))
    return torch.tensor((made * np.sign(np.diag(upper)) * 2**14).round() / 2**14, dtype=torch.float32)


def lengths(x: Tensor) -> Tensor:
    """Norms `[..., 1]` of vectors, summed in a fixed order."""
    squares = x * x
    while squares.shape[-1] % 2 == 0:
        first, second = squares.chunk(2, -1)
        squares = first + second
    return reduce(torch.add, squares.split(1, -1)).sqrt()


@lru_cache(maxsize=64)
def sign_length(head_dim: int) -> float:
    """How much of its projected signs stands for a unit vector without bias: 1 / (d E|u|), u a random one's coordinate.
    It is about sqrt(pi / 2d).
    """
    ratio = math.exp(math.lgamma((head_dim + 1) / 2) - math.lgamma(head_dim / 2))
    return math.sqrt(math.pi) * ratio / head_dim


class Turbo(Rounded):
    """Entries whose norms and rotated coordinates are stored.

    Args:
        entries: in the model's precision.
        bits: for each coordinate, the residual's sign among them.
        inner_product: whether one of the bits is the residual's sign.
        seed: of the rotation.
    """

    def __init__(self, entries: AsIs, bits: int, inner_product: bool, seed: int):
        self.bits, self.inner_product, self.seed = bits - inner_product, inner_product, seed
        super().__init__(entries)

    def rounded(self, name: str, x: Tensor) -> dict[str, Tensor]:
        x, size = x.float(), x.shape[-1]
        norms = lengths(x)
        turned = rotation(size, self.seed)(torch.where(norms > 0, x / norms, 0))
        levels = on_device(x.device, codebook, self.bits, size)
        codes = torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2, out_int32=True)
        found = {name: pack_codes(codes.to(torch.uint8), self.bits), f"{name} norm": _half(norms)}
        if self.inner_product:
            residual = turned - _looked_up(levels, codes)
            signs = residual @ on_device(x.device, projection, size, self.seed).T >= 0
            found[f"{name} sign"] = pack_codes(signs.to(torch.uint8), 1)
            found[f"{name} residual"] = _half(lengths(residual))
        return found

    def restored(self, name: str, get: Get, heads: slice | None = None) -> Tensor:
        turned = self.turned(name, get)
        return rotation(turned.shape[-1], self.seed).back(turned).to(self.dtype)

    def turned(self, name: str, get: Get) -> Tensor:
        """Keys or values as they are stored, before they are rotated back; float32."""
        codes = unpack_codes(get(name), self.bits)
        size = codes.shape[-1]
        found = _looked_up(on_device(codes.device, codebook, self.bits, size), codes)
        if self.inner_product:
            signs = unpack_codes(get(f"{name} sign"), 1).float() * 2 - 1
            step = get(f"{name} residual").float() * sign_length(size)
            found = found + signs @ on_device(codes.device, projection, size, self.seed) * step
        return found * get(f"{name} norm").float()


def _looked_up(levels: Tensor, codes: Tensor) -> Tensor:
    return levels.index_select(0, codes.flatten().int()).view(codes.shape)


def _half(x: Tensor) -> Tensor:
    return x.clamp_max(torch.finfo(torch.float16).max).half()
