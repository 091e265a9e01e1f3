"""The numbers of a model that decide the size of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Geometry:
    """Layers, query heads, KV heads, and numbers in a key; one KV head of latent attention, whose keys hold values."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


def geometry(config: Any) -> Geometry:
    """From a transformers configuration, of the decoder where the model is more than that."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    if rank := getattr(config, "kv_lora_rank", None):
        return Geometry(config.num_hidden_layers, heads, 1, rank + config.qk_rope_head_dim)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(config.num_hidden_layers, heads, kv_heads, head_dim)
