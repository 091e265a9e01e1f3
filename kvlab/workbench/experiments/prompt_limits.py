"""Refuses prompts that are too long before a model is loaded: without torch, from files on the disk."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.lib.files import parsed
from kvlab.workbench.experiments import content_key
from kvlab.workbench.experiments.parameter_values import listed

# Parameters that say how many tokens a prompt has, alone or in a mapping together with `new_tokens`.
PROMPTS = ("tokens", "length", "shorter", "longest", "prompt_tokens")
# Lists of such numbers.
LADDERS = ("contexts", "needle_lengths", "lengths")
# Parameters that say how much is cut out of every document.
CUTS = ("tokens", "shorter")
# A prompt may have this many tokens around the document's part: the request and the chat template.
AROUND = 128


def check(parameters: Mapping[str, Any], where: str) -> None:
    """Raise KvlabError for prompts that are longer than the model's context, or than the document they are cut from.

    Only certain cases are refused. If the context or the tokenizer is not on the disk, the job itself will fail.
    """
    folder = content_key.model_folder(str(parameters.get("model", "")))
    most = _context(folder) if folder else None
    for name, tokens, response in prompts(parameters):
        if tokens < 1:
            raise KvlabError(f"parameter {name!r} of {where} must be at least 1, and is {tokens}")
        if most and tokens + response > most:
            after = f" and the {response} that follow" if response else ""
            raise KvlabError(
                f"parameter {name!r} of {where}: prompts of {tokens:,} tokens{after} are beyond the "
                f"{most:,} that {parameters['model']} takes"
            )
    wanted = max((value for name in CUTS if _is_count(value := parameters.get(name))), default=0)
    documents = parameters.get("documents", parameters.get("document"))
    for name in corpus.named(listed(documents)):
        if isinstance(name, str) and (held := _tokens(name, folder)) + AROUND < wanted:
            raise KvlabError(f"{where} asks for prompts of {wanted:,} tokens, and the document {name} has {held:,}")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def prompts(parameters: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, int, int]]:
    """Name, tokens and response tokens of every prompt that the parameters describe."""
    response = parameters.get("new_tokens", 0)
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from prompts(value, f"{name}.")
            continue
        ladder = value if name in LADDERS and isinstance(value, list | tuple) else [value] if name in PROMPTS else []
        for tokens in filter(_is_count, ladder):
            yield f"{inside}{name}", tokens, response if _is_count(response) else 0


def _context(folder: Path) -> int | None:
    """The longest sequence that the model in a folder takes."""
    try:
        config = parsed((folder / "config.json").read_text(encoding="utf-8"))
        tokens = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, json.JSONDecodeError, AttributeError):
        return None
    return tokens if _is_count(tokens) and tokens > 0 else None


@functools.lru_cache(maxsize=256)
def _tokens(document: str, folder: Path | None) -> int:
    """Tokens of a document; without the model's tokenizer its bytes, which are at least as many."""
    text = corpus.document(document).text
    file = folder / "tokenizer.json" if folder else None
    if file is None or not file.is_file():
        return len(text.encode())
    from tokenizers import Tokenizer

    try:
        return len(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)
    except Exception:  # the reader of tokenizers raises no narrower class
        return len(text.encode())
