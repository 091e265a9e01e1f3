"""What a paper's ledger says, in about five sentences that are computed from its verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from kvlab import papers
from kvlab.analyses.telling import listed, plural
from kvlab.workbench.report import growth
from kvlab.workbench.report.ledger import UNTESTED, WEAKEST, Entry, Tally, by_model, number
from kvlab.workbench.report.subjects import Subject

NAMED = 3  # findings that a sentence names; the others are counted
HOLDING = (papers.HOLDS, papers.DIRECTION)
OPEN = (papers.UNMEASURED, UNTESTED)


Standing = tuple[str, dict[str, str]]
"""A finding's name, and on each model that measured it what it stands as."""


def standings(of_paper: Iterable[Entry]) -> list[Standing]:
    """Every finding, those with a name of their own first; the others are called by their place in the paper.

    On each model a finding stands as the weakest of its claims does.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    names: dict[tuple[str, str], str] = {}
    for entry in of_paper:
        if entry.group == "findings":
            names[entry.claim.fact] = entry.claim.finding or entry.claim.where
            of_models = found.setdefault(entry.claim.fact, {})
            if entry.state not in OPEN:
                of_models.setdefault(entry.model, []).append(entry.state)
    return [
        (names[fact], {model: min(states, key=WEAKEST.index) for model, states in found[fact].items()})
        for fact in sorted(found, key=lambda fact: names[fact] != fact[1])
    ]


def digest(of_paper: Sequence[Entry], order: Sequence[Subject]) -> list[str]:
    """The sentences on one paper, those with nothing to say left out.

    How many findings stand where; which hold and which fail on every model that measured them; which differ between
    models or stay undecided; how ours lie beside the printed numbers, and which way that goes with the model's size;
    what is counted apart.

    Args:
        of_paper: the entries of one paper, on all models.
        order: the models, the smallest first; none where nothing was measured.
    """
    found = standings(of_paper)
    measured = [standing for standing in found if standing[1]]
    if not measured:
        if not (count := len(found)):
            return ["It has no findings."]
        if count == 1:
            return ["Its only finding has not been measured yet."]
        return [f"None of its {count} findings has been measured yet."]
    sentences = [
        _counts(of_paper, order),
        _everywhere(measured, "holds", HOLDING, len(order)),
        _everywhere(measured, "fails", (papers.FAILS,), len(order)),
        _mixed(measured) if len(order) > 1 else _everywhere(measured, "stays undecided", (papers.UNDECIDED,), 1),
        _printed(of_paper, order),
        _apart(of_paper, order),
    ]
    return [sentence for sentence in sentences if sentence]


def _counts(of_paper: Iterable[Entry], order: Sequence[Subject]) -> str:
    tallies = {model: Tally.of(mine).findings for model, mine in by_model(of_paper).items()}
    total = sum(next(iter(tallies.values())).values())
    told = []
    for subject in order:
        counted = tallies[subject.name]
        parts = [f"{counted[state]} {_verb(state, counted[state])}" for state in papers.VERDICTS[:-1] if counted[state]]
        told.append(f"on {subject.label} {listed(parts) or 'none has been measured'}")
    return f"Of its {total} {plural(total, 'finding')}, {'; '.join(told)}."


def _verb(state: str, count: int) -> str:
    one = {papers.HOLDS: "holds", papers.DIRECTION: "holds in direction only", papers.FAILS: "fails"}
    words = one.get(state, "is undecided")
    return words if count == 1 else words.replace("holds", "hold").replace("fails", "fail").replace("is ", "are ")


def _everywhere(measured: Iterable[Standing], verb: str, wanted: Sequence[str], models: int) -> str:
    """Which findings stand so wherever they were measured."""
    names = [name for name, mine in measured if set(mine.values()) <= set(wanted)]
    where = " on every model that measured it" if models > 1 else ""
    at_least = ", at least in direction" if wanted is HOLDING else ""
    return f"What {verb}{where}{at_least}: {_some(names)}." if names else ""


def _mixed(measured: Iterable[Standing]) -> str:
    """Which hold on one model and not on another."""
    names = [name for name, mine in measured if len({state in HOLDING for state in mine.values()}) == 2]
    return f"What holds on some models and not on others: {_some(names)}." if names else ""


def _printed(of_paper: Sequence[Entry], order: Sequence[Subject]) -> str:
    """How ours lie beside the printed numbers of the same unit, on the largest model, and where that goes with size."""
    largest = order[-1]
    pairs = [
        (entry, paper, value)
        for entry in of_paper
        if entry.model == largest.name and entry.group == "findings"
        if (paper := growth.paper_value(entry.claim)) is not None and (value := entry.verdict.value) is not None
    ]
    if not pairs:
        return ""
    inside = sum(_covers(entry, paper) for entry, paper, _ in pairs)
    entry, paper, value = min(pairs, key=lambda pair: _apart_by(pair[1], pair[2]))
    lie = "lies" if inside < 2 else "lie"
    numbers = plural(len(pairs), "number")
    text = (
        f"On {largest.label} {inside or 'none'} of {len(pairs)} printed {numbers} that ours can be compared with {lie} "
        f"inside our interval; the closest is {number(paper)} ({entry.claim.where}), {number(value)} here"
    )
    ways = growth.trends(growth.rows(of_paper, order))
    if not ways:
        return f"{text}."
    return f"{text}; with the model's size {ways[growth.TOWARDS]} come nearer and {ways[growth.AWAY]} move away."


def _covers(entry: Entry, paper: float) -> bool:
    low, high = entry.verdict.low, entry.verdict.high
    return low is not None and high is not None and low <= paper <= high


def _apart_by(paper: float, value: float) -> float:
    """The distance as a share of the larger of the two."""
    most = max(abs(paper), abs(value))
    return abs(paper - value) / most if most else -math.inf


def _apart(of_paper: Iterable[Entry], order: Sequence[Subject]) -> str:
    """Checks and recomputed claims on the largest model, and what cannot be tested."""
    mine = [entry for entry in of_paper if entry.model == order[-1].name]
    tally, untested = Tally.of(mine), sum(bool(entry.claim.untested) for entry in mine)
    checks, recomputed = tally.met("checks"), tally.met("recomputed")
    parts = [
        f"{checks} checks are met" if checks else "",
        f"{recomputed} recomputed claims agree" if recomputed else "",
        f"{untested} {plural(untested, 'claim')} cannot be tested here" if untested else "",
    ]
    told = listed([part for part in parts if part])
    return f"Counted apart: {told}." if told else ""


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are; of several findings at one place, how many."""
    counted = Counter(names)
    told = [name if count == 1 else f"{name} ({count} findings)" for name, count in counted.items()][:NAMED]
    more = counted.total() - sum(count for _, count in list(counted.items())[:NAMED])
    return "; ".join(told) + (f"; and {more} more" if more else "")
