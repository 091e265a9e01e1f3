"""Competition mathematics: problems whose answer a model reasons towards at length (MATH, AIME), from public files."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvlab.errors import KvlabError
from kvlab.lib import extras
from kvlab.lib.files import expanded, objects
from kvlab.lib.parameters import PathText
from kvlab.tasks.base import Example, Task
from kvlab.tasks.making import require_tokenizer, spread

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

ASKED = "\n\nReason step by step, and put the final answer in \\boxed{}."
SECONDS = 5
"""A comparison that takes longer is given up, and the answer counts as wrong."""
WORDS = 8


class Competition(Task):
    """Problems from a JSONL file, a short prompt and a long answer each.

    A line has `problem` (or `question`) and `answer`. Without an `answer`, the content of \\boxed{} in `solution` is
    the answer. Of an `answer` that ends with `#### 42`, only the part after the mark counts. `id` (or `unique_id`),
    `level` and `subject` (or `type`) are read where a line has them. Capitals in these names do not matter.

    Scores, each in [0, 1]:
        correct: whether the answer in \\boxed{} (else the last formula or number) equals the file's. math-verify
            compares them as fractions, roots, sets, intervals and percentages, with units left out.
        answered: whether there is a \\boxed{} at all. An answer that was cut off has none.
        repetition: the share of the response's runs of eight words that came before. It is high for a model that
            rambles.

    Attributes:
        file: the JSONL file.
        new_tokens: the longest answer; shortened to what the model's context leaves.
        chat: whether to use the chat template.
    """

    metric: ClassVar[str] = "correct"

    file: PathText | None = None
    new_tokens: int = Field(4096, ge=1)
    chat: bool = True

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """One for each line, at most `limit`, the levels or subjects in turn.

        Raises KvlabError without a file, for a line that is not right, and for a problem that leaves no room.
        """
        require_tokenizer(lm)
        extras.need("math_verify")
        if self.file is None:
            raise KvlabError(f"{self.name} reads problems from a JSONL file: --data FILE, or file= in Python")
        found = [self._example(number, line) for number, line in objects(expanded(self.file), "problem")]
        for example in spread(found, limit, kind=lambda each: each.marks.get("kind")):
            tokens = lm.encode(example.prompt, chat="auto" if self.chat else False).shape[1]
            if tokens >= lm.context_length:
                raise KvlabError(f"{example.id} has {tokens} tokens, and {lm.name} takes {lm.context_length}")
            longest = min(self.new_tokens, lm.context_length - tokens)
            yield replace(example, max_new_tokens=longest)

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """See the class."""
        return {
            "correct": float(equal(example.answers[0], prediction)),
            "answered": float("\\boxed" in prediction),
            "repetition": repetition(prediction),
        }

    def _example(self, number: int, line: dict[str, Any]) -> Example:
        where = f"{self.file}, line {number}"
        fields = {str(key).lower(): value for key, value in line.items()}
        problem = _first(fields, "problem", "question")
        if not isinstance(problem, str) or not problem.strip():
            raise KvlabError(f"{where} has no text under `problem` or `question`; it has {', '.join(line)}")
        answer = answer_of(fields)
        if not answer:
            raise KvlabError(f"{where} has no `answer`, and no \\boxed{{}} in its `solution`")
        kind = _first(fields, "level", "subject", "type")
        return Example(
            id=f"{self.name}-{_first(fields, 'unique_id', 'id') or number}",
            context=problem.strip(),
            question=ASKED,
            answers=(answer,),
            max_new_tokens=self.new_tokens,
            chat=self.chat,
            marks={} if kind is None else {"kind": str(kind)},
        )


class Math(Competition):
    """MATH (Hendrycks et al. 2021, arXiv 2103.03874) and files like it: MATH-500, GSM8K. See `Competition`."""

    name: ClassVar[str] = "math"
    summary: ClassVar[str] = (
        "MATH: competition problems from a JSONL file, reasoned at length, answers compared as formulas"
    )


class Aime(Competition):
    """AIME: every answer is a whole number from 0 to 999. See `Competition`."""

    name: ClassVar[str] = "aime"
    summary: ClassVar[str] = "AIME: competition problems from a JSONL file, with whole numbers up to 999 as answers"

    new_tokens: int = Field(16384, ge=1)

    def _example(self, number: int, line: dict[str, Any]) -> Example:
        example = super()._example(number, line)
        if not re.fullmatch(r"\d{1,3}", example.answers[0]):
            raise KvlabError(
                f"{self.file}, line {number} has the answer {example.answers[0]!r:.40}, which is no whole number from "
                "0 to 999; the task math takes any"
            )
        return example


def _first(fields: dict[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def answer_of(fields: dict[str, Any]) -> str:
    """The reference answer of a line, empty where it has none."""
    found = fields.get("answer")
    if answer := "" if found is None else str(found).strip():
        return answer.rpartition("####")[2].strip()
    return boxed(str(fields.get("solution") or ""))


def boxed(text: str) -> str:
    """The content of the last \\boxed{} of a text, empty where there is none.

    >>> boxed("so $\\\\boxed{\\\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest if found else ""):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:place].strip()
    return ""


def equal(answer: str, prediction: str) -> bool:
    """Whether a prediction ends in the answer, by math-verify."""
    from math_verify import parse, verify

    # Its limits are by alarms, which only the main thread can set.
    seconds: Any = SECONDS if threading.current_thread() is threading.main_thread() else None
    wanted = parse(f"\\boxed{{{answer}}}", parsing_timeout=seconds)
    return verify(wanted, parse(prediction, parsing_timeout=seconds), timeout_seconds=seconds)


def repetition(text: str) -> float:
    """The share of a text's runs of eight words that came earlier in it; 0 for a text of fewer words.

    >>> repetition("one two three " * 10)
    0.87
    """
    words = text.split()
    runs = [tuple(words[place : place + WORDS]) for place in range(len(words) - WORDS + 1)]
    return round(1 - len(set(runs)) / len(runs), 4) if runs else 0.0
