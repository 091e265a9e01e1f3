"""Find the kind of token that each entry of a prompt belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from kvlab.analyses.texts import SUMMARISE

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

REQUEST = "template and request"
SENTENCE_END = "sentence end"
PUNCTUATION = "other punctuation"
NUMBER = "number"
NAME = "name"
WORD = "other word"
RESPONSE = "response"
KINDS = (NAME, NUMBER, WORD, PUNCTUATION, SENTENCE_END, REQUEST, RESPONSE)

ENDS = ".!?"
CLOSING = "\"'”’)]"


def kinds(tokens: Sequence[str], around: tuple[int, int] = (0, 0)) -> list[str]:
    """The kind of each token of a prompt.

    A token with a digit is a number. A line break, or punctuation that ends in `.`, `!` or `?` (quotes and brackets may
    follow), is a sentence end. A word with a capital is a name, with all its tokens, unless it starts a sentence,
    follows a colon or is the pronoun "I".

    Args:
        tokens: texts of the tokens, as `token_texts` gives them: words start with a space.
        around: tokens of the template before the text, and of the request and template after it.
    """
    head, tail = around
    end = len(tokens) - tail
    found = [REQUEST] * len(tokens)
    starts, word = True, WORD  # whether the next word starts a sentence; the kind of the word that a token may continue
    before = ""
    for place in range(head, end):
        text = tokens[place]
        bare = text.strip()
        if any(character.isdigit() for character in bare):
            found[place], word, starts = NUMBER, WORD, False
        elif any(character.isalpha() for character in bare):
            first = next(character for character in bare if character.isalpha())
            continues = text[:1].isalpha() and before[-1:].isalpha()
            if not continues:
                word = NAME if first.isupper() and not starts and not _pronoun(tokens[place:end]) else WORD
            found[place], starts = word, False
        elif "\n" in text or bare.rstrip(CLOSING).endswith(tuple(ENDS)):
            found[place], starts = SENTENCE_END, True
        else:
            # The word behind an opening quote still starts its sentence, and so does one behind a colon ("A: We").
            starts = starts or bare.endswith(":")
            # Further tokens of a character have no text.
            found[place] = found[place - 1] if not text and place > head else PUNCTUATION
        before = text or before
    return found


def _pronoun(following: Sequence[str]) -> bool:
    """Whether the word that starts here is the pronoun "I"."""
    after = following[1] if len(following) > 1 else ""
    return following[0].strip() == "I" and not after[:1].isalpha()


def around(lm: LM) -> tuple[int, int]:
    """Tokens before and after the text of a prompt that asks for a summary: chat template, request, special tokens."""
    # Two texts that begin and end in different ways share only the text around them.
    one, two = (lm.encode(text + SUMMARISE)[0].tolist() for text in ("one", "Two!"))
    return _shared(one, two), _shared(one[::-1], two[::-1])


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
