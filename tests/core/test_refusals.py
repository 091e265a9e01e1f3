"""Models that kvlab cannot look into, as transformers saves them: one true sentence each, before any weight is read."""

from __future__ import annotations

import pytest
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from kvlab import KvlabError
from kvlab.core import hookable
from kvlab.inputs import models

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2)
HEADED = SMALL | dict(num_attention_heads=4, num_key_value_heads=4, intermediate_size=48)
LATENT = HEADED | dict(
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
)
KNOWN = (
    " kvlab hooks attention through transformers' attention interface with a q_proj or qkv_proj (as in Llama, Mistral, "
    "Qwen, Phi-3, Gemma), and latent attention (as in DeepSeek-V3)"
)
NONE = " has no attention, and so no KV cache to look into or to compress;" + KNOWN
UNSEEN = " does not call transformers' attention interface, so kvlab cannot see its attention;" + KNOWN
COMPRESSED = " has latent attention, and its cache does not hold the compressed vectors;" + KNOWN
REFUSED = {
    "mamba": ("mamba", SMALL | dict(state_size=4), "MambaForCausalLM" + NONE),
    "mamba2": ("mamba2", SMALL | dict(state_size=4, num_heads=4, head_dim=16, n_groups=1), "Mamba2ForCausalLM" + NONE),
    "gpt2": (
        "gpt2",
        dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64),
        "none of the layers of GPT2LMHeadModel can be hooked (layer 0 is a GPT2Attention with c_attn and c_proj):"
        + KNOWN,
    ),
    "gpt_neox": (
        "gpt_neox",
        HEADED,
        "none of the layers of GPTNeoXForCausalLM can be hooked (layer 0 is a "
        "GPTNeoXAttention with query_key_value and dense):" + KNOWN,
    ),
    "bloom": ("bloom", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=64), "BloomForCausalLM" + UNSEEN),
    "falcon": ("falcon", SMALL | dict(num_attention_heads=4), "FalconForCausalLM" + UNSEEN),
    "recurrent_gemma": (
        "recurrent_gemma",
        HEADED | dict(num_hidden_layers=3, attention_window_size=16, lru_width=32),
        "no layer of RecurrentGemmaForCausalLM attends to the whole past (they see a linear state, a window of 16 "
        "tokens), so there is nothing to compress;" + KNOWN,
    ),
    "falcon_h1": (
        "falcon_h1",
        HEADED | dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1),
        "layer 0 of FalconH1ForCausalLM keeps a LinearAttentionAndFullAttentionLayer, which kvlab does not model;"
        + KNOWN,
    ),
    "nothing but convolutions": (
        "lfm2",
        HEADED | dict(layer_types=["conv", "conv"]),
        "no layer of Lfm2ForCausalLM attends to the whole past (they see a convolution), so there is nothing to "
        "compress;" + KNOWN,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_its_weights_are_read(tmp_path, monkeypatch, name):
    kind, arguments, sentence = REFUSED[name]
    folder = tmp_path / name
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **arguments))
    made.save_pretrained(folder)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_a, **_k: pytest.fail("the weights were read")
    )
    with pytest.raises(KvlabError) as caught:
        models.load(folder, device="cpu")
    assert str(caught.value) == sentence
    with pytest.raises(KvlabError) as caught:  # and when it comes as an object
        hookable.layers_of(made)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("q_lora_rank", [8, None])
def test_latents_that_a_cache_does_not_hold_are_refused(monkeypatch, q_lora_rank):
    """As before transformers' caches held them. With a q_proj, as in DeepSeek-V2-Lite, it looks like any attention."""
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", **LATENT, q_lora_rank=q_lora_rank))
    assert len(hookable.layers_of(made)) == 2
    monkeypatch.delattr(type(made.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(KvlabError) as caught:
        hookable.layers_of(made)
    assert str(caught.value) == "DeepseekV2ForCausalLM" + COMPRESSED


def test_what_is_hooked_loads_from_a_folder(tmp_path):
    """Or the refusals would mean nothing."""
    for kind in ("olmo2", "starcoder2"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **HEADED))
        model.save_pretrained(tmp_path / kind)
        assert len(hookable.layers_of(models.load(tmp_path / kind, device="cpu").model)) == 2
