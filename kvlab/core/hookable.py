"""Which layers of a model kvlab can look into: found by what they are made of, and refused in the user's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from kvlab.core.geometry import geometry
from kvlab.core.latent import Expansion
from kvlab.core.layout import WHOLE, Layout
from kvlab.core.quantised import FLOATS, is_plain
from kvlab.core.softmax import Softmax
from kvlab.errors import KvlabError
from kvlab.lib.devices import outside_autocast

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The last is of latent attention, whose queries may come of two projections.
PROJECTIONS = ("q_proj", "qkv_proj", "q_b_proj")
LATENT, EXPAND = "kv_b_proj", "expand_kv"
INDEXED = "DynamicIndexedLayer"
NORMS = ("q_norm", "q_layernorm")
# How far rounding may take a projection from a linear map.
LINEAR = 0.02
OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
KNOWN = (
    "kvlab hooks attention through transformers' attention interface with a q_proj or qkv_proj (as in Llama, Mistral, "
    "Qwen, Phi-3, Gemma), and latent attention (as in DeepSeek-V3)"
)


def text_config(model: nn.Module) -> PretrainedConfig:
    """The configuration of a transformers model's decoder, also where the model is more than that."""
    # To a type checker, whatever a module holds is a tensor or a module.
    return cast(Any, model).config.get_text_config(decoder=True)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules that a policy compresses, by layer; `layer_idx` is a layer's number in the model.

    These are the layers that attend to the whole past. In a model whose layers all see a window, they are all layers.

    Raises:
        KvlabError: such a layer cannot be hooked, or there is none; nothing has run by then. The message names the
            obstacle: no attention, no attention interface, no query projection, or latent attention of another form.
    """
    config = text_config(model)
    kind = type(model).__name__
    if not getattr(config, "num_attention_heads", None):
        raise KvlabError(f"{kind} has no attention, and so no KV cache to look into or to compress; {KNOWN}")
    can_set = getattr(type(model), "_can_set_attn_implementation", lambda: False)
    if not can_set():
        raise KvlabError(
            f"{kind} does not call transformers' attention interface, so kvlab cannot see its attention; {KNOWN}"
        )
    expected = layout_of(model).compressed
    found, others = {}, {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer in expected:
            hooks = any(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)
            (found if hooks else others)[layer] = module
    if sorted(found) == list(expected):
        modules = [found[layer] for layer in expected]
        _check_alike(kind, modules)
        if getattr(config, "kv_lora_rank", None) and not all(map(is_latent, modules)):
            raise KvlabError(
                f"{kind} has latent attention, and its cache does not hold the compressed vectors; {KNOWN}"
            )
        return modules
    strange = next((module for layer, module in sorted(others.items()) if layer not in found), None)
    instead = f" (layer {strange.layer_idx} is a {type(strange).__name__} with {_parts(strange)})" if strange else ""
    how_many = f"only {len(found)} of the {len(expected)} layers" if found else "none of the layers"
    raise KvlabError(f"{how_many} of {kind} can be hooked{instead}: {KNOWN}")


def _check_alike(kind: str, modules: list[nn.Module]) -> None:
    """Refuse layers whose entries cannot lie side by side in one tensor."""
    first, *rest = ([getattr(m, name, None) for name in ("head_dim", "num_key_value_groups")] for m in modules)
    for module, shape in zip(modules[1:], rest, strict=True):
        if shape != first:
            raise KvlabError(
                f"layers {modules[0].layer_idx} and {module.layer_idx} of {kind} have heads of different sizes or "
                f"groups, which kvlab does not model; {KNOWN}"
            )


def _parts(module: nn.Module) -> str:
    """The names of what a layer multiplies with, of which one makes its queries."""
    names = [name for name, part in module.named_children() if getattr(part, "weight", None) is not None]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "no weights"


# ---------------------------------------------------------------------------------------------- what each layer sees


def layout_of(model: nn.Module) -> Layout:
    """Which layers of a model a policy compresses, by the cache that transformers keeps for each.

    Raises:
        KvlabError: a layer that is more than one kind at once, or none that can be compressed.
    """
    from transformers.cache_utils import DynamicSlidingWindowLayer

    kind, kept = type(model).__name__, own_layers(model)
    names = getattr(text_config(model), "layer_types", None) or [""] * len(kept)
    sees = tuple(_sees(kind, number, layer, names[number]) for number, layer in enumerate(kept))
    compressed = tuple(layer for layer, seen in enumerate(sees) if seen == WHOLE)
    if not compressed and all(isinstance(layer, DynamicSlidingWindowLayer) for layer in kept):
        compressed = tuple(range(len(kept)))
    if not compressed:
        instead = ", ".join(sorted(set(sees)))
        raise KvlabError(
            f"no layer of {kind} attends to the whole past (they see {instead}), so there is nothing to compress; "
            f"{KNOWN}"
        )
    return Layout(sees, compressed)


def own_layers(model: nn.Module) -> list[Any]:
    """Make transformers' own empty cache for each layer of a model.

    Raises:
        KvlabError: a cache that transformers does not make from the configuration.
    """
    from transformers import DynamicCache

    try:
        return list(DynamicCache(config=text_config(model)).layers)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise KvlabError(
            f"transformers makes no cache for the layers of {type(model).__name__} ({error!r:.80}), so kvlab cannot "
            f"tell which of them attend to the whole past; {KNOWN}"
        ) from None


def windows_of(model: nn.Module) -> dict[int, int]:
    """How far back each compressed layer sees, by its number in the model; those that see everything are not there."""
    kept = own_layers(model)
    reach = {layer: getattr(kept[layer], "sliding_window", None) for layer in layout_of(model).compressed}
    return {layer: window for layer, window in reach.items() if window is not None}


def _sees(model: str, number: int, layer: Any, name: str) -> str:
    """The tokens that a layer sees, from its transformers cache and its name in the configuration."""
    kept = type(layer).__name__  # older versions of transformers do not have all of these classes
    if kept in ("DynamicLayer", INDEXED):
        return WHOLE
    if kept == "DynamicSlidingWindowLayer":
        return f"a {'chunk' if name.startswith('chunk') else 'window'} of {layer.sliding_window} tokens"
    if kept == "LinearAttentionLayer":
        return "a convolution" if name == "conv" else "a linear state"
    if kept == "DummyLayer" and name in ("moe", "mlp"):
        return "one token at a time"
    why = "attends to the keys and values of another layer" if kept == "DummyLayer" else f"keeps a {kept}"
    raise KvlabError(f"layer {number} of {model} {why}, which kvlab does not model; {KNOWN}")


def head_dim_of(model: nn.Module, module: nn.Module) -> int:
    """The head size of an attention module of a model; of latent attention, channels of what is stored of a token."""
    own = None if is_latent(module) else getattr(module, "head_dim", None)
    return own or geometry(cast(Any, model).config).head_dim


def is_latent(module: nn.Module) -> bool:
    """Whether an attention module stores latent vectors, of which it makes keys and values whenever it attends."""
    return isinstance(getattr(module, LATENT, None), nn.Module) and callable(getattr(module, EXPAND, None))


def latent_of(module: nn.Module) -> int:
    """Channels of a latent module's rotary part; 0 of any other attention."""
    return int(cast(Any, module).qk_rope_head_dim) if is_latent(module) else 0


