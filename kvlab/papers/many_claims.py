"""How sure a direction is where many were tested: p of one from its interval, q of each by Benjamini and Hochberg."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.papers.claim import DIRECTION, FAILS, HOLDS, SAMPLED, UNDECIDED, Claim, Verdict

LEVEL = 0.05
"""The allowed share of false ones among the directions that are called decided."""

DECIDED = (HOLDS, DIRECTION, FAILS)
REACH = 1.959964
"""How many standard errors a 95 % interval of a normal distribution reaches to either side."""


def p_value(claim: Claim, verdict: Verdict) -> float | None:
    """The two-sided p of a claim's direction: how often chance alone would put the value as far from the turn.

    It uses only the value and its 95 % interval, by a normal approximation. The standard error is half of the
    interval's width / 1.96. For an uneven interval it is the width of the half towards the turn / 1.96. So p is 0.05
    where the interval ends at the turn.

    Returns:
        None for a claim that is no finding or question, that was not measured, or that has no interval. Also None where
        the direction does not turn at one number of the claim's own metric. Such a claim compares two metrics or
        several numbers, or asks for a range.
    """
    from scipy.stats import norm

    if claim.kind not in SAMPLED or verdict.verdict not in (*DECIDED, UNDECIDED):
        return None
    turns = claim.direction.turns(claim.metric)
    if len(turns) != 1 or claim.direction.tested(claim.metric) != [claim.metric]:
        return None
    if verdict.value is None or verdict.low is None or verdict.high is None:
        return None
    turn = turns[0][1]
    half = verdict.value - verdict.low if turn < verdict.value else verdict.high - verdict.value
    return float(2 * norm.sf(abs(verdict.value - turn) / half * REACH)) if half > 0 else None


def q_values(of_tests: Sequence[float | None]) -> list[float | None]:
    """The q of each p among all of them (Benjamini and Hochberg 1995); None stays None and does not count."""
    from scipy.stats import false_discovery_control

    known = [p for p in of_tests if p is not None]
    if not known:
        return [None] * len(of_tests)
    found = iter(false_discovery_control(known, method="bh"))
    return [None if p is None else float(next(found)) for p in of_tests]
