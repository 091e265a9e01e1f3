"""The content of a model's folder: the files of its weights, and its tokenizer."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError
from kvlab.lib.files import parsed, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEEPEST = 10_000  # layers that any model has

# Files that hold a tokenizer's vocabulary. One whose folder has settings alone knows no token of any text.
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json", "*.spm")


class ConversionReasons(logging.Handler):
    """While it is entered, keeps why weights could not be quantised: transformers logs that, and its error does not."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.reason: str | None = None
        self._logger = logging.getLogger("transformers.modeling_utils")

    def emit(self, record: logging.LogRecord) -> None:
        said = re.search(r"^[\w.]*(?:Error|Exception): (.+)$", record.getMessage(), re.MULTILINE)
        self.reason = self.reason or (said and said[1].strip())

    def __enter__(self) -> ConversionReasons:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.WARNING)
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder; None where there is none.

    Raises what transformers raises for a tokenizer that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:
        if any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
            raise
        return None
    return found if says_something(found) else None


def says_something(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer knows more than its special tokens: some families make one out of nothing."""
    known: Any = tokenizer  # its attributes are made at run time, where a checker does not see them
    special = {*known.all_special_tokens, *known.get_added_vocab()}
    # A vocabulary of a quarter of a million tokens takes half a second to list, and an instant to count.
    return len(known) > len(special) or not special.issuperset(known.get_vocab())


def known_depth(config: PreTrainedConfig, shown: Path) -> None:
    """Raise KvlabError for a configuration whose number of layers no model has, before anything is made for each."""
    if not 0 < (layers := config.get_text_config().num_hidden_layers) <= DEEPEST:
        raise KvlabError(f"cannot load a model from {shown}: it says that it has {layers:,} layers")


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
    """The files that an index of weights names, all of them safetensors files next to it."""
    try:
        names = sorted(set(parsed(read_text(index))["weight_map"].values()))
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise KvlabError(f"{index} is no index of a model's weights: it has no weight_map of files")
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise KvlabError(
                f"{index} names {name!r}; weights must be .safetensors files in the folder of their index (pickled "
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
