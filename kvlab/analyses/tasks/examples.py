"""Examples for scores at small budgets: a prompt, and the text that a right answer continues it with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from kvlab.analyses.texts import DOCUMENTS
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.tasks import Example, task

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

ARTICLES = ("squad/Oxygen", "squad/Rhine", "squad/Pharmacy", "squad/Yuan_dynasty", "squad/Immune_system")
"""The articles of the questions in the quick profile."""

NEW_TOKENS = 16
"""The longest answer that a policy must expect."""

IDENTIFIER_TOKENS = 48
"""The longest identifier that a policy must expect: a blank and 36 characters, at most a token for each."""

QUESTION_TOKENS = range(6, NEW_TOKENS + 1)
"""Allowed tokens of a question's answer: at least four scored ones, as many as a needle of five digits has."""


@dataclass(frozen=True)
class Item:
    """An example with the text that a right answer continues its prompt with, and the document that it is about."""

    task: str
    document: str
    example: Example
    answer: str


def needles(lm: LM, documents: Sequence[str] = DOCUMENTS, length: int = 1280, seed: int = 0) -> list[Item]:
    """One needle of five digits in each document, each at a depth of its own between 0.1 and 0.9."""
    items, names = [], corpus.named(documents)
    for number, name in enumerate(names):
        depth = round(0.1 + 0.8 * number / max(1, len(names) - 1), 2)
        items += needle_grid(lm, [length], [depth], name, seed + number)
    return items


def needle_grid(
    lm: LM, lengths: Sequence[int], depths: Sequence[float], document: str = DOCUMENTS[0], seed: int = 0
) -> list[Item]:
    """One needle for each length and depth (RocketKV's figures 12-14), all in one document."""
    items = []
    for length, depth in product(lengths, depths):
        (example,) = task("needle", lengths=[length], depths=[depth], document=document, seed=seed).examples(lm)
        example = replace(example, prefix="The secret code is", max_new_tokens=NEW_TOKENS)
        items.append(Item("needle", document, example, f" {example.answers[0]}"))
    return items


def multikey(lm: LM, documents: Sequence[str] = DOCUMENTS, length: int = 1280, seed: int = 0) -> list[Item]:
    """RULER's needle with three distracting ones of other keys, one example in each document."""
    return _ruler(lm, documents, length, seed, "niah_multikey_1", "ruler", NEW_TOKENS)


def identifiers(lm: LM, documents: Sequence[str] = DOCUMENTS, length: int = 1280, seed: int = 0) -> list[Item]:
    """RULER's third single needle, whose value is a UUID (S-NIAH-3), one example in each document."""
    return _ruler(lm, documents, length, seed, "niah_single_3", "single_3", IDENTIFIER_TOKENS)


def _ruler(
    lm: LM, documents: Sequence[str], length: int, seed: int, kind: str, name_of_task: str, new_tokens: int
) -> list[Item]:
    """One of RULER's needles in each document."""
    items = []
    for number, name in enumerate(corpus.named(documents)):
        made = task("ruler", lengths=[length], kinds=[kind], trials=1, document=name, seed=seed + number)
        (example,) = made.examples(lm)
        items.append(Item(name_of_task, name, replace(example, max_new_tokens=new_tokens), f" {example.answers[0]}"))
    return items


def questions(lm: LM, articles: Sequence[str] = ARTICLES, length: int = 1280, seed: int = 0) -> list[Item]:
    """One question on each SQuAD article in LongBench's format: its prompt of multifieldqa_en, paragraphs as context.

    The paragraph with the answer stands somewhere among its neighbours. Answers have QUESTION_TOKENS tokens, because
    the first two of them say nothing about a compressed cache (see `scores`).

    Raises:
        KvlabError: an article without such a question, or paragraphs that do not fit.
    """
    records = []
    for name in articles:
        draw = Random(f"{seed} {name}")
        candidates = [q for q in corpus.questions(name) if _tokens(lm, q.answers[0]) in QUESTION_TOKENS]
        if not candidates:
            raise KvlabError(f"{name} has no question with an answer of {QUESTION_TOKENS[0]} to {NEW_TOKENS} tokens")
        question = draw.choice(candidates)
        context = _paragraphs(lm, name, question.paragraph, length - 100, draw)
        records.append(
            {
                "task": "multifieldqa_en",
                "_id": name,
                "context": context,
                "input": question.question,
                "answers": list(question.answers),
            }
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "questions.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        made = list(task("longbench", folder=path, length=length).examples(lm))
    return [
        Item("qa", name, replace(example, max_new_tokens=NEW_TOKENS), example.answers[0])
        for name, example in zip(articles, made, strict=True)
    ]


def _tokens(lm: LM, text: str) -> int:
    return len(lm.require_tokenizer("texts cannot be counted")(text, add_special_tokens=False)["input_ids"])


def _paragraphs(lm: LM, name: str, evidence: str, room: int, draw: Random) -> str:
    """Neighbouring paragraphs of an article, `evidence` among them, of at most `room` tokens."""
    every = list(dict.fromkeys(question.paragraph for question in corpus.questions(name)))
    costs = [_tokens(lm, text) + 2 for text in every]
    first = last = every.index(evidence)
    total = costs[first]
    if total > room:
        raise KvlabError(f"{name}: a paragraph of {total} tokens does not fit into {room}")
    while True:
        sides = [side for side in (first - 1, last + 1) if 0 <= side < len(every) and total + costs[side] <= room]
        if not sides:
            return "\n\n".join(every[first : last + 1])
        side = draw.choice(sides)
        first, last, total = min(first, side), max(last, side), total + costs[side]
