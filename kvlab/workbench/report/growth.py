"""A claim across models: our effect against the number of parameters, and whether it comes closer to the paper's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvlab import papers
from kvlab.workbench.report.ledger import Entry, number
from kvlab.workbench.report.scales import turn_of
from kvlab.workbench.report.subjects import Subject

TOWARDS, AWAY, LEVEL = "towards the paper's", "away from the paper's", "no clear change"
TRENDS = (TOWARDS, AWAY, LEVEL)
SAID = {TOWARDS: "come nearer to it", AWAY: "move away from it", LEVEL: "do not change clearly"}
"""How they are counted in a sentence."""


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
        low, high = self.entry.verdict.low, self.entry.verdict.high
        return (self.value, self.value) if low is None or high is None else (low, high)


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
    def trend(self) -> str | None:
        """Where the effect goes from the smallest model to the largest; None without a paper's number or a second size.

        It changes clearly if their intervals do not overlap; values without an interval are taken as they are.
        """
        paper = paper_value(self.claim)
        if paper is None or len({point.parameters for point in self.points}) < 2:
            return None
        small, large = self.points[0], self.points[-1]
        if small.ends[0] <= large.ends[1] and large.ends[0] <= small.ends[1]:
            return LEVEL
        return TOWARDS if abs(large.value - paper) < abs(small.value - paper) else AWAY


def rows(judged: Iterable[Entry], subjects: Sequence[Subject]) -> list[Row]:
    """The claims in their order, each with its entries and with the points of those models whose size is known."""
    by_claim: dict[str, Row] = {}
    for entry in judged:
        by_claim.setdefault(entry.claim.id, Row(entry.claim, [])).entries.append(entry)
    known = {subject.name: subject for subject in subjects}
    for row in by_claim.values():
        points = [_point(known.get(entry.model), entry) for entry in row.entries]
        row.points = sorted(filter(None, points), key=lambda point: point.parameters)
    return list(by_claim.values())


def _point(subject: Subject | None, entry: Entry) -> Point | None:
    """None where nothing was measured, or on a model of unknown size."""
    value = entry.verdict.value
    return (
        None
        if value is None or subject is None or not subject.parameters
        else Point(subject, entry, subject.parameters, value)
    )


def paper_value(claim: papers.Claim) -> float | None:
    """The paper's number, if ours has the same unit."""
    return claim.paper_value if claim.comparable else None


def trends(rows: Iterable[Row]) -> Counter[str]:
    """How many findings go where; one whose claims do not go the same way has no clear change."""
    facts: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row.group == "findings" and row.trend:
            facts.setdefault(row.claim.fact, set()).add(row.trend)
    return Counter(next(iter(ways)) if len(ways) == 1 else LEVEL for ways in facts.values())


# ---------------------------------------------------------------------------------------------------- a small plot

WIDTH, HEIGHT = 216, 92  # of the picture, in its own units, which are pixels on a wide screen
LEFT, RIGHT, TOP, BOTTOM = 44, 200, 10, 70  # of the area of the plot


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
    """A line across the picture: "paper" at the paper's number, "turn" where the direction turns."""

    kind: str
    y: float
    label: str


@dataclass(frozen=True)
class Plot:
    """Where everything of a small plot lies; x grows with the logarithm of the number of parameters."""

    marks: list[Mark]
    lines: list[Line]
    sizes: list[tuple[float, str]]

    @property
    def path(self) -> str:
        return " ".join(f"{mark.x},{mark.y}" for mark in self.marks)


def plot(row: Row, subjects: Sequence[Subject]) -> Plot | None:
    """The small plot of a claim; None where it was measured on models of fewer than two sizes.

    All plots of a page share their x axis, which spans the sizes of all its models.
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

    sizes = sorted({math.log(subject.parameters) for subject in subjects if subject.parameters})

    def x(parameters: int) -> float:
        return round(LEFT + 12 + (math.log(parameters) - sizes[0]) / (sizes[-1] - sizes[0]) * (RIGHT - LEFT - 24), 1)

    marks = [Mark(p, x(p.parameters), y(p.value), y(p.ends[0]), y(p.ends[1])) for p in row.points]
    labels = _apart([(x(subject.parameters), subject.size) for subject in subjects if subject.parameters])
    return Plot(marks, _lines({kind: (y(value), number(value)) for kind, value in across.items()}), labels)


def _lines(across: dict[str, tuple[float, str]], least: float = 9) -> list[Line]:
    """The lines with their labels; the turn has none where it would touch the paper's."""
    lines = [Line(kind, *place) for kind, place in across.items()]
    if len(lines) == 2 and abs(lines[0].y - lines[1].y) < least:
        lines[1] = replace(lines[1], label="")
    return lines


def _apart(labels: list[tuple[float, str]], least: float = 27) -> list[tuple[float, str]]:
    """The labels of an axis that leave each other room, the first and the last before those between."""
    chosen: list[tuple[float, str]] = []
    for label in sorted(labels, key=lambda label: (label[0] not in (labels[0][0], labels[-1][0]), label[0])):
        if all(abs(label[0] - other[0]) >= least for other in chosen):
            chosen.append(label)
    return sorted(chosen)
