"""Where the tokens of a text lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvlab.errors import KvlabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, remedy: str = "a fast tokenizer (tokenizer.json) is needed"
) -> list[tuple[int, int]]:
    """Where each token begins and ends in the text, in characters; special tokens are none of it.

    Args:
        remedy: what the caller's user can do where the tokenizer does not tell.

    Raises:
        KvlabError: a tokenizer that does not tell.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise KvlabError(f"{type(tokenizer).__name__} does not tell where its tokens lie; {remedy}")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return cast("list[tuple[int, int]]", encoded["offset_mapping"])
