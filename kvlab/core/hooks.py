"""The seam into transformers: every attention layer of a model hands its queries, keys and values over."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvlab.core.attention import accumulate, attend, attend_and_accumulate, last_visible
from kvlab.core.hookable import (
    EXPAND,
    NORMS,
    PROJECTIONS,
    expansion_of,
    is_latent,
    layers_of,
    text_config,
    windows_of,
)
from kvlab.core.latent import Expansion, joined
from kvlab.core.rotation import CHECKED, Rotation, agreeing, candidates
from kvlab.core.softmax import Softmax
from kvlab.errors import KvlabError
from kvlab.lib.devices import outside_autocast

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "kvlab"
MASKS = AttentionMaskInterface()


# ---------------------------------------------------------------------------------------------------- the seam


@dataclass
class Call:
    """One compressed layer's attention in one forward pass, as the model asks for it."""

    layer: int  # its number in the model
    index: int  # where it stands among the compressed layers
    queries: Tensor  # [batch, heads, n, head_dim], post-RoPE
    pre_rope: Tensor | None  # the same queries before RoPE, after q-norm
    keys: Tensor  # [batch, kv_heads, length, head_dim], the cache included
    values: Tensor
    scaling: float
    padding: Tensor | None  # [batch, length] bool, False for padding; None without
    positions: Tensor | None  # [batch, n]
    softcap: float | None = None  # what the logits level off at
    sinks: Tensor | None = None  # [heads], learnt logits of no key
    hidden: Tensor | None = None  # [batch, n, width], what the layer's projections were given
    chosen: Tensor | None = None  # [1, n, k], positions that a sparse indexer of the model has chosen for each query

    def rotation(self, choices: Sequence[Rotation]) -> Rotation | None:
        """Which of these the layer has turned its queries by; None where it is none of them. The call holds the queries
        before RoPE.
        """
        assert self.pre_rope is not None, "queries before RoPE are asked for"
        n, length = min(self.queries.shape[2], CHECKED), self.keys.shape[2]
        positions = self.positions
        if positions is None:
            positions = torch.arange(length - n, length, device=self.queries.device)[None]
        elif positions.dim() == 3:
            # Models that see images have three positions for each token, which are the same in a text.
            positions = positions[0]
        before, after = (x[:, :, x.shape[2] - n :] for x in (self.pre_rope, self.queries))
        return agreeing(choices, before, after, positions[:, -n:])

    @property
    def softmax(self) -> Softmax:
        """The layer's softmax over its products."""
        return Softmax(self.scaling, self.softcap, self.sinks)

    def attend(self, mask: Tensor | None = None) -> Tensor:
        if self.chosen is not None:
            mask = self._visible() if mask is None else mask & self._visible()
        return attend(self.queries, self.keys, self.values, self.softmax, self.padding, mask)

    def _visible(self) -> Tensor:
        """Which tokens the model lets each query attend to, bool `[n, length]`."""
        assert self.chosen is not None, "an indexer has chosen"
        n, length = self.queries.shape[2], self.keys.shape[2]
        picked = torch.zeros(n, length, dtype=torch.bool, device=self.keys.device)
        # Where fewer tokens came before than it picks, it picks later ones too.
        return picked.scatter_(1, self.chosen[0].long(), True) & last_visible(n, length, self.keys.device)

    def attend_and_accumulate(self) -> tuple[Tensor, Tensor]:
        """The output, and the attention that each key gathers from all queries; from those too that do not attend to
        it by an indexer's choice.
        """
        if self.chosen is not None:
            return self.attend(), accumulate(self.queries, self.keys, self.softmax, padding=self.padding)
        return attend_and_accumulate(self.queries, self.keys, self.values, self.softmax, self.padding)


Handler = Callable[[Call], Tensor]


