"""Tasks x policies x budgets on a live model: one prefill serves all; every answer is written to disk at once."""

from kvlab.evaluation.answering import answers, feed
from kvlab.evaluation.conversing import answered
from kvlab.evaluation.planning import Plan, plan
from kvlab.evaluation.records import Answer, read
from kvlab.evaluation.results import by_turn, decline, lengths, metrics, summary, table
from kvlab.evaluation.running import run

__all__ = [
    "Answer",
    "Plan",
    "answered",
    "answers",
    "by_turn",
    "decline",
    "feed",
    "lengths",
    "metrics",
    "plan",
    "read",
    "run",
    "summary",
    "table",
]
