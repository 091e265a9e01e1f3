"""How the package says no."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvlab.errors import KvlabError


@contextmanager
def one_sentence(match: str | None = None) -> Iterator[pytest.ExceptionInfo[KvlabError]]:
    """The block is refused by a `KvlabError` that says why in one line of several words; `match` as `pytest.raises`."""
    with pytest.raises(KvlabError, match=match) as caught:
        yield caught
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence.split()) >= 4, sentence


def refusal(act, *arguments, **parameters) -> str:
    """The sentence with which a call is refused; what it warns of before does not matter."""
    with warnings.catch_warnings(), one_sentence() as caught:
        warnings.simplefilter("ignore")
        act(*arguments, **parameters)
    return str(caught.value)
