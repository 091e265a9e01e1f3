"""Tests of one number, each a small model with a `kind`. `conditions` has all that a claim may state.

`check` takes only the values and returns (passed, what was compared). `standing` also takes their intervals, and says
whether the test is met or missed throughout them, or open.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvlab.papers.uncertainty import Doubt, Judged, Lookup, Standing, against, spread

Reference = float | str


def number_of(reference: Reference | None, value_of: Lookup) -> tuple[float, str]:
    """The number behind a reference, and how to print it."""
    assert reference is not None, "a claim that asks for the paper's value has one"
    if isinstance(reference, str):
        value = value_of(reference)
        return value, f"{reference} ({value:.4g})"
    return float(reference), f"{reference:.4g}"


class Test(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str | None = Field(None, description="replaces the claim's own metric in this test")

    def needs(self, own: str) -> set[str]:
        """The metrics this test reads, where `own` is the claim's metric."""
        named = {self.metric or own}
        for field in ("than", "to"):
            reference = getattr(self, field, None)
            if isinstance(reference, str):
                named.add(reference)
        return named

    def tested(self, own: str) -> list[str]:
        """The metrics whose values this test is about, without those that it compares them with."""
        return [self.metric or own]

    @property
    def side(self) -> int:
        """On which side of its turn it passes: 1 above, -1 below, 0 where it has no such turn."""
        return 0

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float | None:
        """Where the test of a single number turns; None where there is no such number."""
        return None

    def turns(self, own: str) -> list[tuple[str, float]]:
        """The metrics that are compared with a number of the claim, each with the number at which its test turns."""
        than = getattr(self, "than", None)
        if isinstance(than, str):
            return []
        turn = self.threshold({}.__getitem__, None)
        turn = than if turn is None else turn
        return [] if turn is None else [(self.metric or own, turn)]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        raise NotImplementedError

    def standing(self, own: str, value_of: Lookup, paper_value: float | None) -> Judged:
        """Compare the numbers with their intervals, and say where the test stays open."""
        return Standing.of(self.check(own, value_of, paper_value)[0]), []


class Within(Test):
    """Near `to` (the paper's value if absent): by a difference, a share of it, or a factor in either direction."""

    kind: Literal["within"]
    of: Literal["absolute", "relative", "factor"]
    tolerance: float = Field(gt=0)
    to: Reference | None = None

    @model_validator(mode="after")
    def _factor_above_one(self) -> Within:
        if self.of == "factor" and self.tolerance <= 1:
            raise ValueError("a tolerance that is a factor must exceed 1")
        return self

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value = value_of(name)
        reference = paper_value if self.to is None else self.to
        target, label = number_of(reference, value_of)
        if self.to is None:
            label = f"the paper's {label}"
        if self.of == "absolute":
            passed, how = abs(value - target) <= self.tolerance, f"within {self.tolerance:g} of"
        elif self.of == "relative":
            passed, how = abs(value - target) <= self.tolerance * abs(target), f"within {self.tolerance:.0%} of"
        else:
            same_sign = value * target > 0
            passed = same_sign and 1 / self.tolerance <= value / target <= self.tolerance
            how = f"within a factor of {self.tolerance:g} of"
        return passed, f"{name} = {value:.4g}, asked to be {how} {label}"

    def standing(self, own: str, value_of: Lookup, paper_value: float | None) -> Judged:
        name, other = self.metric or own, self.to if isinstance(self.to, str) else None
        target = number_of(paper_value if self.to is None else self.to, value_of)[0]
        low, high = against(name, other, value_of)
        first, last = self._region(target)
        if low == high or (first <= low and high <= last) or high < first or last < low:
            return super().standing(own, value_of, paper_value)
        turn = next(edge for edge in (first, last) if low <= edge <= high)
        return Standing.OPEN, [Doubt(name, low, high, turn, fixed=other is None)]

    def _region(self, target: float) -> tuple[float, float]:
        """The values that pass, from the first to the last."""
        if self.of == "factor":
            first, last = sorted((target / self.tolerance, target * self.tolerance))
            return first, last
        room = self.tolerance * (abs(target) if self.of == "relative" else 1)
        return target - room, target + room


