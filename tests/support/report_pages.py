"""What a page of the report holds, as a browser would find it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

CLAIM = "zsmerge.figure4.reduction_20"


class Page(HTMLParser):
    """The addresses that a page asks for, its tags and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses, self.tags, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append(tag)
        self.ids += [named["id"]] if "id" in named else []
        self.addresses += [named[key] for key in ("src", "href") if key in named]


def slug(text: str) -> str:
    """The id that a claim has on a page."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text)
