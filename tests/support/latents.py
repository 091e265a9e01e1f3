"""Tiny models with latent attention."""

from __future__ import annotations

import functools

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from kvlab.inputs import models, shapes

INDEXED = "latent-deepseek-v32"
# Kimi-Linear came to transformers after the oldest version that kvlab takes.
SHAPED = [
    name
    for name, shape in shapes.SHAPES.items()
    if name.startswith("latent-") and name != INDEXED and shape.model_type in CONFIG_MAPPING
]
RANK, WIDTH, HEADS = 24, 8, 4
_BASE = shapes.SHAPES["latent-deepseek-v3"].arguments
_PLAIN = {
    name: value
    for name, value in _BASE.items()
    if name not in ("n_routed_experts", "n_shared_experts", "first_k_dense_replace")
}
_YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=512,
)
# Others that transformers builds alike: scaled by YaRN, channels in halves, queries scaled after their projection.
OTHERS = {
    "deepseek-v3-yarn": ("deepseek_v3", _BASE | dict(rope_parameters=_YARN)),
    "deepseek-v3-halves": ("deepseek_v3", _BASE | dict(rope_interleave=False)),
    "glm4-moe-lite": ("glm4_moe_lite", _BASE),
    "minicpm3": ("minicpm3", _PLAIN),
    "youtu": ("youtu", _PLAIN),
    "longcat-flash": (
        "longcat_flash",
        _PLAIN
        | dict(
            num_layers=1,
            ffn_hidden_size=128,
            expert_ffn_hidden_size=32,
            n_routed_experts=4,
            moe_topk=2,
            zero_expert_num=2,
        ),
    ),
}

_GLM = ("glm_moe_dsa", shapes.SHAPES[INDEXED].arguments)


@functools.cache
def _other(family: str) -> models.LM:
    kind, arguments = (OTHERS | {"glm-moe-dsa": _GLM})[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **arguments)).float().eval()
    return models.LM(model, None, family, "1" * 64)


def latent(tiny, family: str) -> models.LM:
    """A model by its name in `SHAPED` or `OTHERS`."""
    return tiny(family) if family in SHAPED else _other(family)


def indexed(tiny, family: str) -> models.LM:
    """A model whose sparse indexer chooses 24 tokens for each query: DeepSeek-V3.2's, or `glm-moe-dsa`."""
    return tiny(INDEXED) if family == INDEXED else _other(family)
