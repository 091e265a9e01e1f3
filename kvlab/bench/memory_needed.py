"""How much memory a prompt takes on a device, by a model's configuration: nothing is loaded, and nothing runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvlab.core.attention import CHUNK
from kvlab.core.geometry import geometry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SINGLE = 4
"""Bytes of float32, in which norms and softmaxes are computed."""


@dataclass(frozen=True)
class Need:
    """Bytes: of the weights, of the full cache, and of what one layer computes at once."""

    weights: int
    cache: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


def parameters(config: PreTrainedConfig) -> int:
    """Number of weights, counted on an empty model; tied ones count once."""
    return _counted(config.to_json_string(use_diff=False), type(config))


@lru_cache(maxsize=32)
def _counted(settings: str, kind: type[PreTrainedConfig]) -> int:
    import json

    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(kind.from_dict(json.loads(settings)))
    return sum(weight.numel() for weight in empty.parameters())


def entry_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token, over all layers and KV heads."""
    of_model = geometry(config)
    return 2 * of_model.layers * of_model.kv_heads * of_model.head_dim * dtype.itemsize


def of_prompt(config: PreTrainedConfig, tokens: int, dtype: torch.dtype, batch: int = 1) -> Need:
    """Estimate the memory to prefill a prompt in a live session, or to capture it.

    The estimate is an upper bound for models whose layers all attend to the whole past. The policy must look at no more
    than a window of queries, or at their sums. The prompt goes through the model in one piece. A capture of a long one
    goes in chunks and needs less.
    """
    of_model, text = geometry(config), config.get_text_config()
    hidden = text.hidden_size
    mlp = getattr(text, "intermediate_size", None) or 4 * hidden
    queries, keys = of_model.heads * of_model.head_dim, of_model.kv_heads * of_model.head_dim
    # The stages of a layer, one after the other: numbers of one token in the model's precision, and in float32.
    stages = {
        "norm": (2 * hidden, 3 * hidden),
        "attention": (3 * hidden + 5 * queries + 5 * keys, 0),
        "mlp": (3 * hidden + 4 * mlp, 0),
        # A block of queries, the heads of a group: products, what hides later ones, weights, and their sum.
        "accumulated": (3 * hidden + 2 * queries + 2 * keys, 4 * of_model.group * CHUNK + 2 * of_model.head_dim),
    }
    of_token = max(own * dtype.itemsize + single * SINGLE for own, single in stages.values())
    return Need(
        parameters(config) * dtype.itemsize, batch * tokens * entry_bytes(config, dtype), batch * tokens * of_token
    )


def prefill_operations(config: PreTrainedConfig, tokens: int) -> int:
    """Multiplications and additions of one prefill, twice each product: every weight once for each token, and causal
    attention.
    """
    of_model = geometry(config)
    attention = 2 * tokens**2 * of_model.heads * of_model.head_dim * of_model.layers
    return 2 * parameters(config) * tokens + attention


def longest(config: PreTrainedConfig, dtype: torch.dtype, room: int) -> int:
    """The longest prompt in tokens that fits into so many bytes with the weights; 0 where these do not fit."""
    one, two = of_prompt(config, 1, dtype), of_prompt(config, 2, dtype)
    return max((room - one.weights) // (two.total - one.total), 0)
