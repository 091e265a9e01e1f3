"""Effects the slow way: a model with one gate for each entry, whose gradient torch takes by itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import kvlab
from kvlab.core import hooks


def sharpened(
    lm: kvlab.LM, attention: float = 6.0, logits: float = 3.0, dtype: torch.dtype = torch.float64
) -> kvlab.LM:
    """A copy of a random model whose attention and predictions are far from uniform, so that it matters what
    is evicted.
    """
    model = cast(Any, copy.deepcopy(lm.model)).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "qkv_proj.weight", "q_b_proj.weight")):
                weight.mul_(attention)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(3)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach() * logits)
    return kvlab.LM(model, lm.tokenizer, f"{lm.name}-sharpened", "2" * 64)


def integral(loss_at: Callable[[Tensor], Tensor], shape: torch.Size, points: int) -> Tensor:
    """Minus the integral of dL/dg from all gates closed to all open, by Gauss and Legendre; gradients are torch's."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    total = torch.zeros(shape, dtype=torch.float64)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        gate = torch.full(shape, node, dtype=torch.float64, requires_grad=True)
        total -= weight * torch.autograd.grad(loss_at(gate), gate)[0]
    return total


def softmax_over(logits: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights `[heads, steps, entries]` over what is seen, less the sinks' share."""
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.to(logits)[:, None, None].expand(*logits.shape[:2], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def loss(lm: kvlab.LM, prompt: Tensor, response: Tensor, read: list[Tensor], gates: Tensor) -> Tensor:
    """The negative log-likelihood of the response, by one pass over prompt and response together: prompt tokens attend
    to everything before them, and the response by o + sum g a (v - o).

    Args:
        read: of each layer, bool `[heads, steps, prompt + steps]`.
        gates: `[layers, kv_heads, prompt + steps]`, or broadcast to it.
    """
    ids = torch.cat([prompt, response])[:-1]
    steps, length = len(response) - 1, len(ids)

    def attend(call: hooks.Call) -> Tensor:
        heads, kv_heads = call.queries.shape[1], call.keys.shape[1]
        keys, values = (x[0].double().repeat_interleave(heads // kv_heads, 0) for x in (call.keys, call.values))
        logits = call.queries[0].double() @ keys.transpose(-1, -2) * call.scaling
        if call.softcap is not None:
            logits = (logits / call.softcap).tanh() * call.softcap
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        weights = softmax_over(logits, causal.expand_as(logits), call.sinks)
        full = weights @ values
        seen = causal[-steps:] & read[call.index]
        o = softmax_over(logits[:, -steps:], seen, call.sinks) @ values
        lost = weights[:, -steps:] * (causal[-steps:] & ~read[call.index])
        gate = gates[call.index].repeat_interleave(heads // kv_heads, 0)[:, None]
        back = torch.einsum("hte,hted->htd", gate * lost, values[:, None] - o[:, :, None])
        return torch.cat([full[:, :-steps], o + back], 1)[None].to(call.queries.dtype)

    with hooks.hooked(lm.model, attend, pre_rope=False):
        logits = lm.model(ids[None]).logits[0]
    known = logits[len(prompt) - 1 :].double().log_softmax(-1)
    return -known.gather(-1, response[:, None]).sum()
