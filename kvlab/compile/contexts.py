"""Calibration contexts: windows of documents that no evaluation reads, sampled evenly over the bins of their risk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.inputs.corpus import Document
from kvlab.methods._base.lookup import bins

if TYPE_CHECKING:
    from kvlab.compile.settings import Settings
    from kvlab.inputs.models import LM

HELD_APART = (
    *(
        f"sotu/{year}"
        for year in (1962, 1966, 1969, 1975, 1983, 1985, 1988, 1990, 1994, 1996, 1999, 2004, 2007, 2010, 2012)
    ),
    *(
        f"squad/{title}"
        for title in (
            "Amazon_rainforest",
            "Civil_disobedience",
            "Construction",
            "Force",
            "French_and_Indian_War",
            "Harvard_University",
            "Immune_system",
            "Islamism",
            "Oxygen",
            "Pharmacy",
            "Private_school",
            "Rhine",
            "Scottish_Parliament",
            "University_of_Chicago",
            "Yuan_dynasty",
        )
    ),
    *(name for name in corpus.SETS["mixed/20"] if corpus.genre(name) in ("chitchat", "code")),
)
"""The texts that kvlab's experiments evaluate on, in any profile: nothing is learnt from them."""

DOCUMENTS = (
    *(f"sotu/{year}" for year in (1867, 1881, 1895, 1908, 1921, 1934, 1947, 1954, 1965, 1970, 1987, 1991, 2003, 2008)),
    *(
        f"squad/{title}"
        for title in (
            "Black_Death",
            "Geology",
            "Huguenot",
            "Imperialism",
            "Normans",
            "Prime_number",
            "Steam_engine",
            "Warsaw",
        )
    ),
    *(f"chitchat/{number}" for number in (338, 1172, 2326, 2568, 4258, 4972)),
    *(f"code/{module}" for module in ("calendar", "csv", "difflib", "heapq", "textwrap", "zipfile")),
)
"""What tables are learnt from by default: speeches, encyclopedia, conversations and source code."""

PARAGRAPH = 200


@dataclass(frozen=True, eq=False)
class Context:
    """A window of a document, and what follows it there.

    Attributes:
        name: `document[start:end]@hash of the ids`.
        ids: int64 `[tokens]`.
        continuation: int64 `[n + 1]`, the tokens that come next; each but the first is predicted from the one before.
    """

    name: str
    ids: Tensor
    continuation: Tensor


def checked(documents: Sequence[Document], held_apart: Sequence[str] = HELD_APART) -> list[Document]:
    """The documents, once it is sure that none is a text which evaluations read, or shares a paragraph with one.

    Raises:
        KvlabError: there is none, or one overlaps.
    """
    if not documents:
        raise KvlabError("there is nothing to learn from; name at least one document")
    paragraphs = {part: name for name in held_apart for part in _paragraphs(corpus.document(name))}
    for document in documents:
        shared = next((paragraphs[part] for part in _paragraphs(document) if part in paragraphs), None)
        if document.name in held_apart or shared:
            raise KvlabError(
                f"{document.name} overlaps with {shared or document.name}, which the evaluations read; tables are "
                "learnt from other texts"
            )
    return list(documents)


def _paragraphs(document: Document) -> Iterator[str]:
    """Its lines that are not short, with single spaces."""
    lines = (" ".join(line.split()) for line in document.text.splitlines())
    return (line for line in lines if len(line) >= PARAGRAPH)


def pool(lm: LM, documents: Sequence[Document], settings: Settings) -> list[Context]:
    """Windows of the documents. Documents and lengths take turns, the seed draws the places, and no window comes twice.

    A document that is too short for a length gives one of the longest length that fits.

    Raises:
        KvlabError: no document is long enough for any of the lengths.
    """
    after = settings.continuation + 1
    texts = []
    for document in documents:
        ids = lm.encode(document.text, chat=False)[0].cpu()
        fitting = [tokens for tokens in settings.lengths if tokens + after <= len(ids)]
        if fitting:
            texts.append((document, ids, fitting))
    if not texts:
        raise KvlabError(
            f"no document has the {min(settings.lengths) + after} tokens that a context and what follows it take"
        )
    contexts: dict[str, Context] = {}
    rng = np.random.default_rng([settings.seed, 1])
    for number in range(settings.pool):
        document, ids, fitting = texts[number % len(texts)]
        length = settings.lengths[(number + number // len(texts)) % len(settings.lengths)]
        tokens = length if length in fitting else max(fitting)
        start = int(rng.integers(len(ids) - tokens - after + 1))
        part = ids[start : start + tokens + after]
        sha = hashlib.sha256(np.ascontiguousarray(part.numpy()).tobytes()).hexdigest()[:8]
        context = Context(f"{document.name}[{start}:{start + tokens}]@{sha}", part[:tokens], part[tokens:])
        contexts.setdefault(context.name, context)
    return list(contexts.values())


def cells(
    entropy: np.ndarray | Sequence[float], perplexity: np.ndarray | Sequence[float], settings: Settings
) -> np.ndarray:
    """Which cell of the risk grid contexts fall into, entropy bin x perplexity bins + perplexity bin, int `[n]`."""
    rows, columns = bins(
        torch.tensor(entropy, dtype=torch.float64),
        torch.tensor(perplexity, dtype=torch.float64),
        settings.bins,
        settings.entropy,
        settings.perplexity,
    )
    return (rows * settings.bins[1] + columns).numpy()


def stratified(cells: np.ndarray, n: int, seed: int) -> list[int]:
    """Indices of `n` contexts of the pool, ascending, as evenly over the occupied cells as possible.

    Each round takes one context, drawn by the seed, from every cell that has some left.
    """
    order = np.random.default_rng([seed, 2]).permutation(len(cells))
    left = {cell: [int(i) for i in order if cells[i] == cell] for cell in np.unique(cells)}
    chosen: list[int] = []
    while len(chosen) < min(n, len(cells)):
        for members in left.values():
            if members and len(chosen) < n:
                chosen.append(members.pop())
    return sorted(chosen)
