"""The plan of a run of scores on tasks: examples, and the policies that each of them meets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.analyses import shipped_tables
from kvlab.analyses.compilerkv import quality
from kvlab.analyses.tasks import examples
from kvlab.analyses.tasks.contenders import by_name
from kvlab.analyses.tasks.examples import Item
from kvlab.analyses.tasks.variants import FilledCompilerKV
from kvlab.methods import Policy
from kvlab.methods._base.lookup import DecisionTables
from kvlab.tasks import Example

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
    context_only: Budgets,
    heads: str | None = None,
    tables: str | None = None,
    per_head: Mapping[int, DecisionTables] = MappingProxyType({}),
) -> Plan:
    """A needle and RULER's needle in each document, and a question on each article.

    Args:
        length: of each prompt, in tokens.
        needle, ruler, qa: which policies meet each task, compressed once the prompt has been read.
        context_only: policies that meet the needle once more, compressed before its question has been read.
        heads, tables: for duoattention and compilerkv, as `contenders.contender` takes them.
        per_head: tables learnt one head at a time, by budget (`shipped_tables.per_head_tables`); compilerkv_filled and
            compilerkv_twin have the weights of the nearest.

    Raises:
        KvlabError: a text that these tables were learnt from, where a policy has them.
    """

    def read(items: list[Item], budgets: Budgets) -> list[tuple[Policy, str]]:
        after = after_text(lm, items[0].example) if "zsmerge_question" in budgets else 0
        return [(_filled(policy, per_head, length), "prompt") for policy in by_name(budgets, heads, tables, after)]

    needles = examples.needles(lm, documents, length, seed)
    keys = examples.multikey(lm, documents, length, seed)
    qa_items = examples.questions(lm, articles, length, seed)
    unread = [(_filled(policy, per_head, length), "context") for policy in by_name(context_only, heads, tables)]
    plan = [(needles, read(needles, needle) + unread), (keys, read(keys, ruler)), (qa_items, read(qa_items, qa))]
    for items, policies in plan:
        if any(isinstance(policy, FilledCompilerKV) for policy, _ in policies):
            quality.require_unseen(per_head.values(), (item.document for item in items))
    return plan


def _filled(policy: Policy, per_head: Mapping[int, DecisionTables], length: int) -> Policy:
    if not isinstance(policy, FilledCompilerKV):
        return policy
    weights = shipped_tables.nearest(per_head, policy.entries(length))
    return policy if weights is None else policy.using(weights)


def after_text(lm: LM, example: Example) -> int:
    """How many tokens follow the text of an example's prompt: the end of the chat template, and the answer's beginning.

    They are the same for all examples that begin their answers alike.
    """
    # Two texts that end in different ways have nothing at their ends in common but what the template adds.
    ends = [lm.encode(text, chat="auto" if example.chat else False)[0].tolist()[::-1] for text in ("one", "two!")]
    common = next((n for n, (left, right) in enumerate(zip(*ends, strict=False)) if left != right), 0)
    begun = lm.require_tokenizer("answers cannot be begun")(example.prefix, add_special_tokens=False)
    return common + len(begun["input_ids"])


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
    """The tasks of the full profile only: needles in longer prompts at tiny budgets, and RULER's identifiers.

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


def questions_table(plan: Plan) -> pd.DataFrame:
    """The questions of a plan: task, document, asked, right answer."""
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
