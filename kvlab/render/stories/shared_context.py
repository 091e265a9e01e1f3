"""What the figures of the notebook `shared_context` show, in sentences that follow from the numbers."""

from __future__ import annotations

from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.shared_context import asking
from kvlab.render.phrases import grouped, number, percent, sentence


def question(findings: Findings) -> list[str]:
    """What it costs not to know the question."""
    rows = findings.of(asking.UNKNOWN)
    if not rows:
        return ["No policy was asked."]
    cost = grouped(
        [(row, f"{_named(row)} ({number(row)})") for row in rows],
        above="more with",
        below="less with",
        undecided="neither clearly more nor less with",
    )
    full = findings.found(asking.FULL_HITS, way="none")
    whole = f"; the full cache gets {percent(full)} of the scored tokens right" if full else ""
    return [
        f"Compressed before any question instead of after each, a cache loses {cost}, in nats a token{whole}.",
        sentence(
            [_between(findings, "none", "before any question"), _between(findings, "each", "after each question")]
        ),
        "The five papers compress after the question, where a policy can read off what it will be asked.",
        "Next: how a chat declines after the turn whose question was read.",
    ]


def _between(findings: Findings, way: str, when: str) -> str:
    """Who loses more or less than whom, in one of the ways of asking."""
    rows = findings.of(asking.BETWEEN, way=way)
    if not rows:
        return ""
    told = grouped(
        [(row, f"{row.keys['left']} at {row.keys['budget']:g} ({number(row)})") for row in rows],
        above="more is lost with",
        below="less is lost with",
        undecided="no clearly other amount is lost with",
    )
    # One policy, the first, stands on the right of all.
    return f"{when}, beside {rows[0].keys['right']}, {told}"


def turns(findings: Findings) -> list[str]:
    """How a chat declines after the turn whose question was read."""
    rows = findings.of(asking.DECLINE)
    if not rows:
        return ["No chat was held."]
    told = grouped(
        [(row, f"{_named(row)} ({number(row)})") for row in rows],
        above="grows with",
        below="falls with",
        undecided="changes by no clear amount with",
    )
    return [
        f"From the first turn of a chat, whose question was read, to the later ones the loss, in nats a token, {told}.",
        "The order of the questions is random: without this knowledge no turn would be harder than another, but for "
        "the text between them.",
        "The five papers score the question that was read; next, all policies at equal bytes, in all_together.",
    ]


def _named(row: Row) -> str:
    return f"{row.keys['policy']} at {row.keys['budget']:g}"
