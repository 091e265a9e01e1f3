"""CompilerKV's figures A2 and A3, and the gains of its learnt tables, from `kvlab.analyses.compilerkv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from kvlab.analyses.compilerkv import held_out as analysis
from kvlab.analyses.compilerkv import marginal as marginal
from kvlab.analyses.compilerkv import tables as contents
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import AXIS, at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings
    from kvlab.methods._base.lookup import DecisionTables

LOGS = {"even_log": "evenly tried", "neutral_log": "neutral preferred"}
"""Names of the logs of `learning.alpha_effect` in a legend."""


def figure_a2(tables: DecisionTables, structure: Findings) -> Figure:
    """The head table, and the mean weight by layer; the layers in which the paper sees low weights are marked.

    structure: of `tables.structure`, of the same tables.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), width_ratios=(1, 1.2))
    plots.heatmap(
        contents.relative_weights(tables),
        xlabel="query head",
        ylabel="layer",
        unit="weight / largest of its layer",
        title="Figure A2: the head table",
        ax=left,
    )
    first, last = (end * (tables.n_layers - 1) for end in contents.MIDDLE)
    for edge in (first, last + 1):
        left.axhline(edge, color=plots.PAPER, linestyle="--")
    right.axvspan(first, last, color=plots.PAPER, alpha=0.3, label="paper: low weights here (relative depth)")
    plots.lines(
        structure.table,
        x="layer",
        y="weight",
        xlabel="layer",
        ylabel="mean over the layer's heads",
        title="By layer",
        ax=right,
    )
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure


def figure_a3(tables: DecisionTables) -> Figure:
    """The threshold table, averaged over layers, and its curves against entropy beside the fall that the paper sees."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=(1, 1.2))
    plots.heatmap(
        contents.mean_thresholds(tables),
        xlabel="perplexity of the window, bin's middle",
        ylabel="entropy of attention, bin's middle (nats)",
        unit="threshold, mean over layers",
        title="Figure A3: thresholds by risk",
        ax=left,
    )
    curves = contents.threshold_curves(tables)
    plots.lines(
        curves.assign(perplexity="perplexity about " + curves["perplexity"].astype(str)),
        x="entropy",
        y="threshold",
        hue="perplexity",
        xlabel="entropy of attention (nats)",
        ylabel="threshold, mean over layers",
        title="Against entropy",
        ax=right,
    )
    entropies, values = curves["entropy"], curves["threshold"]
    right.plot(
        [min(entropies), max(entropies)],
        [max(values), min(values)],
        "--",
        color=plots.PAPER,
        label="paper: falls (no numbers)",
        zorder=1,
    )
    right.legend(fontsize=9, **plots.BELOW)
    return figure


def alpha(effect: Findings) -> Figure:
    """The spread of Q values and the share of neutral states by the conservative penalty, log by log.

    effect: of `learning.alpha_effect`, of the logs that `LOGS` names.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2))
    for tint, (log, words) in zip(plots.COLOURS, LOGS.items(), strict=False):
        for style, table in (("-", "heads"), ("--", "risk")):
            part = at(effect.table, log=log, table=table)
            xs = part["alpha"].clip(lower=3e-4)
            for ax, column in ((left, "spread"), (right, "neutral")):
                ax.plot(xs, part[column], style, marker="o", color=tint, label=f"{table}, {words}")
    for ax, ylabel in ((left, "largest - smallest Q (nats)"), (right, "share of states left neutral")):
        ax.set(xscale="log", xlabel="alpha (the leftmost point is 0)", ylabel=ylabel)
    left.set(yscale="log", title="How far apart values lie")
    right.set(title="What is left neutral")
    left.legend(fontsize=9, handlelength=3)
    return figure


def held_out(findings: Findings) -> Figure:
    """What learnt tables save on held-out text, each comparison with its interval over windows.

    findings: of `held_out.held_out`.
    """
    figure, axes = plt.subplots(1, 2, figsize=(12.5, 5), sharey=True)
    gains = findings.frame(analysis.GAIN)
    for ax, measure, label in zip(
        axes, ("nll", "mass"), ("NLL saved (nats per token)", "attention mass saved"), strict=True
    ):
        # The first comparison is drawn at the top.
        rows = at(gains, measure=measure).iloc[::-1]
        plots.points(ax, rows, range(len(rows)), rows=True)
        ax.axvline(0, color=AXIS, linewidth=1)
        ax.set_yticks(range(len(rows)), [analysis.COMPARED[comparison] for comparison in rows["comparison"]])
        ax.set_xlabel(label)
        ax.locator_params(axis="x", nbins=6)
        ax.grid(True, axis="x")
    axes[0].set_title("What the tables save in likelihood")
    axes[1].set_title("and in attention")
    return figure


def per_head_gains(findings: Findings) -> Figure:
    """What tables from marginal contributions gain on prompts held out, by budget.

    findings: of `alone.held_out`.
    """
    gains = findings.frame(marginal.GAIN)
    figure, axes = plt.subplots(1, len(marginal.COMPARED), figsize=(13, 3.8))
    for ax, (comparison, words) in zip(axes, marginal.COMPARED.items(), strict=True):
        rows = at(gains, comparison=comparison)
        plots.points(ax, rows, range(len(rows)))
        ax.axhline(0, color=AXIS, linewidth=1)
        ax.set_xticks(range(len(rows)), [str(budget) for budget in rows["budget"]])
        ax.margins(x=0.3)
        ax.set_title(words.replace(", ", ",\n"), fontsize=10)
        ax.set_xlabel("budget")
    axes[0].set_ylabel("attention kept, gained")
    return figure


def penalty(effect: Findings) -> Figure:
    """The mean threshold and the share of states that turn nothing away, by the penalty, log by log.

    effect: of `penalty.effect`.
    """
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    titles = {
        "threshold": "mean threshold",
        "neutral": "share that turns nothing away",
        "slope": "threshold per nat of entropy",
    }
    for ax, (column, title) in zip(axes, titles.items(), strict=True):
        for tint, log in zip(plots.COLOURS, effect.table["log"].unique(), strict=False):
            part = at(effect.table, log=log)
            ax.plot(part["penalty"], part[column], marker="o", color=tint, label=log)
        ax.set_xscale("symlog", linthresh=5e-4)
        ax.set(xlabel="penalty, lambda", title=title)
    axes[2].axhline(0, color=AXIS, linewidth=1)
    axes[0].legend(fontsize=9)
    return figure
