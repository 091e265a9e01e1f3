"""What `kvlab eval` shows and keeps: a table on the screen, and one MLflow run with metrics, intervals and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.evaluation import Answer, summary, table
from kvlab.lib.files import replacing
from kvlab.workbench.store import tracking

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console

EXPERIMENT = "eval"
KINDS_ABREAST = 7


def log(found: Sequence[Answer], parameters: Mapping[str, Any]) -> str:
    """Log an evaluation as one run; returns its id.

    Metrics are TASK/POLICY/BUDGET/score with its interval, /difference from the full cache with its own, and /kv_bytes.
    """
    rows = summary(found)
    with tracking.start(EXPERIMENT, parameters) as run:
        run.tag("mlflow.runName", named(parameters))
        metrics: dict[str, float] = {}
        intervals: dict[str, tuple[float, float]] = {}
        for row in rows.itertuples():
            name = "/".join(str(part) for part in (row.task, row.policy, row.budget) if not _missing(part))
            metrics |= {f"{name}/score": row.score, f"{name}/kv_bytes": row.kv_bytes, f"{name}/seconds": row.seconds}
            intervals[f"{name}/score"] = row.low, row.high
            if not math.isnan(row.difference):
                metrics[f"{name}/difference"] = row.difference
                intervals[f"{name}/difference"] = row.difference_low, row.difference_high
        run.log(metrics, intervals)
        run.table("answers", table(found))
        run.table("summary", rows)
        run.table("by_kind", summary(found, by="kind"))
        if heatmap := needles(found):
            run.figure("needle_heatmap", heatmap)
        run.json("signatures", sorted({answer.signature for answer in found}))
    return run.id


def named(parameters: Mapping[str, Any]) -> str:
    """The run's name: tasks, policies and budgets."""
    policies = parameters.get("policies", ())
    several = policies if len(policies) < 6 else [*policies[:4], f"{len(policies)} policies"]
    return " ".join([str(parameters.get("tasks", "")), ",".join(several), str(parameters.get("budgets", ""))])[:120]


def needles(found: Sequence[Answer]) -> Figure | None:
    """The heatmap of needles by length and depth; None where there are none."""
    from kvlab.workbench.figures import plots

    hidden = [answer for answer in found if {"length", "depth"} <= set(answer.marks)]
    return plots.needle_heatmap(table(hidden))[0].figure if hidden else None


def draw(found: Sequence[Answer], path: Path) -> Path | None:
    """Write the heatmap of needles beside the answers, and give its path; None where there are none."""
    if heatmap := needles(found):
        with replacing(path.with_suffix(".png")) as part:
            heatmap.savefig(part, dpi=144, bbox_inches="tight", facecolor="white")
        return path.with_suffix(".png")
    return None


def show(rows: pd.DataFrame, console: Console) -> None:
    """Print what `kvlab.evaluation.results.summary` gave."""
    from rich.table import Table

    at = ", ".join(sorted(set(rows["compress_at"])))
    grid = Table(
        "task",
        "policy",
        "budget",
        title=f"compressed at the {at}'s end",
        title_justify="left",
        header_style="dim",
        pad_edge=False,
    )
    for heading in ("n", "score, %", "95 % interval", "against the full cache", "K and V, MiB", "s per answer"):
        grid.add_column(heading, justify="right")
    for row in rows.itertuples():
        budget = "" if _missing(row.budget) else f"{row.budget:g}"
        paired = f"{100 * row.difference:+.1f} ({100 * row.difference_low:+.1f} to {100 * row.difference_high:+.1f})"
        grid.add_row(
            row.task,
            row.policy,
            budget,
            str(row.n),
            f"{100 * row.score:.1f}",
            f"{100 * row.low:.1f}-{100 * row.high:.1f}",
            "" if row.policy == "full" or math.isnan(row.difference) else paired,
            f"{row.kv_bytes / 2**20:.2f}",
            f"{row.seconds:.2f}",
        )
    console.print(grid, highlight=False)
    console.print(
        "against the full cache: the mean of the differences on the same examples, with its interval", style="dim"
    )


def show_kinds(rows: pd.DataFrame, console: Console) -> None:
    """Print what `kvlab.evaluation.results.summary` gave by kind: scores, a column for each kind."""
    from rich.table import Table

    if rows["task"].nunique() > 1:
        rows = rows.assign(kind=rows["task"] + " " + rows["kind"].fillna("").astype(str))
    kinds = list(dict.fromkeys(rows["kind"]))
    for first in range(0, len(kinds), KINDS_ABREAST):
        grid = Table(
            "policy", "budget", title="score by kind, %", title_justify="left", header_style="dim", pad_edge=False
        )
        for kind in kinds[first : first + KINDS_ABREAST]:
            grid.add_column(str(kind), justify="right")
        for (policy, budget), group in rows.groupby(["policy", "budget"], sort=False, dropna=False):
            scores = group.set_index("kind")["score"]
            grid.add_row(
                policy,
                "" if _missing(budget) else f"{budget:g}",
                *(f"{100 * scores[kind]:.1f}" for kind in kinds[first : first + KINDS_ABREAST]),
            )
        console.print(grid, highlight=False)


def _missing(value: Any) -> bool:
    return value is None or value != value