class Rotations:
    """How the layers of a model turn queries and keys, found call by call while a prompt is fed."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._choices: list[Rotation] = []

    def of(self, call: Call) -> Rotation | None:
        """That of the call's layer, as `Call.rotation` gives it; the layers of a pass come one after the other."""
        if call.index == 0:
            # The tables may have been made anew for the length of this very prompt.
            self._choices = list(candidates(self._model))
        return call.rotation(self._choices)


@dataclass
class _Hooked:
    layer: int
    index: int
    handler: Handler
    expansion: Expansion | None  # of latent attention
    projected: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)


# Only modules inside an open `hooked` block are in here. The attention function receives its module, but no thread and
# no context. So generation in another thread finds its handler too.
_hooked: WeakKeyDictionary[nn.Module, _Hooked] = WeakKeyDictionary()


# The attention implementation of layers that are not compressed: their masks are made for it. The key is the id of the
# configuration that replaces the model's own while it is hooked.
_own_attention: dict[int, str | None] = {}


def _attention(module, query, key, value, attention_mask, scaling=None, position_ids=None, **more):
    entry = _hooked.get(module)
    if entry is None:
        raise KvlabError(
            f"this {type(module).__name__} is not hooked (a copy of the model, by DataParallel?); call the model "
            "itself, inside kvlab's context manager"
        )
    pre = _as_heads(entry.projected.pop(), query) if entry.projected else None
    scaling = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    expansion = entry.expansion
    if expansion is not None:
        # The module's own expansion stands aside, so that these are latents and rotary parts.
        key, value = joined(key, value)
        pre = None if pre is None else expansion.before(pre, query)
        query = expansion.queries(query)
    sinks = more.get("s_aux")
    sinks = None if sinks is None else sinks.detach()
    softcap, chosen = more.get("softcap"), more.get("indices")
    # Masks of a model with an indexer are for that alone.
    padding = attention_mask if chosen is None else None
    hidden = entry.inputs.pop() if entry.inputs else None
    device = query.device.type
    # Under autocast the model's own attention takes one type; kvlab stores that, and computes outside of autocast.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    pre = None if pre is None else pre.to(dtype)
    kept = query, pre, key, value, scaling, padding, position_ids, softcap, sinks, hidden
    call = Call(entry.layer, entry.index, *kept, chosen)
    with outside_autocast(query.device):
        out = entry.handler(call).to(dtype)
        out = out if expansion is None else expansion.outputs(out)
        return out.transpose(1, 2).contiguous(), None


