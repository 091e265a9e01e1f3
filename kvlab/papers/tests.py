"""The tests that a claim may state: those of several numbers, of intervals and of other tests; `single` has others."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvlab.papers.number_tests import (
    AtLeast,
    AtMost,
    Greater,
    Less,
    NotCompared,
    PrintsAs,
    Reference,
    Test,
    Within,
    number_of,
)
from kvlab.papers.uncertainty import Doubt, Judged, Lookup, Standing, step


class Monotone(Test):
    """The metrics, in the order given, rise or fall; a step against the trend may be at most `slack`."""

    kind: Literal["monotone"]
    metrics: list[str] = Field(min_length=2)
    trend: Literal["increasing", "decreasing"]
    slack: float = Field(0.0, ge=0)

    def needs(self, own: str) -> set[str]:
        return set(self.metrics)

    def tested(self, own: str) -> list[str]:
        return self.metrics

    def standing(self, own: str, value_of: Lookup, paper_value: float | None) -> Judged:
        doubts = []
        for name, following in pairwise(self.metrics):
            steps = (name, following) if self.trend == "increasing" else (following, name)
            low, high = step(*steps, value_of)
            if high < -self.slack:
                return Standing.MISSED, []
            if low < -self.slack:
                what = f"{steps[1]} less {steps[0]}"
                doubts.append(Doubt(what, low, high, -self.slack))
        return (Standing.OPEN, doubts) if doubts else (Standing.MET, [])

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        values = [value_of(name) for name in self.metrics]
        sign = 1 if self.trend == "increasing" else -1
        passed = all(sign * (b - a) >= -self.slack for a, b in pairwise(values))
        series = ", ".join(f"{value:.4g}" for value in values)
        return passed, f"{self.metrics[0]} to {self.metrics[-1]} = {series}, asked to be {self.trend}"


class _OfInterval(Test):
    """A test of the whole interval of a metric (of a mean, 95 %), which NAME/low and NAME/high give."""

    def needs(self, own: str) -> set[str]:
        name = self.metric or own
        return super().needs(own) | {f"{name}/low", f"{name}/high"}

    def _interval(self, own: str, value_of: Lookup) -> tuple[float, float, str]:
        """Its ends, and how to print it."""
        name = self.metric or own
        low, high = value_of(f"{name}/low"), value_of(f"{name}/high")
        return low, high, f"the interval of {name}, {low:.4g} to {high:.4g}"


class _Clear(_OfInterval):
    """The whole interval lies on one side of `than`: the margin is our own spread.

    One repetition has no spread, so it is clear of nothing.
    """

    than: Reference
    _side: ClassVar[str]

    @property
    def side(self) -> int:
        return 1 if self._side == "above" else -1

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        low, high, interval = self._interval(own, value_of)
        limit, label = number_of(self.than, value_of)
        why = f"{interval}, asked to lie {self._side} {label} as a whole"
        if low == high:
            return False, f"{why}; it has no width, as of a single repetition"
        return (low > limit if self._side == "above" else high < limit), why

    def standing(self, own: str, value_of: Lookup, paper_value: float | None) -> Judged:
        low, high, _ = self._interval(own, value_of)
        limit = number_of(self.than, value_of)[0]
        if low <= limit <= high:
            fixed = not isinstance(self.than, str)
            return Standing.OPEN, [Doubt(self.metric or own, low, high, limit, fixed)]
        return Standing.of(low > limit if self._side == "above" else high < limit), []


class ClearlyGreater(_Clear):
    """The whole interval lies above `than`."""

    kind: Literal["clearly_greater"]
    _side: ClassVar[str] = "above"


class ClearlyLess(_Clear):
    """The whole interval lies below `than`."""

    kind: Literal["clearly_less"]
    _side: ClassVar[str] = "below"


class Covers(_OfInterval):
    """The interval contains `to` (the paper's value if absent), its ends included, and lies on that value's side of 0.

    An interval so wide that it also contains no effect at all would agree with any paper.
    """

    kind: Literal["covers"]
    to: Reference | None = None

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        low, high, interval = self._interval(own, value_of)
        target, label = number_of(paper_value if self.to is None else self.to, value_of)
        if self.to is None:
            label = f"the paper's {label}"
        if low <= target <= high and target != 0 and low <= 0 <= high:
            return False, f"{interval}, asked to contain {label}, and also contains 0: too wide to tell"
        return low <= target <= high, f"{interval}, asked to contain {label}"

    def standing(self, own: str, value_of: Lookup, paper_value: float | None) -> Judged:
        low, high, _ = self._interval(own, value_of)
        target = number_of(paper_value if self.to is None else self.to, value_of)[0]
        if low <= target <= high and target != 0 and low <= 0 <= high:
            return Standing.OPEN, [Doubt(self.metric or own, low, high, 0.0)]
        return super().standing(own, value_of, paper_value)


class Combination(Test):
    """Several tests; a single one with the outcome `_decides` decides them all."""

    _decides: ClassVar[Standing]

    tests: list[Condition] = Field(min_length=1)

    def needs(self, own: str) -> set[str]:
        return set().union(*(test.needs(self.metric or own) for test in self.tests))

    def tested(self, own: str) -> list[str]:
        return [name for test in self.tests for name in test.tested(self.metric or own)]

    def turns(self, own: str) -> list[tuple[str, float]]:
        return [turn for test in self.tests for turn in test.turns(self.metric or own)]

    def standing(self, own: str, value_of: Lookup, paper_value: float | None) -> Judged:
        parts = [test.standing(self.metric or own, value_of, paper_value) for test in self.tests]
        standings = {standing for standing, _ in parts}
        if self._decides in standings:
            return self._decides, []
        if Standing.OPEN in standings:
            return Standing.OPEN, [doubt for _, doubts in parts for doubt in doubts]
        return Standing.of(self._decides is Standing.MISSED), []


class AllOf(Combination):
    """Every one of several tests."""

    _decides: ClassVar[Standing] = Standing.MISSED

    kind: Literal["all_of"]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        results = [test.check(self.metric or own, value_of, paper_value) for test in self.tests]
        missed = [why for passed, why in results if not passed]
        return not missed, "; ".join(missed or [why for _, why in results])


class AnyOf(Combination):
    """At least one of several tests."""

    _decides: ClassVar[Standing] = Standing.MET

    kind: Literal["any_of"]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        results = [test.check(self.metric or own, value_of, paper_value) for test in self.tests]
        met = [why for passed, why in results if passed]
        return bool(met), "; ".join(met) or "none of these: " + "; ".join(why for _, why in results)


Condition = Annotated[
    Within
    | PrintsAs
    | NotCompared
    | Greater
    | Less
    | ClearlyGreater
    | ClearlyLess
    | AtLeast
    | AtMost
    | Monotone
    | Covers
    | AllOf
    | AnyOf,
    Field(discriminator="kind"),
]
Combination.model_rebuild()
AllOf.model_rebuild()
AnyOf.model_rebuild()
