"""Published model shapes, and tiny ones of the same families: numbers only, no weights.

A shape is a model type of transformers and the keyword arguments of its configuration. The published ones follow the
`config.json` of the model named in their summary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.errors import KvlabError, nearest

WINDOW, WHOLE = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Shape:
    """A model type with the arguments of its configuration."""

    model_type: str
    summary: str
    arguments: dict = field(default_factory=dict)


def _rope(theta: float, **scaling: object) -> dict:
    return {"rope_type": "default", "rope_theta": theta} | scaling


def _published(
    model_type: str,
    summary: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocabulary: int,
    context: int,
    theta: float,
    **more: object,
) -> Shape:
    arguments = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rope_parameters": _rope(theta),
        "tie_word_embeddings": False,
    }
    return Shape(model_type, summary, arguments | more)


def _tiny(model_type: str, summary: str, kv_heads: int, **more: object) -> Shape:
    # A wide initialisation: at the usual 0.02 such small models attend almost uniformly, and tests would see nothing.
    return _published(
        model_type,
        summary,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=kv_heads,
        mlp=128,
        vocabulary=256,
        context=2048,
        theta=1e4,
        initializer_range=0.2,
        **{"head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | more,
    )


def _hybrid(model_type: str, summary: str, layer_types: list[str], **more: object) -> Shape:
    """A tiny model whose layers look at different things."""
    return _tiny(model_type, summary, 2, **{"num_hidden_layers": len(layer_types), "layer_types": layer_types, **more})


def _latent(model_type: str, summary: str, **more: object) -> Shape:
    """A tiny model with latent attention: 24 numbers and a rotary part of 8 for each token and layer."""
    return _tiny(
        model_type,
        f"{summary}, 4 heads over a latent of 24 and a rotary part of 8: for tests",
        4,
        **{
            "kv_lora_rank": 24,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "head_dim": 8,
            **more,
        },
    )


# One dense layer, then experts.
_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}

SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": _published(
        "llama",
        "Llama-3.1-8B-Instruct: 32 layers, 32 heads, 8 KV heads of 128, 128k context",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        mlp=14336,
        vocabulary=128256,
        context=131072,
        theta=5e5,
        rope_parameters=_rope(
            5e5,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        rms_norm_eps=1e-5,
        bos_token_id=128000,
        eos_token_id=128009,
    ),
    "llama-2-7b": _published(
        "llama",
        "Llama-2-7B: 32 layers, 32 heads, 32 KV heads of 128, 4k context",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        mlp=11008,
        vocabulary=32000,
        context=4096,
        theta=1e4,
        rms_norm_eps=1e-5,
    ),
    "mistral-7b-v0.2": _published(
        "mistral",
        "Mistral-7B-Instruct-v0.2: 32 layers, 32 heads, 8 KV heads of 128, 32k context",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        mlp=14336,
        vocabulary=32000,
        context=32768,
        theta=1e6,
        rms_norm_eps=1e-5,
        sliding_window=None,
    ),
    "qwen2.5-7b": _published(
        "qwen2",
        "Qwen2.5-7B-Instruct: 28 layers, 28 heads, 4 KV heads of 128, 32k context",
        hidden=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        mlp=18944,
        vocabulary=152064,
        context=32768,
        theta=1e6,
        rms_norm_eps=1e-6,
        use_sliding_window=False,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "qwen3-8b": _published(
        "qwen3",
        "Qwen3-8B: 36 layers, 32 heads, 8 KV heads of 128, 40k context",
        hidden=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=12288,
        vocabulary=151936,
        context=40960,
        theta=1e6,
        rms_norm_eps=1e-6,
        use_sliding_window=False,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "phi-3-mini": _published(
        "phi3",
        "Phi-3-mini-4k-instruct: 32 layers, 32 heads, 32 KV heads of 96, 4k context, sliding window of 2,047",
        hidden=3072,
        layers=32,
        heads=32,
        kv_heads=32,
        mlp=8192,
        vocabulary=32064,
        context=4096,
        theta=1e4,
        rms_norm_eps=1e-5,
        sliding_window=2047,
        original_max_position_embeddings=4096,
    ),
    "gemma-7b": _published(
        "gemma",
        "Gemma-7B: 28 layers, 16 heads, 16 KV heads of 256, 8k context",
        hidden=3072,
        layers=28,
        heads=16,
        kv_heads=16,
        head_dim=256,
        mlp=24576,
        vocabulary=256000,
        context=8192,
        theta=1e4,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": _published(
        "llama",
        "SmolLM2-135M-Instruct: 30 layers, 9 heads, 3 KV heads of 64, 8k context",
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        mlp=1536,
        vocabulary=49152,
        context=8192,
        theta=1e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "tiny-llama-mha": _tiny("llama", "2 layers, 4 heads, 4 KV heads of 16: for tests", 4),
    "tiny-llama-gqa": _tiny("llama", "2 layers, 4 heads, 2 KV heads of 16: for tests", 2),
    "tiny-llama-mqa": _tiny("llama", "2 layers, 4 heads, 1 KV head of 16: for tests", 1),
    "tiny-mistral": _tiny("mistral", "2 layers, 4 heads, 2 KV heads of 16: for tests", 2, sliding_window=None),
    "tiny-qwen2": _tiny(
        "qwen2", "2 layers, 4 heads, 2 KV heads of 16, biased projections: for tests", 2, use_sliding_window=False
    ),
    "tiny-qwen3": _tiny(
        "qwen3", "2 layers, 4 heads, 2 KV heads of 16, normed queries and keys: for tests", 2, use_sliding_window=False
    ),
    "tiny-phi3": _tiny(
        "phi3",
        "2 layers, 4 heads, 2 KV heads of 16, one joint projection: for tests",
        2,
        sliding_window=None,
        original_max_position_embeddings=2048,
    ),
    "tiny-gemma": _tiny(
        "gemma", "2 layers, 4 heads, 2 KV heads of 16, offset norms: for tests", 2, tie_word_embeddings=True
    ),
    "tiny-olmo2": _tiny("olmo2", "2 layers, 4 heads, 2 KV heads of 16, one norm for all heads: for tests", 2),
    "tiny-granite": _tiny(
        "granite", "2 layers, 4 heads, 2 KV heads of 16, logits times 0.4: for tests", 2, attention_multiplier=0.4
    ),
    "hybrid-gemma2": _hybrid(
        "gemma2",
        "4 layers, 1 and 3 attend to the whole past, 0 and 2 to a window of 16; capped logits: for tests",
        [WINDOW, WHOLE] * 2,
        sliding_window=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=30.0,
    ),
    "hybrid-gemma3": _hybrid(
        "gemma3_text",
        "5 layers, 2 and 4 attend to the whole past, the others to a window of 16: for tests",
        [WINDOW, WINDOW, WHOLE, WINDOW, WHOLE],
        sliding_window=16,
        query_pre_attn_scalar=24,
        rope_parameters={WINDOW: _rope(1e3), WHOLE: _rope(1e4)},
    ),
    "hybrid-gpt-oss": _hybrid(
        "gpt_oss",
        "4 layers, 1 and 3 attend to the whole past, 0 and 2 to a window of 16; learnt sinks: for tests",
        [WINDOW, WHOLE] * 2,
        sliding_window=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "hybrid-llama4": _hybrid(
        "llama4_text",
        "4 layers, 1 and 3 attend to the whole past without RoPE, 0 and 2 to chunks of 16: for tests",
        ["chunked_attention", WHOLE] * 2,
        attention_chunk_size=16,
        no_rope_layers=[1, 0, 1, 0],
        interleave_moe_layer_step=2,
        intermediate_size_mlp=128,
        num_local_experts=2,
    ),
    "hybrid-qwen3-next": _hybrid(
        "qwen3_next",
        "4 layers, 1 and 3 attend to the whole past, 0 and 2 keep a linear state: for tests",
        ["linear_attention", WHOLE] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "hybrid-lfm2": _hybrid(
        "lfm2",
        "4 layers, 1 and 3 attend to the whole past, 0 and 2 are convolutions over 3 tokens: for tests",
        ["conv", WHOLE] * 2,
        conv_L_cache=3,
    ),
    "latent-deepseek-v2": _latent("deepseek_v2", "2 layers", **_EXPERTS | {"q_lora_rank": None}),
    "latent-deepseek-v3": _latent("deepseek_v3", "2 layers", **_EXPERTS),
    "latent-deepseek-v32": _latent(
        "deepseek_v32",
        "2 layers, whose indexer chooses 24 tokens for each query",
        **_EXPERTS | {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 16},
    ),
    "latent-kimi-linear": _latent(
        "kimi_linear",
        "4 layers, 1 and 3 attend to the whole past, 0 and 2 keep a linear state",
        **{
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", WHOLE] * 2,
            "q_lora_rank": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "linear_num_heads": 2,
            "linear_head_dim": 8,
        },
    ),
}


def config(shape: str, layers: int | None = None, **changes: object):
    """The transformers configuration of `shape`, with `layers` layers (None: as many as published).

    Further arguments of the configuration (vocab_size, sliding_window, ...) may be changed by name.
    Raises KvlabError for an unknown shape or a number of layers below 1.
    """
    from transformers import AutoConfig

    if shape not in SHAPES:
        raise KvlabError(nearest(shape, SHAPES, "model shape"))
    if layers is not None and (not isinstance(layers, int) or layers < 1):
        raise KvlabError(f"layers must be a whole number of at least 1, not {layers!r}")
    known = SHAPES[shape]
    arguments = known.arguments | ({} if layers is None else {"num_hidden_layers": layers}) | changes
    return AutoConfig.for_model(known.model_type, **arguments)
