"""Which layers of a model kvlab can look into: found by what they are made of, and refused in the user's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PROJECTIONS = ("q_proj", "qkv_proj")
KNOWN = (
    "kvlab hooks attention that goes through transformers' attention interface and has a q_proj or a qkv_proj, as "
    "in Llama, Mistral, Qwen, Phi-3 and Gemma"
)


def text_config(model: nn.Module) -> PretrainedConfig:
    """The configuration of a transformers model's decoder, also where the model is more than that."""
    # To a type checker, whatever a module holds is a tensor or a module.
    return cast(Any, model).config.get_text_config(decoder=True)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder, by layer.

    Raises:
        KvlabError: where a layer cannot be hooked (no attention, latent attention, no attention interface, no query
            projection, soft-capped logits, learnt sinks), naming what is in the way; nothing has run by then.
    """
    config = text_config(model)
    kind = type(model).__name__
    if not getattr(config, "num_attention_heads", None):
        raise KvlabError(f"{kind} has no attention, and so no KV cache to look into or to compress; {KNOWN}")
    if getattr(config, "kv_lora_rank", None):
        raise KvlabError(
            f"{kind} has latent attention (keys and values are made from one compressed vector for each "
            f"token), which kvlab does not model; {KNOWN}"
        )
    can_set = getattr(type(model), "_can_set_attn_implementation", lambda: False)
    if not can_set():
        raise KvlabError(
            f"{kind} does not call transformers' attention interface, so kvlab cannot see its attention; {KNOWN}"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise KvlabError(f"{kind} soft-caps its attention logits, which kvlab does not model")
    found, others = {}, {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            continue
        if not any(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS):
            others[layer] = module
            continue
        if getattr(module, "sinks", None) is not None:
            raise KvlabError(f"{kind} has learnt attention sinks, which kvlab does not model")
        found[layer] = module
    expected = getattr(config, "num_hidden_layers", 0)
    if sorted(found) == list(range(expected)) and found:
        return [found[layer] for layer in range(expected)]
    strange = next((module for layer, module in sorted(others.items()) if layer not in found), None)
    instead = f" (layer {strange.layer_idx} is a {type(strange).__name__} with {_parts(strange)})" if strange else ""
    how_many = f"only {len(found)} of the {expected} layers" if found else "none of the layers"
    raise KvlabError(f"{how_many} of {kind} can be hooked{instead}: {KNOWN}")


def _parts(module: nn.Module) -> str:
    """The names of what a layer multiplies with, of which one makes its queries."""
    names = [name for name, part in module.named_children() if getattr(part, "weight", None) is not None]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "no weights"
