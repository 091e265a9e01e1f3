"""A claim across models: our effect against the number of parameters, and whether it comes closer to the paper's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from kvlab import papers
from kvlab.render.phrases import number
from kvlab.workbench.report.ledger import UNTESTED, Entry
from kvlab.workbench.report.ledger_models import Subject
from kvlab.workbench.report.value_axis import turn_of

TOWARDS, AWAY, LEVEL = "towards the paper's", "away from the paper's", "no clear change"
MIXED = "changes, in no order of size"
TRENDS = (TOWARDS, AWAY, MIXED, LEVEL)
SAID = {
    TOWARDS: ("comes nearer to it", "come nearer to it"),
    AWAY: ("moves away from it", "move away from it"),
    MIXED: ("changes in no order of size", "change in no order of size"),
    LEVEL: ("does not change clearly", "do not change clearly"),
}
"""How they are counted in a sentence: of one, and of several or none."""


def ends_of(entry: Entry, value: float) -> tuple[float, float]:
    """The interval of an entry's value; the value alone where there is none."""
    low, high = entry.verdict.low, entry.verdict.high
    return (value, value) if low is None or high is None else (low, high)


@dataclass(frozen=True)
class Point:
    """Our value on one model, with its interval."""

    subject: Subject
    entry: Entry
    parameters: int
    value: float

    @property
    def ends(self) -> tuple[float, float]:
        """The interval; the value alone where there is none."""
        return ends_of(self.entry, self.value)


@dataclass
class Row:
    """A claim with its entries, one for each model in the order of their sizes."""

    claim: papers.Claim
    entries: list[Entry]
    points: list[Point] = field(default_factory=list)

    @property
    def group(self) -> str:
        return self.entries[0].group

    @property
    def found(self) -> bool:
        """Whether a model at least has a verdict on it."""
        return any(entry.state not in (papers.UNMEASURED, UNTESTED) for entry in self.entries)

    @property
    def profile(self) -> str:
        """The profile of the points, where it is not that of the entries; else empty.

        Models that were measured by more profiles than others are compared by one that all have.
        """
        profiles = {point.entry.origin.profile for point in self.points}
        shown = {entry.model: entry for entry in self.entries}
        less = any(point.entry is not shown[point.entry.model] for point in self.points)
        return ", ".join(sorted(profiles)) if less else ""

    @property
    def trend(self) -> str | None:
        """Where the effect goes as models grow; None without a paper's number or a second size.

        All pairs of models of different size count. A pair has clearly changed if its two intervals do not overlap; a
        value without an interval counts as a point. The larger model is then nearer to the paper's number, or further
        away. The effect goes one way on two conditions. The smallest and the largest model have clearly changed that
        way, and no pair has clearly changed the other way. The effect does not change clearly if no pair has. All else
        is in no order of size: a change that comes and goes, or one that some models make and the largest does not.
        """
        paper = paper_value(self.claim)
        pairs = [(small, large) for small, large in combinations(self.points, 2) if small.parameters < large.parameters]
        if paper is None or not pairs:
            return None
        clear = [pair for pair in pairs if _apart(*pair)]
        if not clear:
            return LEVEL
        ways = {_nearer(*pair, paper) for pair in clear}
        ends = self.points[0].parameters, self.points[-1].parameters
        if len(ways) > 1 or not any((small.parameters, large.parameters) == ends for small, large in clear):
            return MIXED
        return TOWARDS if ways.pop() else AWAY


def _apart(one: Point, other: Point) -> bool:
    """Whether their intervals do not overlap."""
    return one.ends[0] > other.ends[1] or other.ends[0] > one.ends[1]


def _nearer(small: Point, large: Point, paper: float) -> bool:
    return abs(large.value - paper) < abs(small.value - paper)


def rows(judged: Iterable[Entry], subjects: Sequence[Subject]) -> list[Row]:
    """The claims in their order, each with its entries, and with its points on the models of known size.

    The points are of the same profile on all models, where they have one in common.
    """
    by_claim: dict[str, Row] = {}
    for entry in judged:
        by_claim.setdefault(entry.claim.id, Row(entry.claim, [])).entries.append(entry)
    known = {subject.name: subject for subject in subjects}
    for row in by_claim.values():
        points = [_point(known.get(entry.model), entry.compared) for entry in row.entries]
        row.points = sorted(filter(None, points), key=lambda point: point.parameters)
    return list(by_claim.values())


def _point(subject: Subject | None, entry: Entry) -> Point | None:
    """None on a model of unknown size, and where nothing was measured: a number that its control voids is no effect."""
    value = entry.verdict.value
    if value is None or entry.state == papers.UNMEASURED or subject is None or not subject.parameters:
        return None
    return Point(subject, entry, subject.parameters, value)


