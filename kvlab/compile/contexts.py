"""Calibration texts: documents that no evaluation reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.inputs.corpus import Document

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
