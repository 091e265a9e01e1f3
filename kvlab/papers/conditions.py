"""The tests a claim may state. Each is a small model with a `kind`; `check` returns (passed, what was compared)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Reference = float | str
Lookup = Callable[[str], float]


def _number(reference: Reference | None, value_of: Lookup) -> tuple[float, str]:
    """The number behind a reference, and how to print it."""
    assert reference is not None, "a claim that asks for the paper's value has one"
    if isinstance(reference, str):
        value = value_of(reference)
        return value, f"{reference} ({value:.4g})"
    return float(reference), f"{reference:.4g}"


class _Test(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str | None = Field(None, description="tested in place of the claim's own metric")

    def needs(self, own: str) -> set[str]:
        """The metrics this test reads, where `own` is the claim's metric."""
        named = {self.metric or own}
        for field in ("than", "to"):
            reference = getattr(self, field, None)
            if isinstance(reference, str):
                named.add(reference)
        return named

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float | None:
        """Where the test of a single number turns, for the remark on intervals; None where there is no such number."""
        return None


class Within(_Test):
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
        target, label = _number(reference, value_of)
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


class _Comparison(_Test):
    """With factor x `than`, some `margin` away from it."""

    than: Reference
    margin: float = Field(0.0, ge=0)
    factor: float = Field(1.0, gt=0)

    def _limit(self, value_of: Lookup, sign: str) -> str:
        label = _number(self.than, value_of)[1]
        times = f"{self.factor:g} x " if self.factor != 1 else ""
        return f"{times}{label}" + (f" {sign} {self.margin:g}" if self.margin else "")


class Greater(_Comparison):
    """Above factor x `than` + margin, strictly."""

    kind: Literal["greater"]

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float:
        return _number(self.than, value_of)[0] * self.factor + self.margin

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value, limit = value_of(name), self.threshold(value_of, paper_value)
        return value > limit, f"{name} = {value:.4g}, asked to exceed {self._limit(value_of, '+')}"


class Less(_Comparison):
    """Below factor x `than` - margin, strictly."""

    kind: Literal["less"]

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float:
        return _number(self.than, value_of)[0] * self.factor - self.margin

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value, limit = value_of(name), self.threshold(value_of, paper_value)
        return value < limit, f"{name} = {value:.4g}, asked to lie below {self._limit(value_of, '-')}"


class _Bound(_Test):
    """A number that the metric may reach, and not pass."""

    value: float

    def threshold(self, value_of: Lookup, paper_value: float | None) -> float:
        return self.value


class AtLeast(_Bound):
    """At or above a number."""

    kind: Literal["at_least"]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value = value_of(name)
        return value >= self.value, f"{name} = {value:.4g}, asked to be at least {self.value:g}"


class AtMost(_Bound):
    """At or below a number."""

    kind: Literal["at_most"]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        name = self.metric or own
        value = value_of(name)
        return value <= self.value, f"{name} = {value:.4g}, asked to be at most {self.value:g}"


class Monotone(_Test):
    """The metrics, in the order given, rise or fall; a step against the trend may be at most `slack`."""

    kind: Literal["monotone"]
    metrics: list[str] = Field(min_length=2)
    trend: Literal["increasing", "decreasing"]
    slack: float = Field(0.0, ge=0)

    def needs(self, own: str) -> set[str]:
        return set(self.metrics)

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        values = [value_of(name) for name in self.metrics]
        sign = 1 if self.trend == "increasing" else -1
        passed = all(sign * (b - a) >= -self.slack for a, b in zip(values, values[1:], strict=False))
        series = ", ".join(f"{value:.4g}" for value in values)
        return passed, f"{self.metrics[0]} to {self.metrics[-1]} = {series}, asked to be {self.trend}"


class _OfInterval(_Test):
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

    One repetition has no spread, so that it is clear of nothing.
    """

    than: Reference
    _side: ClassVar[str]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        low, high, interval = self._interval(own, value_of)
        limit, label = _number(self.than, value_of)
        why = f"{interval}, asked to lie {self._side} {label} as a whole"
        if low == high:
            return False, f"{why}; it has no width, as of a single repetition"
        return (low > limit if self._side == "above" else high < limit), why


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
        target, label = _number(paper_value if self.to is None else self.to, value_of)
        if self.to is None:
            label = f"the paper's {label}"
        if low <= target <= high and target != 0 and low <= 0 <= high:
            return False, f"{interval}, asked to contain {label}, and contains 0 besides: too wide to tell"
        return low <= target <= high, f"{interval}, asked to contain {label}"


class Combination(_Test):
    """Of several tests."""

    tests: list[Condition] = Field(min_length=1)

    def needs(self, own: str) -> set[str]:
        return set().union(*(test.needs(self.metric or own) for test in self.tests))


class AllOf(Combination):
    """Every one of several tests."""

    kind: Literal["all_of"]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        results = [test.check(self.metric or own, value_of, paper_value) for test in self.tests]
        missed = [why for passed, why in results if not passed]
        return not missed, "; ".join(missed or [why for _, why in results])


class AnyOf(Combination):
    """At least one of several tests."""

    kind: Literal["any_of"]

    def check(self, own: str, value_of: Lookup, paper_value: float | None) -> tuple[bool, str]:
        results = [test.check(self.metric or own, value_of, paper_value) for test in self.tests]
        met = [why for passed, why in results if passed]
        return bool(met), "; ".join(met) or "none of these: " + "; ".join(why for _, why in results)


Condition = Annotated[
    Within | Greater | Less | ClearlyGreater | ClearlyLess | AtLeast | AtMost | Monotone | Covers | AllOf | AnyOf,
    Field(discriminator="kind"),
]
Combination.model_rebuild()
AllOf.model_rebuild()
AnyOf.model_rebuild()
