"""Surrogates of tests: random ones, which stand in for what comes with kvlab where a model is tiny."""

from __future__ import annotations

import functools

import torch

from kvlab.methods._base import surrogates
from kvlab.methods._base.surrogates import About, Surrogate

WIDEST = 128
"""Hidden states of tiny models are at most so wide."""

shipped_for = surrogates.shipped_for


@functools.cache
def random_surrogate(shape: tuple[int, int, int], model: str = "") -> Surrogate:
    """A surrogate of this shape with random weights, the same at every call."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[:2], generator=generator)
    about = About(model=model, tokens=8, ridge=1.0, kvlab="0.1.0")
    return Surrogate((weight / shape[2] ** 0.5).half(), bias, about, f"random {shape}")


def shipped_or_random(model: str, shape: tuple[int, int, int]) -> Surrogate | None:
    """What comes with kvlab for a model, or a random surrogate for a tiny one."""
    return random_surrogate(shape) if shape[2] <= WIDEST else shipped_for(model, shape)
