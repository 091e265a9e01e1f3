"""CompilerKV's figures A2 and A3 of the published tables, and what weights learnt one head at a time gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from kvlab.analyses.compilerkv import marginal, printed
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import AXIS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings
    from kvlab.methods._base.lookup import DecisionTables


def published_tables(tables: DecisionTables, findings: Findings) -> Figure:
    """The mean weight of each layer, and the mean threshold against entropy for each bin of perplexity.

    findings: of `printed.published_tables`, of the same tables.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4))
    middle = printed.MIDDLE
    left.axvspan(middle.start, middle.stop - 1, color=plots.PAPER, alpha=0.3, label="paper: low weights here")
    left.plot(findings.table["layer"], findings.table["weight"], marker="o", color=plots.COLOURS[0])
    left.set(xlabel="layer", ylabel="weight, mean over 32 heads", title="Figure A2: middle layers weigh more")
    left.legend(**plots.BELOW)
    risk, (low, high) = np.array(tables.risk).mean(0), tables.entropy
    entropies = low + (np.arange(len(risk)) + 0.5) / len(risk) * (high - low)
    curves = pd.DataFrame(risk, index=entropies)
    for tint, column in zip(plots.COLOURS, curves, strict=False):
        right.plot(curves[column], color=tint, label=f"perplexity, bin {column + 1} of {len(curves.columns)}")
    right.plot(
        entropies[[0, -1]],
        [risk.max(), risk.min()],
        "--",
        color=plots.PAPER,
        label="paper: falls (no numbers)",
        zorder=1,
    )
    right.set(xlabel="entropy of attention (nats)", ylabel="threshold, mean over layers")
    right.set_title("Figure A3: thresholds rise with entropy")
    right.legend(fontsize=9, **plots.BELOW)
    return figure


def per_head_gains(findings: Findings) -> Figure:
    """What weights from marginal contributions gain on prompts held out, by budget.

    findings: of `marginal.held_out`.
    """
    figure, ax = plt.subplots(figsize=(6, 3.8))
    rows = findings.frame(marginal.GAIN)
    plots.points(ax, rows, range(len(rows)))
    ax.axhline(0, color=AXIS, linewidth=1)
    ax.set_xticks(range(len(rows)), [f"{budget:,}" for budget in rows["budget"]])
    ax.margins(x=0.3)
    ax.set_xlabel("budget, entries for each layer and KV head")
    ax.set_ylabel("share of attention, gained")
    ax.set_title("Learnt weights over equal ones")
    return figure
