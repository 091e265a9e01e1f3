"""How a tokenizer's text is split before it is merged: what a GGUF file names, and its readers partly forget.

llama.cpp names a way of splitting (`tokenizer.ggml.pre`). Its `llama-vocab.cpp` has the regular expressions behind the
names. So has the tokenizer.json of the models that they are named after. transformers' reader knows some of these
names, takes GPT-2's way for all others, and never normalises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Regex, normalizers, pre_tokenizers

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)  # with GPT-2's own expression


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])


def _gpt2() -> Any:
    return _GPT2


def _splits(*expressions: str) -> Callable[[], Any]:
    """Each expression splits what those before it have left; a match stands alone."""
    steps = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]
    return lambda: pre_tokenizers.Sequence([*steps, _BYTES])


def _falcon() -> Any:
    threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(behavior="contiguous"), _GPT2, pre_tokenizers.Digits(), threes]
    )


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True)
class Splitting:
    """The rules behind a name in `tokenizer.ggml.pre`.

    Attributes:
        pre_tokenizer: makes it; None leaves transformers' own, which is right for this name.
        composed: text is normalised to NFC first.
        whole: a piece that is a token as it stands is not merged.
        ends: tokens that end a response, not only the file's own, as the published generation_config.json has them.
    """

    pre_tokenizer: Callable[[], Any] | None = None
    composed: bool = False
    whole: bool = False
    ends: tuple[str, ...] = ()


def _named() -> Mapping[str, Splitting]:
    digits, gpt2, llama3 = Splitting(_digits), Splitting(_gpt2), Splitting(_splits(_LLAMA3), whole=True)
    qwen2 = Splitting(_splits(_QWEN2))
    instructed = ("<|im_end|>", "<|endoftext|>")
    groups = {
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"): digits,
        ("command-r",): Splitting(_digits, composed=True),
        ("gpt-2", "phi-2", "mpt", "jais", "trillion", "exaone4", "granite-docling"): gpt2,
        ("olmo",): Splitting(_gpt2, composed=True),
        ("qwen2",): Splitting(_splits(_QWEN2), composed=True, ends=instructed),
        ("qwen35",): Splitting(composed=True, ends=instructed),
        ("stablelm2", "hunyuan", "grok-2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"): qwen2,
        ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): llama3,
        ("llama-bpe",): Splitting(_splits(_LLAMA3), whole=True, ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
        ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe", "jina-v5-nano"): Splitting(_splits(_LLAMA3)),
        ("tekken",): Splitting(whole=True),
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): Splitting(),
        ("deepseek-v3", "hunyuan-dense"): Splitting(_splits(*_DEEPSEEK3)),
        ("deepseek-coder",): Splitting(_splits(*_DEEPSEEK_CODER)),
        ("falcon",): Splitting(_falcon),
    }
    return {name: splitting for names, splitting in groups.items() for name in names}


KINDS = _named()
# A sentencepiece vocabulary is not split; its normalisation is part of what transformers builds.
GEMMA_ENDS = ("<eos>", "<end_of_turn>")


def read(file: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, splitting text as the file says; a name that is not known gives a warning.

    Raises what transformers raises for one that it cannot build.
    """
    from transformers import PreTrainedTokenizerFast

    # Its own class, not the family's: that would read the metadata again, string by string, for a configuration.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        _mend(tokenizer, metadata, file)
    return tokenizer


def _mend(tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any], file: Path) -> None:
    name = metadata.get("tokenizer.ggml.pre", "")
    splitting = KINDS.get(name)
    if splitting is None:
        warnings.warn(
            f"{file.name} names the pre-tokenizer {name or 'nothing'!r}, which kvlab does not know; it uses GPT-2's, "
            "and tokens may differ from the published ones",
            stacklevel=2,
        )
        return
    backend = cast("Tokenizer", tokenizer.backend_tokenizer)
    if splitting.pre_tokenizer:
        backend.pre_tokenizer = splitting.pre_tokenizer()
    if splitting.composed:
        backend.normalizer = normalizers.NFC()
    if splitting.whole:
        backend.model.ignore_merges = True


def ends(tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]) -> int | list[int] | None:
    """The tokens that end a response: the file's own, and those that the published models of its kind have as well."""
    own = metadata.get("tokenizer.ggml.eos_token_id")
    splitting = KINDS.get(metadata.get("tokenizer.ggml.pre", ""))
    more = splitting.ends if splitting else ()
    if metadata.get("general.architecture", "").startswith("gemma"):
        more = GEMMA_ENDS
    vocabulary = tokenizer.get_vocab()
    wanted = [*([] if own is None else [own]), *(vocabulary[end] for end in more if end in vocabulary)]
    tokens: dict[int, None] = dict.fromkeys(wanted)
    return own if len(tokens) < 2 else list(tokens)
