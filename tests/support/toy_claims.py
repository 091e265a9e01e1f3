"""A claim to be judged."""

from __future__ import annotations

from kvlab.papers import Claim


def claim(**changes) -> Claim:
    """A claim that a metric of about 0.6 exceeds zero."""
    content = {
        "id": "toy",
        "paper": "p",
        "where": "table 1",
        "summary": "s",
        "metric": "m",
        "paper_value": 0.6,
        "experiment": "e",
        "direction": {"kind": "greater", "than": 0.0},
        "size": {"kind": "within", "of": "absolute", "tolerance": 0.1},
        **changes,
    }
    return Claim.model_validate(content)
