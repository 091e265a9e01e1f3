"""What transformers' own eager attention sees, and RoPE by hand: the other side of the tests of capture."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch

from kvlab.core import hookable


@dataclass
class Seen:
    """One plain forward pass over `ids` `[tokens]`, by compressed layer."""

    weights: list = field(default_factory=list)  # [heads, tokens, tokens]
    hidden: list = field(default_factory=list)  # [tokens, hidden], what goes into each attention module
    mixed: list = field(default_factory=list)  # [tokens, heads * head_dim], what goes into each output projection
    logits: torch.Tensor = None  # [tokens, vocabulary]


def eager(lm, ids):
    model = copy.deepcopy(lm.model)
    model.set_attn_implementation("eager")
    seen = Seen()
    for module in hookable.layers_of(model):
        module.register_forward_pre_hook(
            lambda _m, args, kwargs: seen.hidden.append((args[0] if args else kwargs["hidden_states"])[0]),
            with_kwargs=True,
        )
        module.register_forward_hook(lambda _m, _args, output: seen.weights.append(output[1][0]))
        projection = module.o_proj if hasattr(module, "o_proj") else module.out_proj
        projection.register_forward_pre_hook(lambda _m, args: seen.mixed.append(args[0][0]))
    with torch.no_grad():
        seen.logits = model(ids[None], use_cache=False).logits[0]
    return seen


def greedy(lm, ids, n):
    """The next `n` tokens by the plainest loop there is: the whole sequence again for each."""
    for _ in range(n):
        with torch.no_grad():
            ids = torch.cat([ids, lm.model(ids[None], use_cache=False).logits[0, -1].argmax()[None]])
    return ids[-n:] if n else ids[:0]


def queries_before_rope(module, hidden, heads):
    """`[heads, tokens, head_dim]` by hand: project, split into heads, norm where there is one."""
    rows = module.q_proj(hidden) if hasattr(module, "q_proj") else module.qkv_proj(hidden)
    norm = getattr(module, "q_norm", getattr(module, "q_layernorm", torch.nn.Identity()))
    if getattr(norm, "weight", torch.ones(0)).numel() == heads * module.head_dim:  # OLMo 2: one norm for all heads
        return norm(rows).view(len(hidden), heads, module.head_dim).transpose(0, 1)
    if hasattr(module, "q_proj") and rows.shape[-1] == 2 * heads * module.head_dim:
        # Qwen3-Next: each head's query is followed by its gate.
        rows = rows.view(len(hidden), heads, 2, module.head_dim)[:, :, 0]
    return norm(rows[..., : heads * module.head_dim].reshape(len(hidden), heads, module.head_dim)).transpose(0, 1)


def rope(x, positions, theta=1e4):
    """The rotation of `x` `[..., tokens, head_dim]`: dimension i turns with dimension i + head_dim / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half].double(), x[..., half:].double()
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention_by_hand(queries, keys, scaling, softcap=None, sinks=None):
    """`[heads, n, length]` float64; the queries are the last arrivals, and the heads of a group share a KV head.

    Logits level off at `softcap`; `sinks` `[heads]` are one more logit for each head, whose weight is left out.
    """
    keys = keys.double().repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    scores = scaling * torch.einsum("hnd,hld->hnl", queries.double(), keys)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    n, length = scores.shape[1:]
    future = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
    scores = scores.masked_fill(future, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
    return scores.softmax(-1)[..., :length]
