"""How sure a number is: its interval, that of a difference, and where a test is left open by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Lookup = Callable[[str], float]


class Standing(Enum):
    """The outcome of a test on numbers with intervals: met or missed throughout, or open, as both occur."""

    MET = "met"
    MISSED = "missed"
    OPEN = "open"

    @classmethod
    def of(cls, passed: bool) -> Standing:
        return cls.MET if passed else cls.MISSED


@dataclass(frozen=True)
class Doubt:
    """A test that is open.

    Attributes:
        metric: what is tested.
        low, high: its interval; against another metric, both intervals are in it.
        turn: the point in it at which the test turns.
        fixed: whether the turn is a number of the claim, and no measured one.
    """

    metric: str
    low: float
    high: float
    turn: float
    fixed: bool = True

    @property
    def half(self) -> float:
        """Half of the interval's width: a larger effect would have been seen."""
        return (self.high - self.low) / 2

    @property
    def flat(self) -> bool:
        """Whether all repetitions gave the same, exactly where the test turns."""
        return self.low == self.high

    def __str__(self) -> str:
        if self.flat:
            return f"{self.metric} is {self.turn:.4g} in every repetition"
        return f"the interval [{self.low:.4g}, {self.high:.4g}] of {self.metric} contains {self.turn:.4g}"


Judged = tuple[Standing, list[Doubt]]


def ends(name: str, value_of: Lookup) -> tuple[float, float]:
    """The interval of a metric; the value twice if it has none."""
    if spread(name, value_of):
        return value_of(f"{name}/low"), value_of(f"{name}/high")
    return value_of(name), value_of(name)


def spread(name: str, value_of: Lookup) -> bool:
    """Whether a metric was logged with an interval, if only one without width: several repetitions that were alike."""
    try:
        value_of(f"{name}/low")
    except KeyError:
        return False
    return True


def against(name: str, other: str | None, value_of: Lookup, factor: float = 1.0) -> tuple[float, float]:
    """The interval of a metric, widened by that of `factor` times another one which it is compared with.

    For two independent metrics it covers a point as often as the interval of their difference covers 0. On the same
    documents it mostly covers a point more often. Source: Zou and Donner 2008, "Construction of confidence limits about
    effect measures".
    """
    value, (low, high) = value_of(name), ends(name, value_of)
    if other is None:
        return low, high
    reference, (least, most) = value_of(other), ends(other, value_of)
    return (
        value - math.hypot(value - low, factor * (most - reference)),
        value + math.hypot(high - value, factor * (reference - least)),
    )


def step(first: str, second: str, value_of: Lookup) -> tuple[float, float]:
    """The interval of `second` less `first`."""
    low, high = against(second, first, value_of)
    return low - value_of(first), high - value_of(first)
