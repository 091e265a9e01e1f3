"""What transformers' own eager attention sees, and RoPE by hand: the other side of the tests of capture."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch

from support import live_runs

CLOSE = dict(atol=1e-4, rtol=1e-4)


def sequence(length=21, seed=1):
    """Token ids `[length]` of the tiny vocabulary, none of them special."""
    return live_runs.prompt(length, seed)[0]


@dataclass
class Seen:
    """One plain forward pass over `ids` `[tokens]`, all layers."""

    weights: list = field(default_factory=list)  # [heads, tokens, tokens]
    hidden: list = field(default_factory=list)  # [tokens, hidden], what goes into each attention module
    mixed: list = field(default_factory=list)  # [tokens, heads * head_dim], what goes into each output projection
    logits: torch.Tensor = None  # [tokens, vocabulary]


def eager(lm, ids):
    model = copy.deepcopy(lm.model)
    model.set_attn_implementation("eager")
    seen = Seen()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _m, args, kwargs: seen.hidden.append((args[0] if args else kwargs["hidden_states"])[0]),
            with_kwargs=True,
        )
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _m, args: seen.mixed.append(args[0][0]))
    with torch.no_grad():
        out = model(ids[None], output_attentions=True, use_cache=False)
    seen.weights, seen.logits = [a[0] for a in out.attentions], out.logits[0]
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
    rows = rows[:, : heads * module.head_dim].view(len(hidden), heads, module.head_dim)
    return (module.q_norm(rows) if hasattr(module, "q_norm") else rows).transpose(0, 1)


def rope(x, positions, theta=1e4):
    """The rotation of `x` `[..., tokens, head_dim]`: dimension i turns with dimension i + head_dim / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half].double(), x[..., half:].double()
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention_by_hand(queries, keys, scaling):
    """`[heads, n, length]` float64; the queries are the last arrivals, and the heads of a group share a KV head."""
    keys = keys.double().repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    scores = scaling * torch.einsum("hnd,hld->hnl", queries.double(), keys)
    n, length = scores.shape[1:]
    future = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)
