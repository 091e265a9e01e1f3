"""LongBench itself at small budgets: generated answers, scored by LongBench's own metrics."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab import evaluation
from kvlab.tasks import task

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.inputs.models import LM

TASKS = ("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa")
POLICIES = ("snapkv", "pyramidkv", "h2o", "dapq", "zsmerge")
BUDGETS = (64, 256)


def scored(lm: LM, folder: Path, length: int, limit: int) -> pd.DataFrame:
    """The question tasks of LongBench under five policies.

    Args:
        folder: LongBench's records as JSONL files.
        length: of each prompt, in tokens.
        limit: how many examples.

    Returns:
        As `evaluation.summary`: policy, budget, n, score, low, high, difference (from the full cache), ...
    """
    longbench = task("longbench", folder=folder, length=length, tasks=TASKS)
    plan = evaluation.plan(longbench, list(POLICIES), list(BUDGETS), limit=limit)
    with tempfile.TemporaryDirectory() as kept:
        return evaluation.summary(evaluation.run(lm, plan, Path(kept) / "longbench.jsonl"))
