"""The one place where attention is computed, and the seam through which it is seen inside a transformers model.

Shapes: queries `[..., heads, n, head_dim]`, keys and values `[..., kv_heads, length, head_dim]`; query head `h` reads
the KV head `h // (heads // kv_heads)` (its GQA group). Who may see what is decided by order of arrival, never by
lengths or by the assigned positions: a pseudo-query may stand at any position and still sees the whole prompt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.errors import KvlabError
from kvlab.hookable import PROJECTIONS, layers_of

NAME = "kvlab"
CHUNK = 256


def by_group(x: Tensor, kv_heads: int) -> Tensor:
    """`[..., heads, n, m]` seen as `[..., kv_heads, group * n, m]`: the rows that share one KV head, stacked."""
    *batch, heads, n, m = x.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    return x.reshape(*batch, kv_heads, heads // kv_heads * n, m)


def exact(x: Tensor) -> Tensor:
    """In float32, or in float64 where it came so: half precision is for storing, not for softmaxes."""
    return x if x.dtype == torch.float64 else x.float()


def logits(queries: Tensor, keys: Tensor, scaling: float | None = None) -> Tensor:
    """Scaled dot products in float32 (float64 stays), `[..., heads, n, length]`; `scaling` is 1 / sqrt(head_dim)
    unless given.
    """
    *batch, heads, n, head_dim = queries.shape
    scaling = 1 / math.sqrt(head_dim) if scaling is None else scaling
    rows = by_group(exact(queries), keys.shape[-3]) * scaling
    return (rows @ exact(keys).transpose(-1, -2)).view(*batch, heads, n, keys.shape[-2])


def weights(
    queries: Tensor,
    keys: Tensor,
    scaling: float | None = None,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention weights, softmax over the keys in float32 (float64 stays).

    Args:
        queries: `[..., heads, n, head_dim]`.
        keys: `[..., kv_heads, length, head_dim]`.
        scaling: 1 / sqrt(head_dim) unless given.
        visible: bool, broadcastable to `[..., heads, n, length]`; False is masked out.
        bias: added to the logits before the softmax, broadcastable alike (ZSMerge eq. 8).

    Returns:
        `[..., heads, n, length]`, float32, rows sum to 1.
    """
    scores = logits(queries, keys, scaling)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1)


def output(attention: Tensor, values: Tensor) -> Tensor:
    """Weighted sum of values: `[..., heads, n, length]`, `[..., kv_heads, length, head_dim]` -> `[..., heads, n,
    head_dim]`.
    """
    *batch, heads, n, _ = attention.shape
    return (by_group(attention, values.shape[-3]) @ exact(values)).view(*batch, heads, n, values.shape[-1])


def to_query_heads(x: Tensor, heads: int) -> Tensor:
    """One row for each query head from one for each KV head: `[..., kv_heads, m]` -> `[..., heads, m]`."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def sum_over_group(x: Tensor, kv_heads: int) -> Tensor:
    """`[..., heads, m]` -> `[..., kv_heads, m]`, summed over the query heads of each GQA group."""
    *batch, heads, m = x.shape
    return x.view(*batch, kv_heads, heads // kv_heads, m).sum(-2)


def last_visible(n: int, length: int, device: torch.device | None = None) -> Tensor:
    """`[n, length]` bool: what the last `n` of `length` arrivals may see (themselves and everything before)."""
    arrival = torch.arange(length, device=device)
    return arrival[None] <= arrival[length - n :, None]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The output alone, by PyTorch's fused kernel; the queries are the last arrivals among the keys.

    Args:
        padding: `[batch, length]` bool, False for padding; None when there is none.
        mask: `[n, length]` bool, who sees whom, where that is not simply everything that arrived before.

    Returns:
        `[batch, heads, n, head_dim]` in the dtype of the queries.
    """
    n, length = queries.shape[-2], keys.shape[-2]
    plain_causal = padding is None and mask is None and n == length and n > 1
    if mask is None and not plain_causal and (n > 1 or padding is not None):
        mask = last_visible(n, length, queries.device)
    if padding is not None:
        # A padding query sees nothing, and a softmax over nothing is NaN: let it see itself.
        itself = (
            torch.arange(length, device=mask.device) == torch.arange(length - n, length, device=mask.device)[:, None]
        )
        mask = (mask & padding[:, None, None, :]) | itself
    group = queries.shape[-3] // keys.shape[-3]
    if n == 1 and mask is None and group > 1:
        # One token: the group's heads become the rows of one product, which saves repeating the keys.
        out = F.scaled_dot_product_attention(by_group(queries, keys.shape[-3]), keys, values, scale=scaling)
        return out.reshape(queries.shape)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=plain_causal, scale=scaling, enable_gqa=group > 1
    )


def accumulate(
    queries: Tensor,
    keys: Tensor,
    scaling: float | None = None,
    chunk: int = CHUNK,
    padding: Tensor | None = None,
) -> Tensor:
    """Attention that each key gathers from all queries, `[..., heads, length]`, without a length x length matrix.

    The queries are the last arrivals among the keys. H2O's accumulated score (its eq. 3) over the whole prompt.

    Args:
        padding: `[batch, length]` bool, False for padding, which neither gives nor gathers; None when there is none.
    """
    n, length, kv_heads = queries.shape[-2], keys.shape[-2], keys.shape[-3]
    total = torch.zeros(*queries.shape[:-2], length, dtype=torch.float32, device=queries.device)
    # One KV head at a time, so that a chunk's scores stay in a processor's cache from one pass over them to the next.
    heads = zip(*(x.chunk(kv_heads, -3) for x in (queries, keys)), total.chunk(kv_heads, -2), strict=True)
    for (own, shared, found), start in itertools.product(heads, range(0, n, chunk)):
        stop = min(start + chunk, n)
        seen = length - n + stop
        scores = logits(own[..., start:stop, :], shared[..., :seen, :], scaling)
        # Only the newest keys are hidden from some of these queries: masking them in place spares a pass over all.
        hidden = ~last_visible(stop - start, stop - start, queries.device)
        scores[..., seen - (stop - start) :].masked_fill_(hidden, -torch.inf)
        if padding is None:
            found[..., :seen] += scores.softmax(-1).sum(-2)
            continue
        scores.masked_fill_(~padding[:, None, None, :seen], -torch.inf)
        asking = padding[:, None, length - n + start : length - n + stop, None]
        found[..., :seen] += scores.softmax(-1).masked_fill_(~asking, 0).sum(-2)
    return total


