"""What a session could leave behind in a model, and models that no session can be opened on."""

from __future__ import annotations

from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from kvlab.core import hooks as attention
from kvlab.inputs import models


def state(model):
    """What a session could leave behind: attention implementations, hooks, registered modules."""
    modules = list(model.modules())
    configs = [m.config for m in modules if hasattr(m, "config")]
    kinds = [(id(config), config._attn_implementation) for config in configs]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
    return kinds, hooks, [m in attention._hooked for m in modules], dict(attention._own_attention)


SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
UNFIT = {
    "falcon": (lambda: FalconForCausalLM(FalconConfig(**SMALL)), "FalconForCausalLM does not call"),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)),
        r"GPT2LMHeadModel can be hooked \(layer 0 is a GPT2Attention with c_attn and c_proj\): kvlab hooks "
        r"attention through .* with a q_proj or qkv_proj",
    ),
}


def unfit(name):
    make, message = UNFIT[name]
    return models.LM(make().eval(), None, name, "0" * 64), message
