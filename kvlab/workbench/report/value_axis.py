"""The small axis under a value: our number, the paper's, and the point where the direction turns."""

from __future__ import annotations

from typing import Any

from kvlab import papers
from kvlab.papers.tests import Combination
from kvlab.workbench.report.ledger import Entry


def scale(entry: Entry) -> dict[str, Any] | None:
    """Positions from 0 to 100 on a common axis: of our value, its interval's ends, the paper's value, and the turn.

    The paper's value is left out if it has another unit than ours. The turn is the value at which the claim's direction
    changes. None where there is nothing to compare our value with.
    """
    verdict, claim = entry.verdict, entry.claim
    marks = {
        "value": verdict.value,
        "low": verdict.low,
        "high": verdict.high,
        "paper": claim.paper_value if claim.comparable else None,
        "turn": turn_of(claim),
    }
    known = {name: value for name, value in marks.items() if value is not None}
    if "value" not in known or len(known) < 2 or max(known.values()) == min(known.values()):
        return None
    low, high = min(known.values()), max(known.values())
    return {name: round(6 + 88 * (known[name] - low) / (high - low), 2) if name in known else None for name in marks}


def turn_of(claim: papers.Claim) -> float | None:
    """The value at which the direction of a claim changes, if that is a number and the claim tests its own metric.

    Of several tests, that of the first which does.
    """
    own = (turn for metric, turn in claim.direction.turns(claim.metric) if metric == claim.metric)
    return next(own, None)


def side_of(claim: papers.Claim) -> int:
    """The side of its turn on which the claim's direction asks its own metric to lie: 1 above it, -1 below.

    0 where it has no such turn.
    """
    if turn_of(claim) is None:
        return 0
    return next((test.side for test in _singles(claim.direction, claim.metric) if test.turns(claim.metric)), 0)


def _singles(test: papers.Condition, own: str) -> list[papers.Condition]:
    """The tests of the claim's own metric of which this one consists."""
    if isinstance(test, Combination):
        return [single for part in test.tests for single in _singles(part, test.metric or own)]
    return [test] if (test.metric or own) == own else []
