"""The text of each token of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CUT = 8  # tokens that one character may be cut into


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text of each token; its id in brackets where there is no tokenizer. If a character is cut into several
    tokens, the first has its text, the others have none.
    """
    if tokenizer is None:
        return [f"[{number}] " for number in ids]
    ids = list(ids)
    texts, before, at = [], 0, 0
    while at < len(ids):
        ends = range(at + 1, min(at + CUT, len(ids)) + 1)
        pieces = ((end, _piece(tokenizer, ids[before:at], ids[at:end])) for end in ends)
        end, piece = next(
            (candidate for candidate in pieces if not candidate[1].endswith("\ufffd")),
            (at + 1, tokenizer.decode(ids[at : at + 1])),
        )
        texts += [piece, *[""] * (end - at - 1)]
        before, at = at, end
    return texts


def _piece(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """The text that tokens add to those before them: decoded alone, some tokenizers drop their leading space."""
    context, both = tokenizer.decode(before), tokenizer.decode(before + ids)
    return both[len(context) :] if both.startswith(context) else tokenizer.decode(ids)
