"""The seam into transformers: every attention layer of a model hands its queries, keys and values over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from kvlab.core.attention import attend
from kvlab.core.hookable import PROJECTIONS, layers_of, text_config
from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "kvlab"


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
    config = text_config(model)
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
    configs: dict[int, PretrainedConfig] = {
        id(config): config
        for config in (getattr(module, "config", None) for module in model.modules())
        if config is not None and hasattr(config, "_attn_implementation")
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
