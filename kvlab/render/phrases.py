"""Words for what a notebook found: phrases that follow from numbers and their intervals, never typed beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvlab import papers
from kvlab.analyses.findings import Row
from kvlab.errors import KvlabError

UNDECIDED = "not told apart from none"


def number(row: Row, digits: int = 3) -> str:
    """The value with its 95 % interval: `0.035 (0.023 to 0.047)`; the value alone where it has no interval.

    Args:
        digits: significant digits.
    """
    value = _shown(row.value, digits)
    if row.low is None or row.high is None:
        return value
    return f"{value} ({_shown(row.low, digits)} to {_shown(row.high, digits)})"


def percent(row: Row, digits: int = 2) -> str:
    """As `number`, of a share: `41 % (38 to 44)`."""
    value = f"{_shown(100 * row.value, digits)} %"
    if row.low is None or row.high is None:
        return value
    return f"{value} ({_shown(100 * row.low, digits)} to {_shown(100 * row.high, digits)})"


def ends(row: Row) -> tuple[float, float]:
    """The interval's ends; the value twice where it has no interval."""
    return (row.value, row.value) if row.low is None or row.high is None else (row.low, row.high)


def side(row: Row, above: str, below: str, undecided: str = UNDECIDED, at: float = 0.0) -> str:
    """The phrase that the row's interval allows: `above` or `below` only where the whole interval lies on that side.

    Args:
        undecided: the phrase where the interval contains `at`.
        at: where the direction turns.
    """
    low, high = ends(row)
    if low > at:
        return above
    return below if high < at else undecided


def _where(row: Row) -> str:
    """The side of 0 that the row's whole interval lies on: "above", "below" or "undecided"."""
    return side(row, "above", "below", "undecided")


def moved(row: Row, above: str, below: str, undecided: str = UNDECIDED, shown: Callable[[Row], str] = number) -> str:
    """The side's phrase with the amount: `saves 0.455 (0.129 to 0.781)`, without the sign that `below` has told.

    Args:
        shown: `number` or `percent`.
    """
    phrase = side(row, above, below, undecided)
    if _where(row) == "below":
        low, high = (None if end is None else -end for end in (row.high, row.low))
        row = replace(row, value=-row.value, low=low, high=high)
    return f"{phrase} {shown(row)}"


def by_side(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by the side of 0 that their whole interval lies on: "above", "below", "undecided"."""
    sides: dict[str, list[Row]] = {"above": [], "below": [], "undecided": []}
    for row in rows:
        sides[_where(row)].append(row)
    return sides


def beside(row: Row, paper: float) -> str:
    """How the row compares with the number that the paper prints: inside its interval or not, and by what factor.

    Returns:
        A phrase such as "the paper's 0.3971 lies outside this interval: ours is 0.62 of it".
    """
    printed = _shown(paper, 4)
    if row.low is None or row.high is None:
        where = f"the paper has {printed}"
    elif row.low <= paper <= row.high or any(math.isclose(paper, end) for end in (row.low, row.high)):
        return f"the paper's {printed} lies inside this interval"
    else:
        where = f"the paper's {printed} lies outside this interval"
    if paper == 0:
        return where
    ratio = row.value / paper
    return f"{where}: {'ours has the other sign' if ratio < 0 else f'ours is {_shown(ratio, 2)} of it'}"


def stated(claim: str) -> float:
    """The number that the paper states for a claim, by the claim's id.

    Raises:
        KvlabError: there is no such claim, or it has no number.
    """
    values = [one.paper_value for one in papers.claims(paper=claim.split(".")[0]) if one.id == claim]
    if not values or values[0] is None:
        raise KvlabError(f"the paper states no number for the claim {claim!r}")
    return values[0]


def verdict(row: Row) -> str:
    """Whether a gain is one: "a gain", "a loss", or not told apart from none."""
    return side(row, above="a gain", below="a loss")


def grouped(rows: Iterable[tuple[Row, str]], **phrases: str) -> str:
    """Named rows by the side of 0 that they lie on: `ahead of a (0.2) and b (0.1) and behind c (-0.2)`.

    Args:
        rows: each with the words for it.
        phrases: what stands before the words of each side: `above`, `below` and `undecided`.
    """
    sides: dict[str, list[str]] = {name: [] for name in ("above", "below", "undecided")}
    for row, words in rows:
        sides[_where(row)].append(words)
    return listed([f"{phrases[name]} {listed(words)}" for name, words in sides.items() if words])


def listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def sentence(parts: list[str]) -> str:
    """Clauses as one sentence, `A; b.`; without the empty ones, and empty without any."""
    text = "; ".join(part for part in parts if part)
    return text and f"{text[0].upper()}{text[1:]}."


def _shown(value: float, digits: int) -> str:
    """With so many significant digits, never in powers of ten, and without a minus before nothing."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}".replace("-0", "0")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 6)}f}"


def plural(count: int, word: str) -> str:
    """The word, with an s for more than one or none."""
    return word if count == 1 else f"{word}s"
