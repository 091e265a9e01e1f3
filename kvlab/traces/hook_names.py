"""The tensors of a `Trace` by TransformerLens' names of hooks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlab.core import attention
from kvlab.errors import KvlabError, nearest, whole

NAME = re.compile(r"blocks\.(\d+)\.attn\.(\w+)")


def named(trace: Any, name: str, head: int | None = None, step: int | None = None) -> Tensor:
    """A tensor of one layer by TransformerLens' name of it; see `Trace.named`."""
    parts = NAME.fullmatch(name)
    if parts is None:
        raise KvlabError(f"{name!r} is no name of a hook of the attention, such as 'blocks.3.attn.hook_pattern'")
    if parts[2] not in HOOKS:
        raise KvlabError(nearest(parts[2], HOOKS, "hook of a trace"))
    found = HOOKS[parts[2]](trace, trace.layout.index(int(parts[1])))
    # By head comes first: [heads, tokens, head_dim], or [heads, queries, keys] of attention.
    if step is not None:
        if not 1 <= whole("step", step) <= trace.steps:
            raise KvlabError(f"step {step} is outside 1 .. {trace.steps}, the decoding steps of this trace")
        row = found.shape[1] - trace.steps + step - 1
        found = found[:, row : row + 1]
    if head is not None:
        if not 0 <= whole("head", head) < len(found):
            raise KvlabError(f"head {head} is outside 0 .. {len(found) - 1}, the heads of {parts[2]}")
        found = found[head : head + 1]
    found = found if parts[2] in BY_HEAD else found.transpose(0, 1)
    gone = (head is not None, step is not None) if parts[2] in BY_HEAD else (step is not None, head is not None)
    return found[tuple(0 if drop else slice(None) for drop in gone)]


def _queries(trace: Any, index: int) -> Tensor:
    if trace.pre_queries is None:
        raise KvlabError("this trace holds no queries before RoPE; those after it are 'hook_rot_q'")
    return trace.pre_queries[index]


def _keys(trace: Any, index: int) -> Tensor:
    rotation = None if trace.rotations is None else trace.rotations[index]
    if rotation is None:
        raise KvlabError(
            "this trace does not know how its layer turns keys, so it has none before RoPE; those after it are "
            "'hook_rot_k'"
        )
    return rotation.turned_back(trace.keys[index], torch.arange(trace.length, device=trace.device))


def _visible(trace: Any) -> Tensor:
    return attention.last_visible(trace.queries.shape[2], trace.length, trace.device)


def _scores(trace: Any, index: int) -> Tensor:
    scores = attention.logits(trace.queries[index], trace.keys[index], trace.softmax.row(index))
    return scores.masked_fill(~_visible(trace), -torch.inf)


def _pattern(trace: Any, index: int) -> Tensor:
    return attention.weights(trace.queries[index], trace.keys[index], trace.softmax.row(index), _visible(trace))


HOOKS: dict[str, Callable[[Any, int], Tensor]] = {
    "hook_q": _queries,
    "hook_k": _keys,
    "hook_v": lambda trace, index: trace.values[index],
    "hook_rot_q": lambda trace, index: trace.queries[index],
    "hook_rot_k": lambda trace, index: trace.keys[index],
    "hook_attn_scores": _scores,
    "hook_pattern": _pattern,
    "hook_z": lambda trace, index: attention.output(_pattern(trace, index), trace.values[index]),
}
"""How each is made, `[heads, tokens, ...]`, of the layer at an index among the recorded ones."""

BY_HEAD = ("hook_attn_scores", "hook_pattern")
"""Those that TransformerLens has with the heads before the tokens."""
