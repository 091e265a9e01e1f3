"""Head scores, Q-Filters, surrogates and CompilerKV's tables: measured once for a model, they come with kvlab."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvlab.core.geometry import geometry
from kvlab.core.hookable import text_config
from kvlab.errors import KvlabError
from kvlab.methods import Policy
from kvlab.methods._base.lookup import SHIPPED_ALONE, DecisionTables, HeadScores, Measured, QueryFilters
from kvlab.methods.compilerkv import CompilerKV
from kvlab.methods.duoattention import DuoAttention
from kvlab.methods.kvzap import KVzap
from kvlab.methods.qfilters import QFilters

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

AUTO = "auto"
"""Stands for what comes with kvlab for the very model that is looked at."""


def head_scores(lm: LM, heads: str | None = AUTO) -> str | None:
    """The `heads` for duoattention: for "auto" those that come with kvlab for this model, or None if none do.

    A name, a file and None stay as they are; an empty text is None, too.
    """
    return _resolve(lm, HeadScores, heads)


def tables(lm: LM, tables: str | None = AUTO) -> str | None:
    """The `tables` for compilerkv, likewise; None are neutral ones."""
    return _resolve(lm, DecisionTables, tables)


def per_head_tables(lm: LM, files: str | Sequence[str] = AUTO) -> dict[int, DecisionTables]:
    """Load CompilerKV's tables that were learnt one head at a time, by the budget that each was learnt for.

    Args:
        files: written by `kvlab compile`, one for each budget. "auto" means those that come with kvlab for this model.
            An empty text or list means none.

    Raises:
        KvlabError: a file that does not say for which budget it was learnt, or two for one budget.
    """
    if files == AUTO:
        chosen: list = DecisionTables.shipped_in(SHIPPED_ALONE, *_identity(lm))
    else:
        chosen = [files] if isinstance(files, str) and files else list(files)
    by_budget: dict[int, DecisionTables] = {}
    for file in chosen:
        learnt = DecisionTables.load(file)
        about = learnt.model_extra or {}
        if about.get("learnt") != "alone" or not isinstance(about.get("budget"), int) or learnt.heads is None:
            raise KvlabError(f"{file} holds no weights learnt one head at a time; `kvlab compile` makes such files")
        if about["budget"] in by_budget:
            raise KvlabError(f"two files of weights for {about['budget']} entries; give one for each budget")
        by_budget[about["budget"]] = learnt
    return by_budget


def nearest(per_head: Mapping[int, DecisionTables], entries: float) -> DecisionTables | None:
    """Return the weights learnt for the budget whose ratio to `entries` is nearest to 1; None where none were learnt.

    They have no thresholds, since filled sets do not need them.
    """
    if not per_head:
        return None
    at = min(per_head, key=lambda budget: (abs(math.log(budget / entries)), budget))
    return DecisionTables(model=per_head[at].model, heads=per_head[at].heads, risk=None)


def with_shipped(lm: LM, policy: Policy) -> Policy:
    """Give the policy the data that come with kvlab for this model, where it has none of its own.

    compilerkv gets its tables, duoattention its head scores, and qfilters its filters. All others stay as they are.

    Raises:
        KvlabError: kvzap has no surrogate for this model.
    """
    if isinstance(policy, KVzap):
        _check_surrogate(lm, policy)
    if isinstance(policy, CompilerKV) and policy.tables is None and policy.tables_in_use.neutral:
        if policy.variant == "published":  # the authors' weights, where they fit
            return policy
        return policy.replace(tables=tables(lm))
    if isinstance(policy, DuoAttention) and policy.heads is None:
        return policy.replace(heads=head_scores(lm))
    if isinstance(policy, QFilters) and policy.filters is None:
        return policy.replace(filters=_resolve(lm, QueryFilters, AUTO))
    return policy


def served(lm: LM, policy: Policy) -> bool:
    """Whether a policy has all that it cannot do without on this model: kvzap needs a surrogate."""
    try:
        with_shipped(lm, policy)
    except KvlabError:
        return False
    return True


def _check_surrogate(lm: LM, policy: KVzap) -> None:
    layers, kv_heads = len(lm.layout.compressed), geometry(lm.model.config).kv_heads
    policy.fitting(lm.name, (layers, kv_heads, text_config(lm.model).hidden_size))


def _resolve(lm: LM, kind: type[Measured], name: str | None) -> str | None:
    if name != AUTO:
        return name or None
    return kind.shipped_for(*_identity(lm))


def _identity(lm: LM) -> tuple[str, str, int, int]:
    """The key of the files; tables and head scores have a row for each layer that policies compress."""
    return lm.name, lm.sha256, len(lm.layout.compressed), geometry(lm.model.config).heads


def heads_in_words(heads: str | None) -> str:
    """For a notebook's reader: which head scores DuoAttention has."""
    none = "none come with kvlab for this model, so that the first heads are its retrieval heads"
    return f"DuoAttention's head scores: {f'those of {heads}' if heads else none}"


def tables_in_words(tables: str | None) -> str:
    """For a notebook's reader: which tables CompilerKV has."""
    none = "neutral, since none come with kvlab for this model"
    return f"CompilerKV's tables: {f'those of {tables}' if tables else none}"


def per_head_in_words(per_head: Mapping[int, DecisionTables]) -> str:
    """For a notebook's reader: which weights CompilerKV's filled sets have."""
    if not per_head:
        return "Its filled sets: with these tables' weights, since none learnt one head at a time were given"
    return (
        f"Its filled sets: with weights learnt one head at a time, at {', '.join(map(str, sorted(per_head)))} entries"
    )
