"""The forest plot: the quoted findings of each paper, our value on every model with its interval, the paper's number.

Each line has a scale of its own, in which no effect lies at `NO_EFFECT` and what the paper says lies right of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlab import papers
from kvlab.render.sentences import ours
from kvlab.workbench.report.ledger import HOLDING, WEAKEST, Entry
from kvlab.workbench.report.model_trends import Row, ends_of, paper_value
from kvlab.workbench.report.value_axis import side_of, turn_of

NO_EFFECT = 30.0
"""Where a line has no effect, in percent of its width."""
EDGES = (2.0, 98.0)
FARTHEST = 1.6
"""How many times as far from no effect as our farthest end the paper's number may lie and still set the scale."""


@dataclass(frozen=True)
class Dot:
    """Our value on one model. x, low and high are in percent of the line's width."""

    model: str
    state: str
    x: float
    low: float
    high: float
    words: str


@dataclass(frozen=True)
class Line:
    """A finding, by the weakest of its claims that can be drawn.

    Attributes:
        name: of the finding.
        claim: the claim that is drawn.
        states: on each model that measured it, what the finding stands as.
        dots: in the order of the models' sizes.
        paper: where the paper's number lies, in percent of the width; None where it prints none of our unit.
        beyond: whether the paper's number lies outside and is drawn at the edge.
    """

    name: str
    claim: papers.Claim
    states: dict[str, str]
    dots: list[Dot]
    paper: float | None
    beyond: bool

    @property
    def holding(self) -> int:
        """On how many models it holds, at least in direction."""
        return sum(state in HOLDING for state in self.states.values())

    @property
    def failing(self) -> int:
        return sum(state == papers.FAILS for state in self.states.values())

    @property
    def holds(self) -> str:
        return f"{self.holding} of {len(self.states)}"


def of_paper(rows: Sequence[Row], paper: papers.Paper) -> list[Line]:
    """The lines of a paper: its quoted findings, then those of which it prints a number that ours can be compared with.

    rows: of this paper.
    """
    printed = [row.claim.fact[1] for row in rows if row.group == "findings" and paper_value(row.claim) is not None]
    return lines(rows, [*paper.quoted, *printed])


def lines(rows: Iterable[Row], names: Sequence[str]) -> list[Line]:
    """A line for each of these findings of one paper that has a claim which can be drawn, in the order of `names`."""
    of_finding: dict[str, list[Row]] = {}
    for row in rows:
        if row.claim.kind in papers.SAMPLED:
            of_finding.setdefault(row.claim.fact[1], []).append(row)
    drawn = (_line(name, of_finding.get(name, [])) for name in dict.fromkeys(names))
    return [line for line in drawn if line]


def strip(row: Row) -> Line | None:
    """The line of one claim; None where no model measured it or its direction turns at no number."""
    return _line(row.claim.id, [row])


def headline(found: Sequence[Line], models: int) -> str:
    """Of a paper's lines: how many of them hold on every model, at least in direction, and how many on none."""
    if not found:
        return "none of its quoted findings has been measured yet"
    everywhere = sum(line.holding == len(line.states) for line in found)
    if models == 1:
        return f"{everywhere} of {len(found)} hold"
    nowhere = sum(not line.holding for line in found)
    return f"{everywhere} of {len(found)} hold on every model" + (f", {nowhere} on none" if nowhere else "")


def _line(name: str, rows: Sequence[Row]) -> Line | None:
    states: dict[str, list[str]] = {}
    for row in rows:
        for entry in row.entries:
            if entry.measured and entry.state != papers.UNMEASURED:
                states.setdefault(entry.model, []).append(entry.state)
    drawn = [row for row in rows if side_of(row.claim) and any(map(_valued, row.entries))]
    if not drawn:
        return None
    row = min(drawn, key=lambda row: (_holding(row), paper_value(row.claim) is None, -sum(map(_valued, row.entries))))
    found = [
        (entry, entry.verdict.value) for entry in row.entries if _valued(entry) and entry.verdict.value is not None
    ]
    return _placed(name, row.claim, {model: min(mine, key=WEAKEST.index) for model, mine in states.items()}, found)


def _holding(row: Row) -> float:
    measured = [entry for entry in row.entries if _valued(entry)]
    return sum(entry.state in HOLDING for entry in measured) / len(measured)


def _valued(entry: Entry) -> bool:
    return entry.measured and entry.verdict.value is not None and entry.state != papers.UNMEASURED


def _placed(name: str, claim: papers.Claim, states: dict[str, str], found: Sequence[tuple[Entry, float]]) -> Line:
    turn, side = turn_of(claim), side_of(claim)
    assert turn is not None

    def effect(value: float) -> float:
        """How far a value lies from no effect, in the direction that the paper says."""
        return side * (value - turn)

    ends = [sorted(map(effect, ends_of(entry, value))) for entry, value in found]
    farthest = max(abs(end) for pair in ends for end in pair) or 1.0
    printed = paper_value(claim)
    paper = None if printed is None else effect(printed)
    reaching = [end for pair in ends for end in pair]
    if paper is not None and abs(paper) <= FARTHEST * farthest:
        reaching.append(paper)
    right, left = max(0.0, *reaching), max(0.0, *(-end for end in reaching))
    scales = [room / reach for room, reach in ((EDGES[1] - NO_EFFECT, right), (NO_EFFECT - EDGES[0], left)) if reach]
    scale = min(scales, default=1.0)

    def x(distance: float) -> float:
        return round(min(max(NO_EFFECT + scale * distance, EDGES[0]), EDGES[1]), 1)

    dots = [
        Dot(entry.model, entry.state, x(effect(value)), x(low), x(high), ours(entry.verdict))
        for (entry, value), (low, high) in zip(found, ends, strict=True)
    ]
    beyond = paper is not None and not EDGES[0] <= NO_EFFECT + scale * paper <= EDGES[1] + 1e-9
    return Line(name, claim, states, dots, None if paper is None else x(paper), beyond)