def expansion_of(module: nn.Module) -> Expansion:
    """How a latent module makes keys and values.

    Raises:
        KvlabError: the projection that does it is no linear map.
    """
    known = cast(Any, module)
    projection = known.kv_b_proj
    weight = _plain(projection)
    weight = _effective(module, projection) if weight is None else weight
    if weight is None:
        raise KvlabError("the projection that makes keys and values of latent vectors is no linear map here")
    parts = [known.qk_nope_head_dim, known.v_head_dim]
    keys, values = weight.unflatten(0, (-1, sum(parts))).split(parts, 1)
    return Expansion(keys, values, known.qk_rope_head_dim)


def is_indexed(model: nn.Module) -> bool:
    """Whether a sparse indexer of the model chooses which tokens each query attends to (DSA)."""
    return any(type(layer).__name__ == INDEXED for layer in own_layers(model))


def check_attends_to_all(model: nn.Module) -> None:
    """Raise KvlabError for a model whose sparse indexer chooses tokens: its keys would have to leave with entries."""
    if is_indexed(model):
        raise KvlabError(
            f"{type(model).__name__} has a sparse indexer with a cache that no policy compresses; capture a trace, "
            "replay policies on it and compare with `trace.indexer`"
        )


def softmax_of(module: nn.Module) -> Softmax:
    """The softmax of an attention module, as far as its attributes show before it is called."""
    factor, softcap = (getattr(module, name, None) for name in ("scaling", "attn_logit_softcapping"))
    sinks = getattr(module, "sinks", None)
    return Softmax(
        factor if isinstance(factor, float | int) else None,
        softcap if isinstance(softcap, float | int) else None,
        None if sinks is None else cast(nn.Parameter, sinks).detach(),
    )