class PrintsAs(Test):
    """Prints as `to` (the paper's value if absent) does with so many `decimals`: what the same arithmetic must give.

    `inputs` is how far the rounding of the printed inputs may move our number. It is a number, or the metric of an
    analysis that computes it.
    """

    kind: Literal["prints_as"]
    decimals: int = Field(ge=0)
    to: Reference | None = None
    inputs: Reference = 0.0

    def needs(self, own: str) -> set[str]:
        return super().needs(own) | ({self.inputs} if isinstance(self.inputs, str) else set())

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value = value_of(name)
        target = number_of(paper_value if self.to is None else self.to, value_of)[0]
        room = number_of(self.inputs, value_of)[0]
        # Half a digit either way, as the paper may round a tie up or to even; the rest is what floats are off by.
        passed = abs(value - target) <= 0.5 * 10**-self.decimals + room + 1e-9
        allowed = f"; the rounding of the inputs moves it by up to {room:.2g}" if room else ""
        shown = f"{value:.{self.decimals}f}, asked to print as {target:.{self.decimals}f}"
        return passed, f"{name} = {value:.4g} prints as {shown}{allowed}"


class NotCompared(Test):
    """No test of size: the numbers have different units, or with `same_unit` are of different comparisons."""

    kind: Literal["not_compared"]
    because: str = Field(min_length=1)
    same_unit: bool = False

    def needs(self, own: str) -> set[str]:
        return set()

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        return False, self.because


class _Turning(Test):
    """A test of one number that turns at one point; `_at` says whether the point itself passes."""

    _above: ClassVar[bool]
    _at: ClassVar[bool]

    @property
    def side(self) -> int:
        return 1 if self._above else -1

    def _passes(self, value: float, turn: float) -> bool:
        return self._at if value == turn else (value > turn) is self._above

    def standing(self, own: str, value_of: Lookup, paper_value: float | None) -> Judged:
        name, turn = self.metric or own, self.threshold(value_of, paper_value)
        assert turn is not None, "these tests turn somewhere"
        than = getattr(self, "than", None)
        other = than if isinstance(than, str) else None
        low, high = against(name, other, value_of, getattr(self, "factor", 1.0))
        inside = low <= turn <= high if not self._at else self._passes(low, turn) is not self._passes(high, turn)
        doubt = Doubt(name, low, high, turn, fixed=other is None)
        # Two sides that are equal throughout, as where both find everything: there was no room for one to be ahead.
        two = other is not None or turn == 0
        if two and low == high == turn and not self._at and spread(name, value_of):
            return Standing.OPEN, [doubt]
        if low == high or not inside:
            return super().standing(own, value_of, paper_value)
        return Standing.OPEN, [doubt]


class _Comparison(_Turning):
    """With factor x `than`, some `margin` away from it."""

    _at: ClassVar[bool] = False

    than: Reference
    margin: float = Field(0.0, ge=0)
    factor: float = Field(1.0, gt=0)

    def _limit(self, value_of: Lookup, sign: str) -> str:
        label = number_of(self.than, value_of)[1]
        times = f"{self.factor:g} x " if self.factor != 1 else ""
        return f"{times}{label}" + (f" {sign} {self.margin:g}" if self.margin else "")


class Greater(_Comparison):
    """Above factor x `than` + margin, strictly."""

    _above: ClassVar[bool] = True

    kind: Literal["greater"]

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float:
        return number_of(self.than, value_of)[0] * self.factor + self.margin

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value, limit = value_of(name), self.threshold(value_of, paper_value)
        return self._passes(value, limit), f"{name} = {value:.4g}, asked to exceed {self._limit(value_of, '+')}"


class Less(_Comparison):
    """Below factor x `than` - margin, strictly."""

    _above: ClassVar[bool] = False

    kind: Literal["less"]

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float:
        return number_of(self.than, value_of)[0] * self.factor - self.margin

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value, limit = value_of(name), self.threshold(value_of, paper_value)
        return self._passes(value, limit), f"{name} = {value:.4g}, asked to lie below {self._limit(value_of, '-')}"


class _Bound(_Turning):
    """A number that the metric may reach, and not pass."""

    _at: ClassVar[bool] = True
    _asked: ClassVar[str]

    value: float

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float:
        return self.value

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value = value_of(name)
        return self._passes(value, self.value), f"{name} = {value:.4g}, asked to be {self._asked} {self.value:g}"


class AtLeast(_Bound):
    """At or above a number."""

    _above: ClassVar[bool] = True
    _asked: ClassVar[str] = "at least"

    kind: Literal["at_least"]


class AtMost(_Bound):
    """At or below a number."""

    _above: ClassVar[bool] = False
    _asked: ClassVar[str] = "at most"

    kind: Literal["at_most"]
