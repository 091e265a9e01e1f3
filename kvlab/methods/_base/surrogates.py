"""Surrogates of KVzip+ scores: a linear map for each layer, from its hidden states to log-scores of its KV heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from kvlab.core import attention
from kvlab.core.slots import described
from kvlab.core.storage import alike
from kvlab.errors import KvlabError, nearest
from kvlab.lib.files import expanded, replacing
from kvlab.methods._base.tensor_files import read

FORMAT = "kvlab-surrogate-1"
SHIPPED_SURROGATES = Path(__file__).parents[1] / "surrogates"
"""Surrogates that come with kvlab, one file for each model, found by the model's name."""
TITLE = "a surrogate (`kvlab surrogate` makes one)"


class About(BaseModel):
    """The model, texts and settings that a surrogate was trained with.

    Attributes:
        model, sha256: the model's name, "" where it may be any, and the hash of its weights.
        tokens: of each calibration text, without the chat template.
        documents: the texts, as `name@sha`.
        seed: of the choice of texts.
        ridge: the penalty of the squared weights.
        kvlab: the version that trained.
        layers: the numbers of these layers in the model; None where it has no others.
        r2: R^2 on held-out texts, the mean over layers and KV heads, by `name@sha`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    sha256: str = ""
    tokens: Annotated[int, Field(ge=1)]
    documents: list[str] = []
    seed: int = 0
    ridge: Annotated[FiniteFloat, Field(ge=0)]
    kvlab: str
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    r2: dict[str, FiniteFloat] = {}


@dataclass(frozen=True, eq=False)
class Surrogate:
    """Log-scores of KV heads as a linear function of the hidden states that enter their attention.

    Made by `kvlab.traces.surrogate_training.train` or `kvlab surrogate`, used by `kvzap`.

    Attributes:
        weight: float16 `[n_layers, kv_heads, width]`.
        bias: float32 `[n_layers, kv_heads]`.
        about: what it was trained on.
        content: the hash of its file; empty before there is one.
    """

    weight: Tensor
    bias: Tensor
    about: About
    content: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads, and the width of the hidden states."""
        layers, heads, width = self.weight.shape
        return layers, heads, width

    def scores(self, hidden: Tensor, layers: tuple[int, ...]) -> Tensor:
        """Log-scores `[rows, kv_heads, n]` of hidden states `[rows, n, width]` of these layers."""
        hidden = attention.exact(hidden)
        weight, bias = (x[list(layers)].to(hidden) for x in (self.weight, self.bias))
        return weight @ hidden.mT + bias[..., None]

    def save(self, path: str | Path) -> Path:
        """Write the safetensors file; under its name only once it is whole."""
        about = {"format": FORMAT, "about": self.about.model_dump_json(exclude_none=True)}
        with replacing(path) as temporary:
            save_file({"weight": self.weight.contiguous(), "bias": self.bias.contiguous()}, temporary, about)
        return Path(path)

    @classmethod
    def load(cls, path_or_name: str | Path) -> Surrogate:
        """Read a file, or the surrogate that comes with kvlab for a model of that name.

        Raises:
            KvlabError: there is no such file or name, or the file is not right.
        """
        name, shipped = str(path_or_name), {file.stem: file for file in SHIPPED_SURROGATES.glob("*.safetensors")}
        if name in shipped:
            return _read(shipped[name])
        if not name.endswith(".safetensors") and Path(name).name == name and not expanded(name).exists():
            sentence = nearest(name, shipped, "model with a surrogate")
            raise KvlabError(f"{sentence}; or train one with `kvlab surrogate {name}` and give its file")
        return _read(expanded(name))


def _read(path: Path) -> Surrogate:
    tensors, about, content = read(path, TITLE)
    wrong = _fault(tensors, about)
    if wrong:
        raise KvlabError(f"{path} is no file of {TITLE}: {wrong}")
    return Surrogate(tensors["weight"], tensors["bias"].float(), About.model_validate_json(about["about"]), content)


def _fault(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """Describe the fault in the content of a file; empty if there is none."""
    if about.get("format") != FORMAT:
        return f"its format is {about.get('format')!r} and not {FORMAT!r}"
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or weight.dim() != 3 or not weight.is_floating_point() or not weight.numel():
        return f"`weight` is numbers [layers, kv_heads, width], and not {described(weight)}"
    if bias is None or not bias.is_floating_point() or bias.shape != weight.shape[:2]:
        return f"`bias` is numbers [{weight.shape[0]}, {weight.shape[1]}], and not {described(bias)}"
    if not all(bool(torch.isfinite(x).all()) for x in (weight, bias)):
        return "it holds values that are not finite"
    try:
        layers = About.model_validate_json(about.get("about", "")).layers
    except ValidationError as error:
        problem = error.errors()[0]
        return f"{'.'.join(map(str, ('about', *problem['loc'])))}: {problem['msg']}"
    if layers is not None and len(layers) != len(weight):
        return f"layers names {len(layers)} layers, and there are weights of {len(weight)}"
    return ""


@lru_cache(maxsize=64)
def shipped_for(model: str, shape: tuple[int, int, int]) -> Surrogate | None:
    """The surrogate that comes with kvlab for a model of this name and shape; None without one.

    Args:
        model: its name; "" where it is unknown, so that the shape decides.
        shape: layers, KV heads, and the width of the hidden states.
    """
    found = map(_read, sorted(SHIPPED_SURROGATES.glob("*.safetensors")))
    return next((one for one in found if one.shape == shape and alike(one.about.model, model)), None)
