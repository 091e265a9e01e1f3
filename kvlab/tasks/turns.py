"""Several questions over one context: the turns of one chat, or requests that share a compressed cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product, zip_longest
from random import Random
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.scores.metrics import qa_f1
from kvlab.tasks.base import Example, Task, Turn
from kvlab.tasks.hay import Hay
from kvlab.tasks.making import Lengths, Several, fill, fit, piece_lengths, require_tokenizer, spread, words

if TYPE_CHECKING:
    from kvlab.inputs.corpus import Question
    from kvlab.inputs.models import LM

OPENING = "Read this text, and answer the questions about it.\n\n"
_QUESTION = "\n\nQuestion: {}\n"
_SHORT = 40  # characters of an answer over an article
_ATTEMPTS = 6
_NEW_TOKENS = {"squad": 24, "kv": 12, "needle": 12}

Made = tuple[tuple[Turn, ...], Callable[[int], str]]
"""The questions of an example, and its text of about so many tokens."""


class Turns(Task):
    """Several questions over one context (after SCBench: Li et al. 2024), in two modes.

    - `chat`: turns of one chat. A later question comes after the earlier ones and the model's own answers, which are
      stored whole.
    - `requests`: each question is answered by itself. Compressed at the context, the cache is compressed once, before
      any question. Each question then goes on from a copy of it. Compressed at the prompt, the cache is compressed anew
      for each question, after that was read.

    The kinds of contexts are:

    - `squad`: questions over paragraphs of one of `articles`, each over another paragraph where there are enough;
    - `kv`: words with numbers, of which some are asked for;
    - `needle`: secret codes of towns, spread over `document`.

    `turns` counts the questions, and `trials` the contexts of each mode, kind and length. A length is that of the
    context with its first question. Answers over `kv` and `needle` begin as the question's own sentence does. The score
    `score` is LongBench's F1 over words for `squad`, and otherwise whether the number is in the prediction. The mark
    `turn` counts from 1. The mark `context` names the context that both modes ask about. A limit counts contexts.
    """

    name: ClassVar[str] = "turns"
    summary: ClassVar[str] = "several questions over one context: turns of a chat, and requests that share its cache"

    lengths: Lengths = (1024,)
    modes: Several[Literal["chat", "requests"]] = ("chat", "requests")
    kinds: Several[Literal["squad", "kv", "needle"]] = ("squad", "kv", "needle")
    turns: Annotated[int, Field(ge=2, le=10)] = 5
    trials: int = Field(2, ge=1)
    articles: Several[str] = ("squad/Oxygen", "squad/Rhine", "squad/Pharmacy", "squad/Yuan_dynasty")
    document: str = "sotu/1962"

    def examples(self, lm: LM, limit: int | None = None) -> Iterator[Example]:
        """See Task.examples; about 20 ms for each context of 1,024 tokens. Both modes ask the same."""
        require_tokenizer(lm)
        cells = product(self.modes, self.kinds, self.lengths, range(self.trials))
        for cell in spread(cells, limit, kind=lambda cell: cell[:2]):
            yield self._example(lm, *cell)

    def score(self, example: Example, prediction: str) -> dict[str, float]:
        """`score`, see the class."""
        if example.marks.get("kind") == "squad":
            first, _, _ = prediction.strip().partition("\n")
            return {"score": max(qa_f1(first, answer) for answer in example.answers)}
        return {"score": float(example.answers[0] in re.findall(r"\d+", prediction.replace(",", "")))}

    def _example(self, lm: LM, mode: str, kind: str, length: int, trial: int) -> Example:
        makers = {"squad": self._squad, "kv": self._kv, "needle": self._needle}
        made, text = makers[kind](lm, Random(f"{self.seed} {kind} {length} {trial}"), length, trial)
        document = {"squad": self.articles[trial % len(self.articles)], "needle": self.document, "kv": "made"}[kind]

        def build(room: int) -> Example:
            return Example(
                id=f"turns-{mode}-{kind}-{length}-{trial}",
                context=OPENING + text(room),
                question=made[0].question,
                answers=made[0].answers,
                prefix=made[0].prefix,
                max_new_tokens=_NEW_TOKENS[kind],
                marks={
                    "kind": kind,
                    "mode": mode,
                    "length": length,
                    "document": document,
                    "trial": trial,
                    "context": f"{kind}-{length}-{trial}",
                },
                turns=made,
                branched=mode == "requests",
            )

        return fit(lm, build, length, f"{self.name} of kind {kind}")

    def _squad(self, lm: LM, draw: Random, length: int, trial: int) -> Made:
        """Paragraphs with answers, and before them other text of the article."""
        article = self.articles[trial % len(self.articles)]
        by_paragraph: dict[str, list[Question]] = {}
        for question in corpus.questions(article):
            if len(min(question.answers, key=len)) <= _SHORT:
                by_paragraph.setdefault(question.paragraph, []).append(question)
        room = 3 * length // 4
        for _ in range(_ATTEMPTS):
            paragraphs = draw.sample(list(by_paragraph), min(self.turns, len(by_paragraph)))
            if sum(piece_lengths(lm, paragraphs)) <= room:
                break
        else:
            # The shortest paragraphs, several questions on each where not all of them have room.
            sizes = dict(zip(by_paragraph, piece_lengths(lm, list(by_paragraph)), strict=True))
            shortest, used = sorted(sizes, key=sizes.__getitem__), 0
            paragraphs = []
            for paragraph in shortest[: self.turns]:
                used += sizes[paragraph]
                if used <= room or not paragraphs:
                    paragraphs.append(paragraph)
        on_each = [draw.sample(by_paragraph[paragraph], len(by_paragraph[paragraph])) for paragraph in paragraphs]
        by_round = [question for questions in zip_longest(*on_each) for question in questions if question is not None]
        questions = list({question.id: question for question in by_round}.values())[: self.turns]
        if len(questions) < self.turns:
            raise KvlabError(f"turns: {article} has too few questions with short answers for {self.turns} turns")
        rest = "\n\n".join(dict.fromkeys(question.paragraph for question in corpus.questions(article)))
        for paragraph in paragraphs:
            rest = rest.replace(paragraph, "")
        hay = Hay(lm, corpus.Document(article, rest))

        def text(tokens: int) -> str:
            return "\n\n".join([*([str(hay.cut(0, tokens))] if tokens else []), *paragraphs])

        return tuple(Turn(_QUESTION.format(q.question.strip()), q.answers) for q in questions), text

    def _kv(self, lm: LM, draw: Random, length: int, trial: int) -> Made:
        """Lines `word: number`, the asked ones spread evenly among them."""
        known = [word for word in words("noun") if 4 <= len(word) <= 9]
        names = draw.sample(known, min(length // 4 + self.turns, len(known)))
        lines = [(name, str(draw.randrange(10_000, 100_000))) for name in names]
        queried, others = lines[: self.turns], [f"{name}: {number}" for name, number in lines[self.turns :]]
        lengths = piece_lengths(lm, [f"{line}\n" for line in others])

        def text(tokens: int) -> str:
            shown = [others[index] for index in fill(lengths, tokens)]
            return "\n".join(_spread([f"{name}: {number}" for name, number in queried], shown))

        turns = [
            Turn(_QUESTION.format(f"Which number belongs to {name}?"), (number,), f"The number of {name} is")
            for name, number in queried
        ]
        return tuple(draw.sample(turns, len(turns))), text

    def _needle(self, lm: LM, draw: Random, length: int, trial: int) -> Made:
        """Sentences with a code each, at evenly spread depths of the document."""
        hay = Hay(lm, corpus.document(self.document))
        start = draw.randrange(len(hay.sentences))
        towns = draw.sample([word.capitalize() for word in words("noun") if 5 <= len(word) <= 8], self.turns)
        needles = [(town, str(draw.randrange(10_000, 100_000))) for town in towns]

        def text(tokens: int) -> str:
            cut = hay.cut(start, tokens)
            boundaries = [cut.boundary((number + 1) / (len(needles) + 1)) for number in range(len(needles))]
            return cut.with_needles([f"The secret code of {town} is {code}." for town, code in needles], boundaries)

        turns = [
            Turn(_QUESTION.format(f"What is the secret code of {town}?"), (code,), f"The secret code of {town} is")
            for town, code in needles
        ]
        return tuple(draw.sample(turns, len(turns))), text


def _spread(queried: Sequence[str], others: Sequence[str]) -> list[str]:
    """`others` in order, and `queried` at even distances among them."""
    lines, step = [], len(others) / (len(queried) + 1)
    starts = [round(step * number) for number in range(1, len(queried) + 1)]
    for first, last, line in zip([0, *starts[:-1]], starts, queried, strict=True):
        lines += [*others[first:last], line]
    return [*lines, *others[starts[-1] :]]