# ---------------------------------------------------------------------------------------------------- the seam


@dataclass
class Call:
    """One layer's attention in one forward pass, as the model asks for it."""

    layer: int
    queries: Tensor  # [batch, heads, n, head_dim], post-RoPE
    pre_rope: Tensor | None  # the same queries before RoPE, after q-norm
    keys: Tensor  # [batch, kv_heads, length, head_dim], the cache included
    values: Tensor
    scaling: float
    padding: Tensor | None  # [batch, length] bool, False for padding; None without
    positions: Tensor | None  # [batch, n]

    def attend(self, mask: Tensor | None = None) -> Tensor:
        return attend(self.queries, self.keys, self.values, self.scaling, self.padding, mask)


Handler = Callable[[Call], Tensor]


@dataclass
class _Hooked:
    layer: int
    handler: Handler
    projected: list[Tensor] = field(default_factory=list)


# Only modules inside an open `hooked` block are in here; a module, unlike a thread or a context, is what the
# attention function is given, so generation in another thread finds its handler too.
_hooked: WeakKeyDictionary[nn.Module, _Hooked] = WeakKeyDictionary()


def _attention(module, query, key, value, attention_mask, scaling=None, position_ids=None, **_):
    entry = _hooked.get(module)
    if entry is None:
        raise RuntimeError("the 'kvlab' attention only runs inside kvlab's own context managers")
    pre = _as_heads(entry.projected.pop(), query) if entry.projected else None
    scaling = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    call = Call(entry.layer, query, pre, key, value, scaling, attention_mask, position_ids)
    return entry.handler(call).transpose(1, 2).contiguous(), None


def _padding(attention_mask: Tensor | None = None, **_) -> Tensor | None:
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


def _as_heads(projected: Tensor, queries: Tensor) -> Tensor:
    """What a projection or a q-norm put out, in the layout `[batch, heads, n, head_dim]` of the queries."""
    batch, heads, n, head_dim = queries.shape
    if projected.dim() == 3:
        return projected[..., : heads * head_dim].reshape(batch, n, heads, head_dim).transpose(1, 2)
    tokens_first = projected.shape[1:3] == (n, heads)
    heads_first = projected.shape[1:3] == (heads, n)
    if tokens_first and heads_first:
        # As many heads as tokens: a rotation keeps norms, so the layout whose norms agree is the right one.
        norms = queries.float().norm(dim=-1)
        off = [(x.float().norm(dim=-1) - norms).abs().sum() for x in (projected.transpose(1, 2), projected)]
        tokens_first = bool(off[0] <= off[1])
    return projected.transpose(1, 2) if tokens_first else projected


def _windows(model: nn.Module) -> list[int | None]:
    """How far back each layer sees; None where it sees everything."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    windows = []
    for kind, module in zip(kinds, layers_of(model), strict=True):
        window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
        if kind == "full_attention" or (kind is None and getattr(config, "use_sliding_window", True) is False):
            window = None
        elif kind == "chunked_attention":
            window = getattr(config, "attention_chunk_size", None)
        windows.append(window)
    return windows


def shortest_window(model: nn.Module) -> int | None:
    """The longest sequence that every layer sees as a whole; None if there is no bound."""
    return min((window for window in _windows(model) if window is not None), default=None)


def check_length(model: nn.Module, length: int) -> None:
    """Refuse a sequence that some layer would not see as a whole (a shorter sliding window or attention chunk)."""
    for layer, window in enumerate(_windows(model)):
        if window is not None and window < length:
            raise KvlabError(
                f"layer {layer} of {type(model).__name__} sees a window of {window} tokens, and the sequence has "
                f"{length}; use at most {window} tokens"
            )


@contextmanager
def hooked(model: nn.Module, handler: Handler, pre_rope: bool = True) -> Iterator[None]:
    """While the block runs, every attention layer of `model` hands its `Call` to `handler` and uses what that returns.

    The model leaves the block as it came, also after an exception.

    Args:
        pre_rope: whether calls hold the queries before RoPE too, which costs a forward hook in each layer.
    """
    modules = layers_of(model)
    busy = [m for m in modules if m in _hooked]
    if busy:
        raise KvlabError("this model is already inside a kvlab session; leave that one first")
    configs = {
        id(m.config): m.config
        for m in model.modules()
        if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    handles = []
    try:
        for layer, module in enumerate(modules):
            entry = _hooked[module] = _Hooked(layer, handler)
            if not pre_rope:
                continue
            source = next(
                getattr(module, n) for n in ("q_norm", *PROJECTIONS) if isinstance(getattr(module, n, None), nn.Module)
            )
            handles.append(source.register_forward_hook(lambda _m, _i, out, entry=entry: entry.projected.append(out)))
        for config in configs.values():
            config._attn_implementation_internal = NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for handle in handles:
            handle.remove()
        for module in modules:
            _hooked.pop(module, None)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _padding)


_register()
