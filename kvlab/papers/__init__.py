"""The papers as data: claims (YAML), printed figures (CSV), and `judge`, which compares our numbers with them.

A claim carries two tests. The test of *direction* asks whether the effect has the sign that the paper reports; the test
of *size* asks whether it is as large. Direction and size passed: "holds". Direction alone: "holds in direction only".
Direction missed: "fails". An interval that contains the point where the direction turns: "undecided". A number that a
test needs and nobody measured: "not measured". A measure that replaces scores of tasks and predicts answers poorly:
"holds by a weak stand-in" (`stand_ins`).
"""

from __future__ import annotations

from kvlab.papers.claim import (
    DIRECTION,
    FAILS,
    FULL_ONLY,
    HOLDS,
    NO_RUN,
    SAMPLED,
    UNDECIDED,
    UNMEASURED,
    VERDICTS,
    WEAK,
    Claim,
    Paper,
    Verdict,
    load_file,
)
from kvlab.papers.registry import OWN, claims, figure, figures, of_project, own, papers, quoted
from kvlab.papers.tests import Condition
from kvlab.papers.verdict import judge

__all__ = [
    "DIRECTION",
    "FAILS",
    "FULL_ONLY",
    "HOLDS",
    "NO_RUN",
    "OWN",
    "SAMPLED",
    "UNDECIDED",
    "UNMEASURED",
    "VERDICTS",
    "WEAK",
    "Claim",
    "Condition",
    "Paper",
    "Verdict",
    "claims",
    "figure",
    "figures",
    "judge",
    "load_file",
    "of_project",
    "own",
    "papers",
    "quoted",
]
