"""Effects of rounded entries the slow way: three gates for each entry, whose gradients torch takes by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kvlab
from kvlab.core import hooks
from support.oracles.gates import softmax_over


@dataclass
class Off:
    """How far each entry is off, where a query reads it: rounded less exact, of each layer
    `[heads, steps, prompt + steps, head_dim]`, zeros where it is exact.
    """

    keys: list[Tensor]
    values: list[Tensor]


def parts(
    queries: Tensor, keys: Tensor, values: Tensor, off_keys: Tensor, off_values: Tensor, seen: Tensor, read: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The policy's output `[heads, steps, head_dim]`, and what each entry adds on the way to the full cache's,
    `[heads, steps, entries, head_dim]`: not evicted, its key exact, its value exact. Queries are scaled.
    """
    logits = torch.einsum("htd,hed->hte", queries, keys)
    stored = logits + torch.einsum("htd,hted->hte", queries, off_keys)
    full = softmax_over(logits, seen, None)
    exact, rounded = softmax_over(logits, seen & read, None), softmax_over(stored, seen & read, None)
    rounded_values = values[:, None] + off_values
    output = torch.einsum("hte,hted->htd", rounded, rounded_values)
    between = torch.einsum("hte,hted->htd", exact, rounded_values)
    of_exact = exact @ values
    evicted = (full * (seen & ~read))[..., None] * (values[:, None] - of_exact[:, :, None])
    raised, raised_stored = (each.masked_fill(~(seen & read), -torch.inf).exp() for each in (logits, stored))
    both = (raised.sum(-1, keepdim=True) + raised_stored.sum(-1, keepdim=True)) / 2
    centre = ((output + between) / 2)[:, :, None]
    of_keys = ((raised - raised_stored) / both)[..., None] * (rounded_values - centre)
    of_values = -exact[..., None] * off_values
    return output, evicted, of_keys, of_values


def loss(
    lm: kvlab.LM, prompt: Tensor, response: Tensor, read: list[Tensor], off: Off, gates: Tensor | None = None
) -> Tensor:
    """The negative log-likelihood of the response under a policy that reads rounded entries, part of the way to the
    full cache.

    Args:
        read: of each layer, bool `[heads, steps, prompt + steps]`.
        gates: `[3, layers, kv_heads, prompt + steps]` of evicted entries, keys and values; 0 for None.
    """
    ids = torch.cat([prompt, response])[:-1]
    steps, length = len(response) - 1, len(ids)

    def attend(call: hooks.Call) -> Tensor:
        heads, kv_heads = call.queries.shape[1], call.keys.shape[1]
        keys, values = (x[0].double().repeat_interleave(heads // kv_heads, 0) for x in (call.keys, call.values))
        queries = call.queries[0].double() * call.scaling
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        full = softmax_over(queries @ keys.transpose(-1, -2), causal, None) @ values
        index = call.index
        out, *more = parts(
            queries[:, -steps:], keys, values, off.keys[index], off.values[index], causal[-steps:], read[index]
        )
        if gates is not None:
            for gate, part in zip(gates[:, index].repeat_interleave(heads // kv_heads, 1), more, strict=True):
                out = out + torch.einsum("he,hted->htd", gate, part)
        return torch.cat([full[:, :-steps], out], 1)[None].to(call.queries.dtype)

    with hooks.hooked(lm.model, attend, pre_rope=False):
        logits = lm.model(ids[None]).logits[0]
    known = logits[len(prompt) - 1 :].double().log_softmax(-1)
    return -known.gather(-1, response[:, None]).sum()
