"""Seconds as a person reads them."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """Seconds in words that fit a table: "8 s", "3 min 05 s", "2 h 10 min"."""
    seconds = math.ceil(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