def _unexpanded(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors that a latent module passes to the attention interface instead of its heads' keys and values."""
    return latents, rotary


def _mask(attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
    """Make the mask that transformers asks for.

    For compressed layers it is `[batch, length]`, 0 for padding, or None where nothing is padded. Layers left alone
    have masks with a window or a chunk: they get the form of their own attention. In a model with a sparse indexer, the
    mask has the form that the indexer takes.
    """
    if getattr(more.get("config"), "index_topk", None):
        return MASKS["sdpa"](attention_mask=attention_mask, **more)
    own = _own_attention.get(id(more.get("config")))
    if own is not None and more.get("local_size") is not None:
        return MASKS[own](attention_mask=attention_mask, **more)
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


def _as_heads(projected: Tensor, queries: Tensor) -> Tensor:
    """The output of a projection or a q-norm, in the layout `[batch, heads, n, head_dim]` of the queries."""
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


def shortest_window(model: nn.Module) -> int | None:
    """The longest sequence that every compressed layer sees as a whole; None if there is no bound."""
    return min(windows_of(model).values(), default=None)


def check_length(model: nn.Module, length: int) -> None:
    """Refuse a sequence that a compressed layer would not see as a whole.

    Such a layer has a shorter sliding window or attention chunk. This happens only in models without any layer that
    attends to the whole past.
    """
    for layer, window in windows_of(model).items():
        if window < length:
            raise KvlabError(
                f"every layer of {type(model).__name__} has a sliding window, layer {layer} of {window} tokens; "
                f"use at most {window} tokens, not {length}"
            )


@contextmanager
def hooked(model: nn.Module, handler: Handler, pre_rope: bool = True, hidden: bool = False) -> Iterator[None]:
    """Have every compressed layer of `model` hand its `Call` to `handler` while the block runs, and use the result.

    The other layers go on as they were. The model leaves the block as it came, also after an exception.

    Args:
        pre_rope: whether calls hold the queries before RoPE too, which costs a forward hook in each layer.
        hidden: whether calls hold the inputs of the layers' projections, which costs another hook in each layer.
    """
    modules = layers_of(model)
    busy = [m for m in modules if m in _hooked]
    if busy:
        raise KvlabError("this model is already inside a kvlab session; leave that one first")
    others, memo, handles = _left_over(model, modules), {}, []
    # Another model may have been made from the same configuration object, so that this one gets a copy.
    configs = {m: config for m in model.modules() if m not in others and (config := _config(m)) is not None}
    made = {id(config): copy.deepcopy(config, memo) for config in [*configs.values(), text_config(model)]}
    settings = {key: dict(vars(config)) for key, config in made.items()}
    try:
        for index, module in enumerate(modules):
            expansion = expansion_of(module) if is_latent(module) else None
            entry = _hooked[module] = _Hooked(_number(module), index, handler, expansion)
            if expansion is not None:
                vars(module)[EXPAND] = _unexpanded
            if hidden:
                names = PROJECTIONS if expansion is None else ("kv_a_proj_with_mqa",)
                first = next(getattr(module, n) for n in names if isinstance(getattr(module, n, None), nn.Module))
                handles.append(first.register_forward_hook(lambda _m, x, _o, entry=entry: entry.inputs.append(x[0])))
            if not pre_rope:
                continue
            names = (*NORMS, *PROJECTIONS)
            source = next(getattr(module, n) for n in names if isinstance(getattr(module, n, None), nn.Module))
            handles.append(source.register_forward_hook(lambda _m, _i, out, entry=entry: entry.projected.append(out)))
        for config in made.values():
            if others:
                _own_attention[id(config)] = config._attn_implementation
            config._attn_implementation_internal = NAME
        for module, config in configs.items():
            vars(module)["config"] = made[id(config)]
        with _uncompiled():
            yield
    finally:
        for module, config in configs.items():
            vars(module)["config"] = config
            _copy_changes(made[id(config)], settings[id(config)], config)
        for config in made.values():
            _own_attention.pop(id(config), None)
        for handle in handles:
            handle.remove()
        for module in modules:
            vars(module).pop(EXPAND, None)
            _hooked.pop(module, None)


# Sessions that are open, and how torch compiled before the first of them.
_open: list[Any] = []


@contextmanager
def _uncompiled() -> Iterator[None]:
    """While the block runs, what torch has compiled runs uncompiled, since compiled passes skip hooks."""
    if not _open:
        stance = torch.compiler.set_stance("force_eager")
        _open.append(stance)
    _open.append(None)
    try:
        yield
    finally:
        _open.pop()
        if len(_open) == 1:
            _open.pop().__exit__(None, None, None)


def _config(module: nn.Module) -> PretrainedConfig | None:
    """The configuration in which a module looks for its attention implementation."""
    config = vars(module).get("config")
    return config if hasattr(config, "_attn_implementation") else None


def _copy_changes(made: PretrainedConfig, settings: dict[str, Any], config: PretrainedConfig) -> None:
    """Give `config` what was set in its copy `made` since that had `settings`."""
    for name, value in vars(made).items():
        if not name.startswith("_attn_implementation") and settings.get(name, settings) is not value:
            setattr(config, name, value)


def _left_over(model: nn.Module, modules: list[nn.Module]) -> dict[nn.Module, PretrainedConfig]:
    """The modules of layers that are not compressed, with the configuration of each."""
    numbers = {_number(module) for module in modules}
    of_layers = (m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int))
    return {m: config for m in of_layers if _number(m) not in numbers and (config := _config(m)) is not None}


def _number(module: nn.Module) -> int:
    return int(vars(module)["layer_idx"])


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
