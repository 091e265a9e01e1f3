"""RULER's questions (section 3.4): SQuAD's paragraphs with answers, among paragraphs without."""

from __future__ import annotations

import contextlib
import re
from random import Random

from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Question
from kvlab.tasks.base import Example
from kvlab.tasks.making import fit, piece_lengths
from kvlab.tasks.ruler.material import Material

_TASK = "Answer from the documents, with nothing but the answer."


def make(material: Material, kind: str, length: int, draw: Random) -> Example:
    """qa_1: one question, distractors of its article first; qa_2: two questions over two articles, any distractors."""
    for _ in range(7):  # short lengths do not suit every question's paragraph
        with contextlib.suppress(KvlabError):
            return _make(material, kind, length, draw)
    return _make(material, kind, length, draw)


def _make(material: Material, kind: str, length: int, draw: Random) -> Example:
    questions = _questions(material, 2 if kind == "qa_2" else 1, length, draw)
    golden = [question.paragraph for question in questions]
    texts = golden + _distractors(material, questions, golden, length, draw, own_first=kind == "qa_1")
    order = [draw.random() for _ in texts]
    lengths = piece_lengths(material.lm, [f"Document 10:\n{text}\n\n" for text in texts])
    prompt = (
        " ".join(f"({n}) {q.question.strip()}" for n, q in enumerate(questions, 1))
        if len(questions) > 1
        else (questions[0].question.strip())
    )

    def build(room: int) -> Example:
        shown = _cut(texts, lengths, len(golden), room)
        shown = [text for _, text in sorted(zip(order, shown, strict=False))]
        listed = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(shown, 1))
        return Example(
            id=kind,
            context=f"{_TASK}\n\nThe documents:\n\n{listed}\n\n",
            question=f"{_TASK}\n\nQuestion: {prompt}",
            prefix=" Answer:",
            answers=tuple(answer for question in questions for answer in question.answers),
            max_new_tokens=32,
            marks={"groups": [len(question.answers) for question in questions], "documents": len(shown)},
        )

    return fit(material.lm, build, length, f"ruler's {kind}")


def _questions(material: Material, count: int, length: int, draw: Random) -> list[Question]:
    """Questions over as many articles, whose paragraphs take up to half of the length (or the least of many draws)."""
    shortest: tuple[int, list[Question]] | None = None
    for _ in range(64):
        articles = draw.sample(list(material.squad), count)
        questions = [draw.choice(material.squad[article]) for article in articles]
        used = sum(piece_lengths(material.lm, [question.paragraph for question in questions]))
        if shortest is None or used < shortest[0]:
            shortest = (used, questions)
        if used <= length // 2:
            break
    assert shortest is not None, "there was at least one draw"
    return shortest[1]


def _distractors(
    material: Material, questions: list[Question], golden: list[str], length: int, draw: Random, own_first: bool
) -> list[str]:
    """Paragraphs without any of the answers, shuffled, of more than `length` tokens together."""
    answers = {answer.strip().lower() for question in questions for answer in question.answers}
    answer = re.compile("|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in sorted(answers)))
    own = [text for question in questions for text in material.paragraphs[question.document]] if own_first else []
    rest = [
        text
        for name, texts in material.paragraphs.items()
        for text in texts
        if not own_first or name != questions[0].document
    ]
    chosen, characters = [], 0
    for text in [*draw.sample(own, len(own)), *draw.sample(rest, len(rest))]:
        if characters > 8 * length:
            break
        if text not in golden and not answer.search(text.lower()):
            chosen.append(text)
            characters += len(text)
    return chosen


def _cut(texts: list[str], lengths: list[int], always: int, room: int) -> list[str]:
    """The first `always` texts, and as many others as fit into `room` tokens; the last one loses its last words."""
    shown = texts[:always]
    for text, length in zip(texts[always:], lengths[always:], strict=True):
        if length > room:
            words = text.split()
            kept = len(words) * room // length
            return [*shown, " ".join(words[:kept])] if kept else shown
        shown.append(text)
        room -= length
    return shown
