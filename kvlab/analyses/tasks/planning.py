"""The plan of a run of scores on tasks: examples, and the policies that each of them meets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.analyses.tasks import examples
from kvlab.analyses.tasks.contenders import by_name
from kvlab.analyses.tasks.examples import Item
from kvlab.methods import Policy

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

Budgets = Mapping[str, Sequence[int | float]]
"""Policies as a notebook names them: {"snapkv": [64, 128]}."""
Plan = list[tuple[list[Item], list[tuple[Policy, str]]]]
"""Input of `scores.measure`: examples, the policies that they meet, and where each compresses (prompt or context)."""


def plan(
    lm: LM,
    documents: Sequence[str],
    articles: Sequence[str],
    length: int,
    seed: int,
    *,
    needle: Budgets,
    ruler: Budgets,
    qa: Budgets,
    held_back: Budgets,
    heads: str | None = None,
    tables: str | None = None,
) -> Plan:
    """A needle and RULER's needle in each document, and a question on each article.

    Args:
        length: of each prompt, in tokens.
        needle, ruler, qa: which policies meet each task, compressed once the prompt has been read.
        held_back: policies that meet the needle once more, compressed before its question has been read.
        heads, tables: for duoattention and compilerkv, as `contenders.contender` takes them.
    """

    def compressed_at(place: str, budgets: Budgets) -> list[tuple[Policy, str]]:
        return [(policy, place) for policy in by_name(budgets, heads, tables)]

    both = compressed_at("prompt", needle) + compressed_at("context", held_back)
    return [
        (examples.needles(lm, documents, length, seed), both),
        (examples.multikey(lm, documents, length, seed), compressed_at("prompt", ruler)),
        (examples.questions(lm, articles, length, seed), compressed_at("prompt", qa)),
    ]


def full_only(
    lm: LM,
    documents: Sequence[str],
    length: int,
    seed: int,
    *,
    tiny_documents: Sequence[str],
    tiny_length: int,
    tiny_needle: Budgets,
    identifier: Budgets,
    heads: str | None = None,
) -> Plan:
    """What only the full profile asks: needles in longer prompts at tiny budgets, and RULER's identifiers.

    Args:
        documents, length: of the prompts with identifiers.
        tiny_documents, tiny_length: of those with needles for tiny budgets; no documents are the same ones.
        tiny_needle, identifier: which policies meet each task, compressed once the prompt has been read; without a
            policy a task is left out.
    """
    plan: Plan = []
    if tiny_needle:
        needles = examples.needles(lm, tiny_documents or documents, tiny_length, seed)
        items = [replace(item, task="tiny_needle") for item in needles]
        plan.append((items, [(policy, "prompt") for policy in by_name(tiny_needle, heads)]))
    if identifier:
        items = examples.identifiers(lm, documents, length, seed)
        plan.append((items, [(policy, "prompt") for policy in by_name(identifier, heads)]))
    return plan


def asked(plan: Plan) -> pd.DataFrame:
    """What a plan asks: task, document, asked, right answer."""
    return pd.DataFrame(
        {
            "task": item.task,
            "document": item.document,
            "asked": _question(item),
            "right answer": item.answer.strip(),
        }
        for items, _ in plan
        for item in items
    )


def _question(item: Item) -> str:
    """The line with the question; LongBench's prompt ends with one more line, on which the answer begins."""
    lines = item.example.question.strip().splitlines()
    return lines[-2] if item.task == "qa" else lines[-1]