def projections_of(modules: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """Return the output projections of attention modules, `[hidden, heads x head_dim]` each.

    They are the model's own weights. Biases are left out, since no token changes them. The result is None where a
    projection is more than a matrix in memory (an adapter, quantised or offloaded weights). It is also None where one
    follows on the values' expansion of latent attention.
    """
    if any(map(is_latent, modules)):
        return None
    found = [None if (output := _output_of(module)) is None else _plain(output) for module in modules]
    return None if any(weight is None for weight in found) else cast("tuple[Tensor, ...]", tuple(found))


def required_projections(modules: Sequence[nn.Module], asker: str = "the policy") -> tuple[Tensor, ...]:
    """The same, with what an adapter, a quantisation or latent attention makes of it: what each projection does to a
    token.

    Args:
        modules: of the layers.
        asker: the policy or measure that needs them, for the message.

    Raises:
        KvlabError: where one is no linear map.
    """
    found = []
    for module in modules:
        output = _output_of(module)
        weight = None if output is None else _plain(output)
        if output is not None and weight is None:
            weight = _effective(module, output)
        if weight is None:
            raise KvlabError(
                f"{asker} needs a linear output projection in each layer, and {_instead(module, output)}; choose "
                "another policy, or load the model without quantization_config"
            )
        found.append(expansion_of(module).projection(weight) if is_latent(module) else weight)
    return tuple(found)


def _instead(module: nn.Module, output: nn.Module | None) -> str:
    layer = f"layer {getattr(module, 'layer_idx', 0)}"
    if output is None:
        return f"{layer} has none"
    weight = getattr(output, "weight", None)
    kind = type(output).__name__ + ("" if weight is None or is_plain(weight) else f" of {type(weight).__name__}")
    return f"that of {layer} is no linear map (a {kind}; quantised activations?)"


def _output_of(module: nn.Module) -> nn.Module | None:
    made = (getattr(module, name, None) for name in OUTPUTS)
    return next((output for output in made if isinstance(output, nn.Module)), None)


def _plain(output: nn.Module) -> Tensor | None:
    """The weight of a projection that is nothing else: no adapter around it, no hook on it, not on meta."""
    hooked = output._forward_hooks or output._forward_pre_hooks or "forward" in vars(output)
    if hooked or not isinstance(output, nn.Linear) or type(output).forward is not nn.Linear.forward:
        return None
    weight: Tensor = output.weight
    return None if weight.is_meta or not is_plain(weight) else weight.detach()


@torch.no_grad()
def _effective(module: nn.Module, output: nn.Module) -> Tensor | None:
    """The output of a projection with all around it for an identity, less its bias; None where it is no linear map."""
    width = getattr(output, "in_features", None)
    if not isinstance(width, int):
        return None
    own = [*output.parameters(), *module.parameters()]
    dtype = next((p.dtype for p in own if p.dtype in FLOATS), torch.float32)
    device = device_of(output)
    training = [part for part in output.modules() if part.training]
    try:
        for part in training:
            part.training = False  # dropout leaves
        with outside_autocast(device):
            bias = output(torch.zeros(1, 1, width, dtype=dtype, device=device))
            weight = (output(torch.eye(width, dtype=dtype, device=device)[None]) - bias)[0].T.contiguous()
            # Eighths of -4 .. 3 are the same in every type.
            probe = (torch.arange(width, dtype=dtype, device=device) % 8 - 4)[None, None] / 8
            got, wanted = (output(probe) - bias).float(), (probe.to(weight.device) @ weight.T).float()
    finally:
        for part in training:
            part.training = True
    return weight if float((got - wanted).norm()) <= LINEAR * float(wanted.norm()) else None


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes: where its weights are, or where accelerate brings those that it has offloaded."""
    weights = (p.device for p in model.parameters() if not p.is_meta)
    return next(_execution_devices(model), None) or next(weights, torch.device("cpu"))


def _execution_devices(model: nn.Module) -> Iterator[torch.device]:
    """Where accelerate has parts of a model compute, part by part; nothing of a model that it has not placed."""
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        for each in getattr(hook, "hooks", [hook]):
            if (device := getattr(each, "execution_device", None)) is not None:
                yield torch.device(f"cuda:{device}" if isinstance(device, int) else device)


def devices_of(model: nn.Module) -> list[torch.device]:
    """Where each compressed layer computes, one behind the other: several devices where a model is split over them."""
    return [device_of(module) for module in layers_of(model)]


# ----------------------------------------------------------------------------------------------- what holds a model


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a wrapper; anything else comes back as it is.

    A wrapper is a compiled module, an adapter, DataParallel, or a user's own module or object with a `model` or a
    `module`.

    Raises:
        KvlabError: a wrapper of several models.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    if not isinstance(model, nn.Module):
        parts = (vars(model).get(name) for name in ("model", "module")) if hasattr(model, "__dict__") else ()
        inside = next((part for part in parts if isinstance(part, nn.Module)), None)
        return model if inside is None else unwrapped(inside)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if len(found) > 1:
        raise KvlabError(
            f"the {type(model).__name__} holds {len(found)} models ({', '.join(found)}); give the one to look into"
        )
    return next(iter(found.values()), model)
