"""The base of a task: it makes examples, seeded and of a wanted length for a model's tokenizer, and scores answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvlab.lib.parameters import Parameters

if TYPE_CHECKING:
    from kvlab.inputs.models import LM


@dataclass(frozen=True)
class Turn:
    """One of several questions over one context, as `Example` has them."""

    question: str
    answers: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True)
class Example:
    """One prompt and what a right answer would be.

    Attributes:
        id: unique for a task and its parameters, and stable: by it a rerun recognises finished answers.
        context: the long part of the prompt, which may be compressed before the question is known.
        question: what follows; empty where a benchmark does not separate the two. The prompt is context + question.
        answers: reference answers; the task decides how to use them.
        max_new_tokens: the longest answer.
        chat: whether the prompt goes through the model's chat template, where it has one.
        prefix: how the answer begins; fed after the prompt and not part of the prediction.
        marks: columns for the result tables: length, depth, kind, all_classes, ...
        until: generation ends at this text (whitespace at the start does not count); empty for the model's own end
            alone.
        turns: several questions over the context, where a task asks them, the first one's own among them.
        branched: whether each of these is a request of its own, and not the next turn of one chat.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    chat: bool = True
    prefix: str = ""
    marks: dict[str, Any] = field(default_factory=dict)
    until: str = ""
    turns: tuple[Turn, ...] = ()
    branched: bool = False

    @property
    def prompt(self) -> str:
        return self.context + self.question

    @property
    def parts(self) -> tuple[Example, ...]:
        """One example for each question, whose mark `turn` counts from 1; itself where there is only one question."""
        if not self.turns:
            return (self,)
        return tuple(
            replace(
                self,
                id=f"{self.id}-{number}",
                question=turn.question,
                answers=turn.answers,
                prefix=turn.prefix,
                marks={**self.marks, "turn": number},
                turns=(),
            )
            for number, turn in enumerate(self.turns, 1)
        )


class Task(Parameters):
    """A benchmark with its parameters: a frozen pydantic model, so that it can name itself in a signature."""

    summary: ClassVar[str] = ""
    metric: ClassVar[str] = "score"
    """The score that stands for an answer in tables and figures."""

    seed: int = 0

    @classmethod
    def _sentence(cls, problem: Mapping[str, Any]) -> str:
        where = ".".join(map(str, problem["loc"])) or "parameters"
        return f"{where}: {problem['msg'].removeprefix('Value error, ')}, and is {problem['input']!r}"

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self)})"

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """The examples for a model, at most `limit` of them (spread over the task's kinds, not its first ones).

        Raises:
            KvlabError: a length that the model does not take, or material that is missing.
        """
        raise NotImplementedError

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """Scores of one answer, each in [0, 1], `metric` among them."""
        raise NotImplementedError
