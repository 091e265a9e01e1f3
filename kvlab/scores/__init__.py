"""LongBench's scores: which metric each of its tasks has, the best over the references, the mean in percent.

The metrics themselves are in `kvlab.scores.metrics`; nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.errors import KvlabError, nearest
from kvlab.scores.metrics import (
    classification,
    code_similarity,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    retrieval_zh,
    rouge_l,
    rouge_l_zh,
)
from kvlab.scores.predictions import read_predictions

__all__ = [
    "LONGBENCH",
    "Convention",
    "classification",
    "code_similarity",
    "convention",
    "count",
    "percent",
    "qa_f1",
    "qa_f1_zh",
    "read_predictions",
    "retrieval",
    "retrieval_zh",
    "rouge_l",
    "rouge_l_zh",
    "score",
    "score_each",
    "score_task",
]


@dataclass(frozen=True)
class Convention:
    """How LongBench asks and scores one of its tasks.

    Attributes:
        metric: (prediction, reference answer[, classes]) -> score in [0, 1].
        new_tokens: the longest answer, in tokens.
        chat: whether the prompt goes through the model's chat template.
        first_line: whether only the first line of the stripped prediction counts.
    """

    metric: Callable[..., float]
    new_tokens: int
    chat: bool = True
    first_line: bool = False


LONGBENCH: dict[str, Convention] = {
    "narrativeqa": Convention(qa_f1, 128),
    "qasper": Convention(qa_f1, 128),
    "multifieldqa_en": Convention(qa_f1, 64),
    "multifieldqa_zh": Convention(qa_f1_zh, 64),
    "hotpotqa": Convention(qa_f1, 32),
    "2wikimqa": Convention(qa_f1, 32),
    "musique": Convention(qa_f1, 32),
    "dureader": Convention(rouge_l_zh, 128),
    "gov_report": Convention(rouge_l, 512),
    "qmsum": Convention(rouge_l, 512),
    "multi_news": Convention(rouge_l, 512),
    "vcsum": Convention(rouge_l_zh, 512),
    "trec": Convention(classification, 64, chat=False, first_line=True),
    "triviaqa": Convention(qa_f1, 32, chat=False, first_line=True),
    "samsum": Convention(rouge_l, 128, chat=False, first_line=True),
    "lsht": Convention(classification, 64, chat=False, first_line=True),
    "passage_count": Convention(count, 32),
    "passage_retrieval_en": Convention(retrieval, 32),
    "passage_retrieval_zh": Convention(retrieval_zh, 32),
    "lcc": Convention(code_similarity, 64, chat=False),
    "repobench-p": Convention(code_similarity, 64, chat=False),
}
"""LongBench's 21 tasks, in its order."""


def convention(task: str) -> Convention:
    """The convention of the LongBench task of that name; raises KvlabError where there is none."""
    if task not in LONGBENCH:
        raise KvlabError(nearest(task, LONGBENCH, "LongBench task", limit=len(LONGBENCH)))
    return LONGBENCH[task]


def score(task: str, prediction: str, answers: Iterable[str], classes: Sequence[str] | None = None) -> float:
    """The best score of one prediction over its reference answers, in [0, 1]; 0 where there are none, as in LongBench.

    `classes`: all classes of a classification task. Raises KvlabError for an unknown task, a classification without
    classes, and a reference answer that the task's metric cannot read.
    """
    rule = convention(task)
    if rule.first_line:
        prediction = prediction.strip().split("\n")[0]
    if rule.metric is not classification:
        return max((rule.metric(prediction, answer) for answer in answers), default=0.0)
    if not classes:
        raise KvlabError(f"{task} is scored by the classes that a prediction names: it needs 'all_classes'")
    return max((classification(prediction, answer, classes) for answer in answers), default=0.0)


def score_each(task: str, predictions: Iterable[Mapping[str, Any]]) -> list[float]:
    """The score of each of {"pred", "answers", "all_classes"}, in [0, 1].

    Raises KvlabError as `score` does, with the number of the prediction, and where there are no predictions.
    """
    convention(task)
    scores = []
    for number, prediction in enumerate(predictions, 1):
        try:
            scores.append(score(task, prediction["pred"], prediction["answers"], prediction.get("all_classes")))
        except KvlabError as error:
            raise KvlabError(f"prediction {number}: {error}") from error
    if not scores:
        raise KvlabError(f"there are no predictions of {task} to score")
    return scores


def score_task(task: str, predictions: Iterable[Mapping[str, Any]]) -> float:
    """LongBench's score of a task: the mean over {"pred", "answers", "all_classes"}, in percent with two decimals."""
    return percent(score_each(task, predictions))


def percent(scores: Sequence[float]) -> float:
    """The mean of scores in [0, 1], in percent with two decimals."""
    return round(100 * sum(scores) / len(scores), 2)