def paper_value(claim: papers.Claim) -> float | None:
    """The paper's number, if ours has the same unit."""
    return claim.paper_value if claim.comparable else None


def trends(rows: Iterable[Row]) -> Counter[str]:
    """Count the findings by their trend.

    A finding does not change clearly if some of its claims do not, and the others agree. A finding whose claims go
    different ways is in no order of size.
    """
    facts: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row.group == "findings" and row.trend:
            facts.setdefault(row.claim.fact, set()).add(row.trend)
    return Counter(_together(ways) for ways in facts.values())


def _together(ways: set[str]) -> str:
    if len(ways) == 1:
        return next(iter(ways))
    return LEVEL if LEVEL in ways and len(ways) == 2 else MIXED


# ---------------------------------------------------------------------------------------------------- a small plot

WIDTH, HEIGHT = 280, 114  # of the picture, in its own units, which are pixels on a wide screen
LEFT, RIGHT, TOP, BOTTOM = 44, 276, 22, 92  # of the area of the plot


@dataclass(frozen=True)
class Mark:
    """A point in the picture."""

    point: Point
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """A line across the picture.

    kind: "paper" at the paper's number, "turn" where the direction turns, "end" for a tick at the least or largest
        drawn value.
    """

    kind: str
    y: float
    label: str


@dataclass(frozen=True)
class Goal:
    """The mark of the paper's model at its size.

    Attributes:
        x: the place of its line.
        name: of the model.
        y: the height of the paper's number; None where that has another unit.
    """

    x: float
    name: str
    y: float | None


@dataclass(frozen=True)
class Plot:
    """Where everything of a small plot lies; x grows with the logarithm of the number of parameters.

    goal: the paper's model; None where its size is not known.
    """

    marks: list[Mark]
    lines: list[Line]
    sizes: list[tuple[float, str]]
    goal: Goal | None


def reach(rows: Iterable[Row]) -> int:
    """The size of the largest model of a paper that any plot of a page marks; 0 where none is known.

    Recomputed claims have no plot.
    """
    drawn = [row for row in rows if row.points and row.group != "recomputed"]
    return max((row.claim.model.parameters for row in drawn if row.claim.model), default=0)


def plot(row: Row, subjects: Sequence[Subject], reach: int = 0) -> Plot | None:
    """The small plot of a claim; None where it was measured on models of fewer than two sizes.

    All plots of a page share their x axis, which spans the sizes of all its models, up to `reach` at least.
    """
    if len({point.parameters for point in row.points}) < 2:
        return None
    lines = {"paper": paper_value(row.claim), "turn": turn_of(row.claim)}
    across = {kind: value for kind, value in lines.items() if value is not None}
    heights = [end for point in row.points for end in (*point.ends, point.value)] + list(across.values())
    low, high = min(heights), max(heights)
    span = high - low or abs(high) or 1.0

    def y(value: float) -> float:
        return round(BOTTOM - (value - low) / span * (BOTTOM - TOP), 1)

    known = {subject.parameters for subject in subjects if subject.parameters}
    known |= {size for size in (reach, row.claim.model.parameters if row.claim.model else 0) if size}
    first, last = math.log(min(known)), math.log(max(known))

    def x(parameters: int) -> float:
        return round(LEFT + 12 + (math.log(parameters) - first) / (last - first) * (RIGHT - LEFT - 24), 1)

    marks = [Mark(p, x(p.parameters), y(p.value), y(p.ends[0]), y(p.ends[1])) for p in row.points]
    goal = None
    if row.claim.model:
        goal = Goal(
            x(row.claim.model.parameters), row.claim.model.name, y(across["paper"]) if "paper" in across else None
        )
    labels = _with_room([(x(subject.parameters), subject.size) for subject in subjects if subject.parameters])
    lines = _lines([Line(kind, y(value), number(value)) for kind, value in across.items()])
    ends = [Line("end", y(value), number(value)) for value in (low, high)]
    return Plot(marks, [*lines, *(end for end in ends if not _touches(end, lines))], labels, goal)


def _lines(lines: list[Line]) -> list[Line]:
    """The lines across; the turn has no label where it would touch the paper's."""
    if len(lines) == 2 and _touches(lines[1], lines[:1]):
        lines[1] = replace(lines[1], label="")
    return lines


def _touches(line: Line, others: Iterable[Line], least: float = 9) -> bool:
    return any(abs(line.y - other.y) < least for other in others)


def _with_room(labels: list[tuple[float, str]], least: float = 27) -> list[tuple[float, str]]:
    """The labels of an axis that leave each other room, the first and the last before those between."""
    chosen: list[tuple[float, str]] = []
    for label in sorted(labels, key=lambda label: (label[0] not in (labels[0][0], labels[-1][0]), label[0])):
        if all(abs(label[0] - other[0]) >= least for other in chosen):
            chosen.append(label)
    return sorted(chosen)
