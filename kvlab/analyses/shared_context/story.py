"""What the figures of the notebook `shared_context` show, in sentences that follow from the numbers."""

from __future__ import annotations

from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.shared_context import asking
from kvlab.analyses.telling import listed, moved, number, percent, side


def question(findings: Findings) -> list[str]:
    """What it costs not to know the question."""
    rows = findings.of(asking.UNKNOWN)
    if not rows:
        return ["No policy was asked."]
    told = []
    for row in rows:
        cost = moved(row, above="costs", below="saves", undecided="makes no clear difference,")
        told.append(f"with {_named(row)} this {cost} nats a token")
    lines = [f"The cache compressed before any question instead of after each: {listed(told)}."]
    for row in findings.of(asking.BETWEEN, way="none"):
        less = side(row, above="loses more than", below="loses less than", undecided="cannot be told from")
        reads = findings.row(asking.BETWEEN, **{**row.keys, "way": "each"})
        known = side(reads, above="loses more", below="loses less", undecided="cannot be told from it")
        lines.append(
            f"At {row.keys['budget']:g} entries, before any question, {row.keys['left']} {less} {row.keys['right']} "
            f"({number(row)}); after each question it {known} ({number(reads)})."
        )
    full = findings.found(asking.FULL_HITS, way="none")
    return [*lines, f"The full cache gets {percent(full)} of the scored tokens right." if full else ""]


def turns(findings: Findings) -> list[str]:
    """How a chat declines after the turn whose question was read."""
    rows = findings.of(asking.DECLINE)
    if not rows:
        return ["No chat was held."]
    told = []
    for row in rows:
        way = moved(row, above="grows by", below="falls by", undecided="changes by no clear amount,")
        told.append(f"with {_named(row)} it {way}")
    return [
        f"From the first turn of a chat, whose question was read, to the later ones the loss changes: {listed(told)} "
        "nats a token.",
        "The order of the questions is random: without this knowledge no turn would be harder than another, but for "
        "the text between them.",
    ]


def _named(row: Row) -> str:
    return f"{row.keys['policy']} at {row.keys['budget']:g}"
