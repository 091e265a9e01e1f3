"""CompilerKV's figures A2 and A3 of the published tables, and what weights learnt one head at a time gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from kvlab.analyses.compilerkv import marginal, printed
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import AXIS, named_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings
    from kvlab.methods._base.lookup import DecisionTables


OURS = theme.look("compilerkv").colour
ENDS = ("value", "low", "high")
LEAST = 0.05
"""Percentage points to each side that an axis spans at least: a gain of nothing has no width of its own."""


def published_tables(tables: DecisionTables, findings: Findings) -> Figure:
    """The mean weight of each layer, and the mean threshold against entropy for each bin of perplexity.

    findings: of `printed.published_tables`, of the same tables.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(plots.WIDTH, 4.8))
    middle = printed.MIDDLE
    left.axvspan(middle.start, middle.stop - 1, color=plots.PAPER, alpha=0.3, label="paper: low weights here")
    left.plot(findings.table["layer"], findings.table["weight"], marker="o", color=plots.COLOURS[0])
    left.set(xlabel="layer", ylabel="weight, mean over 32 heads", title="A2: middle layers weigh more")
    left.legend(fontsize=9, **plots.BELOW)
    risk, (low, high) = np.array(tables.risk).mean(0), tables.entropy
    entropies = low + (np.arange(len(risk)) + 0.5) / len(risk) * (high - low)
    curves = pd.DataFrame(risk, index=entropies)
    for number, (tint, column) in enumerate(zip(plots.shades(len(curves.columns)), curves, strict=True), 1):
        right.plot(curves[column], color=tint, label=f"perplexity, bin {number} of {len(curves.columns)}")
    right.plot(
        entropies[[0, -1]],
        [risk.max(), risk.min()],
        "--",
        color=plots.PAPER,
        label="paper: falls (no numbers)",
        zorder=1,
    )
    right.set(xlabel="entropy of attention (nats)", ylabel="threshold, mean over layers")
    right.set_title("A3: thresholds rise with entropy")
    right.legend(fontsize=9, **plots.BELOW | {"ncols": 1})
    plots.note(figure, findings.table, "the tables that the authors publish; no intervals: they are not measured")
    return figure


def per_head_gains(findings: Findings) -> Figure:
    """The gain of weights from marginal contributions on held-out prompts, by budget.

    findings: of `marginal.held_out`.
    """
    rows = findings.frame(marginal.GAIN)
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 1.9 + 0.5 * len(rows)))
    plots.points(ax, 100 * rows.filter(["value", "low", "high"]), range(len(rows)), rows=True, color=OURS)
    for y, row in enumerate(rows.to_dict("records")):
        said = "{value:+.2f} ({low:+.2f} to {high:+.2f})".format(**{key: 100 * row[key] for key in ENDS})
        beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        ax.annotate(said, (100 * row["high"], y), color=plots.INK, **beside)
    ax.axvline(0, color=AXIS, linewidth=1)
    named_rows(ax, [_weighed(findings, budget) for budget in rows["budget"]], [plots.INK] * len(rows))
    widest = 100 * float(rows[["low", "high"]].abs().to_numpy().max())
    ax.set_xlim(-1.3 * max(widest, LEAST), 2.2 * max(widest, LEAST))
    ax.set_xlabel("attention kept, learnt weights less equal ones (percentage points)")
    ax.set_title("Learnt weights over equal ones")
    plots.note(figure, findings.table, f"bars: {plots.INTERVALS}", "right of 0: learnt weights keep more")
    return figure


def _weighed(findings: Findings, budget: int) -> str:
    """The budget, and for how many heads something was learnt: without any the gain is zero."""
    changed = findings.found(marginal.CHANGED, budget=budget)
    heads = f"\nlearnt for {100 * changed.value:.0f} % of heads" if changed else ""
    return f"{budget:,} entries{heads}"
