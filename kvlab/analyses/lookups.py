"""What was measured once for a model and comes with kvlab: DuoAttention's head scores and CompilerKV's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.methods.lookup import DecisionTables, HeadScores, Measured

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

AUTO = "auto"
"""Stands for what comes with kvlab for the very model that is looked at."""


def head_scores(lm: LM, heads: str | None = AUTO) -> str | None:
    """What duoattention takes as `heads`: for "auto" those that come with kvlab for this model, or None if none do.

    A name, a file and None stay as they are; an empty text is None, too.
    """
    return _chosen(lm, HeadScores, heads)


def tables(lm: LM, tables: str | None = AUTO) -> str | None:
    """What compilerkv takes as `tables`, likewise; None are neutral ones."""
    return _chosen(lm, DecisionTables, tables)


def _chosen(lm: LM, kind: type[Measured], wanted: str | None) -> str | None:
    if wanted != AUTO:
        return wanted or None
    config = lm.model.config.get_text_config(decoder=True)
    return kind.shipped_for(lm.name, lm.sha256, lm.n_layers, config.num_attention_heads)


def heads_in_words(heads: str | None) -> str:
    """For a notebook's reader: which head scores DuoAttention has."""
    none = "none come with kvlab for this model, so that the first heads are its retrieval heads"
    return f"DuoAttention's head scores: {f'those of {heads}' if heads else none}"


def tables_in_words(tables: str | None) -> str:
    """For a notebook's reader: which tables CompilerKV has."""
    none = "neutral, since none come with kvlab for this model"
    return f"CompilerKV's tables: {f'those of {tables}' if tables else none}"
