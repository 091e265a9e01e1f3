"""Hybrid models whose sinks take a real share: as made, the tiny ones' are next to nothing."""

from __future__ import annotations

import copy
import functools

import torch

from kvlab.inputs import models


@functools.cache
def with_sinks(tiny) -> models.LM:
    """The tiny gpt-oss with sinks between 4 and 9, which take about a third of the attention."""
    lm = tiny("hybrid-gpt-oss")
    model = copy.deepcopy(lm.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(4 + 5 * torch.rand(4, generator=generator))
    return models.LM(model, None, "hybrid-gpt-oss-with-sinks", "1" * 64)


def hybrid(tiny, family: str) -> models.LM:
    """A model of the hybrid families, with sinks worth the name."""
    return with_sinks(tiny) if family == "hybrid-gpt-oss" else tiny(family)
