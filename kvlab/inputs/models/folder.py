"""What a model's folder holds: the files of its weights, and its tokenizer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.errors import KvlabError
from kvlab.lib.files import parsed, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Files that hold a tokenizer's vocabulary. One whose folder has settings alone knows no token of any text.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json", "*.spm")


def read_tokenizer(folder: Path, gguf_file: str | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder, or in the GGUF file of that name in it; None where there is none.

    Raises what transformers raises for a tokenizer that cannot be read.
    """
    from transformers import AutoTokenizer

    source = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **source)
    except Exception:
        if _has_vocabulary(folder, gguf_file):
            raise
        return None
    # Some families make one out of nothing. It knows its special tokens only, and any text has no length.
    nothing = {*found.all_special_tokens, *found.get_added_vocab()}.issuperset(found.get_vocab())
    return None if nothing else found


def _has_vocabulary(folder: Path, gguf_file: str | None) -> bool:
    if gguf_file is None:
        return any(any(folder.glob(pattern)) for pattern in VOCABULARIES)
    from gguf import GGUFReader

    with contextlib.suppress(Exception):  # of a damaged file nothing is known: its error stands
        return "tokenizer.ggml.tokens" in GGUFReader(folder / gguf_file).fields
    return True


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in `folder`, in order.

    Raises:
        KvlabError: there are none, or their index is none.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():  # as transformers, which looks for it first
        return [single]
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
def quietly() -> Iterator[None]:
    """While the block runs, transformers prints no progress bars and no advice."""
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
