"""What a page of the report holds, as a browser would find it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from kvlab import papers
from kvlab.workbench.report import ledger
from kvlab.workbench.report.ledger import Entry
from kvlab.workbench.report.provenance import Origin

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


def judged_on(numbers: dict[str, dict[str, dict[str, float]]], profile: str = "quick") -> list[Entry]:
    """The entries of all claims as kept ledgers tell them; numbers: model, the smallest first, to claim, to metrics."""
    of_models = {}
    for size, (model, measured) in enumerate(numbers.items(), 1):
        line = f"{model}|a@1 b@2 c@3|toy(budgets=[64, 128])|0|kvlab 0.1.0"
        origin = Origin(profile, line, "0123456789abcdef", "a machine", 95, size * 10**8)
        of_models[model] = [
            Entry(claim, papers.judge(claim, measured.get(claim.id, {})), None, model, origin)
            if claim.id in measured
            else Entry(claim, papers.judge(claim, {}), None, model)
            for claim in ledger.claims()
        ]
    return ledger.side_by_side(of_models)


def opened(text: str, claim: str = CLAIM) -> str:
    """A claim's line with what it opens."""
    start = text.index(f'<details class="claim" id="{slug(claim)}"')
    return text[start : text.index("</div>\n</details>", start)]
