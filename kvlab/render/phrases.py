"""Numbers and lists in words, as the report and the sentences on claims write them."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """A number as a table wants it, with three decimals if it is small; a dash for none."""
    if value is None:
        return "–"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.2e}".split("e")
        power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"{mantissa}×10{power}".replace("-", "−")
    text = "0" if value == 0 else f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
    return text.replace("-", "−")


def with_interval(value: float, low: float, high: float) -> str:
    """`0.035 (0.023 to 0.047)`: as `number`, but with as many decimals as show where a narrow interval ends."""
    decimals = 1 - math.floor(math.log10(high - low)) if high > low else 0
    if 3 < decimals <= 6:
        shown = [f"{each:.{decimals}f}".replace("-", "−") for each in (value, low, high)]
    else:
        shown = [number(each) for each in (value, low, high)]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def plural(count: int, word: str) -> str:
    """The word, with an s for more than one or none."""
    return word if count == 1 else f"{word}s"
