"""The worth of a verdict from a stand-in: a measure that replaces the paper's scores of tasks.

The rule is in docs/claims.md, *Weak stand-ins*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvlab.papers.claim import DIRECTION, FAILS, HOLDS, SAMPLED, UNDECIDED, WEAK, Claim, Verdict

EXPERIMENT: Final = "what_predicts_the_answer"
"""The experiment that measures how well stand-ins predict answers."""

ACROSS: Final = "across/{stand_in}/{outcome}"
"""Its metric: Spearman's correlation over policies at one budget on one prompt, averaged over documents."""
DOCUMENTS: Final = "documents/{stand_in}/{outcome}"
"""Its metric: the number of these documents."""

OUTCOMES: Final = {
    "kl": "KL of the next token",
    "response": "likelihood of the response",
    "answer": "likelihood of the right answer",
    "right": "share of the answer that is right",
}
"""The predicted outcomes: the first two along the full cache's response, the others on needles and questions."""

LEAST_RHO: Final = 0.5
LEAST_DOCUMENTS: Final = 8


@dataclass(frozen=True)
class Prediction:
    """How well a stand-in predicts an outcome on a model.

    Attributes:
        rho: the mean rank correlation (ACROSS); 1 where better by the stand-in is always better by the outcome.
        low, high: its 95 % interval over documents.
        documents: their number.
    """

    stand_in: str
    outcome: str
    rho: float
    low: float
    high: float
    documents: int

    @property
    def weak(self) -> bool:
        """Whether the stand-in does not predict the outcome; with too few documents the rule does not apply."""
        return self.documents >= LEAST_DOCUMENTS and (self.rho < LEAST_RHO or self.low <= 0 <= self.high)

    def __str__(self) -> str:
        return (
            f"{self.stand_in} and the {OUTCOMES[self.outcome]} have a rank correlation of {self.rho:.2f} "
            f"({self.low:.2f} to {self.high:.2f}) across policies, over {self.documents} documents"
        )


Predictions = Mapping[tuple[str, str], Prediction]
"""Stand-in and outcome -> how well it predicts, on one model."""


def outcome_of(stand_in: str) -> str:
    """The outcome that the rule correlates a stand-in with: the likelihood of the right answer, which has no ties.

    The likelihood itself is correlated with the share of the answer that comes out right.
    """
    return "right" if stand_in == "likelihood" else "answer"


def prediction_of(claim: Claim, predictions: Predictions) -> Prediction | None:
    """How well the claim's stand-in predicts answers; None for a claim without one, and where it was not measured."""
    if claim.stand_in is None or claim.kind not in SAMPLED:
        return None
    return predictions.get((claim.stand_in, outcome_of(claim.stand_in)))


def weighed(claim: Claim, verdict: Verdict, predictions: Predictions) -> Verdict:
    """The verdict by the rule for stand-ins: with a weak one a claim holds at most as WEAK, and never fails."""
    found = prediction_of(claim, predictions)
    if found is None or not found.weak:
        return verdict
    became = {HOLDS: WEAK, DIRECTION: WEAK, FAILS: UNDECIDED}.get(verdict.verdict)
    if became is None:
        return verdict
    return verdict.model_copy(update={"verdict": became, "why": f"{verdict.why} By a weak stand-in: {found}."})
