"""ZSMerge's figures: the findings of its analyses, beside the paper's printed values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from kvlab import papers
from kvlab.analyses.zsmerge import merging, sensitivity
from kvlab.workbench.figures import plots

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

BUDGET = "cache budget, share of the prompt"
VARIANTS = {
    "evict": "eviction (no residual slots)",
    "merge": "residual merging",
    "merge_alpha0": "residual merging, alpha = 0",
}
MEASURES = {"error": "error of the output", "mass_lost": "attention mass lost"}


def figure_4(findings: Findings) -> Figure:
    """Figure 4: the errors of eviction and of merging by cache ratio, and the share of the error that merging removes.

    findings: of `merging.figure_4`.
    """
    printed = papers.figure("zsmerge", "figure4")
    figure, (errors, gains) = plt.subplots(1, 2, figsize=(12, 4.4))
    plots.estimates(
        findings.frame(merging.ERROR),
        x="ratio",
        hue="variant",
        log=True,
        names=VARIANTS,
        xlabel=BUDGET,
        ylabel="relative error of the attention output",
        title="Figure 4: eviction against merging",
        ax=errors,
    )
    plots.paper_points(
        errors,
        [*printed["ratio"], *printed["ratio"]],
        [*printed["error_evict"], *printed["error_merge"]],
        "paper, eviction and merging at 50 %",
    )
    errors.legend(loc="upper right", fontsize=9)
    plots.estimates(
        findings.frame(merging.REDUCTION),
        x="ratio",
        xlabel=BUDGET,
        ylabel="share of eviction's error removed",
        title="What merging gains",
        ax=gains,
    )
    gains.lines[0].set_label("of the error")
    squared = findings.frame(merging.REDUCTION_SQUARED)
    gains.plot(
        squared["ratio"],
        squared["value"],
        color=plots.COLOURS[1],
        marker="s",
        linestyle=":",
        label="of the squared error",
    )
    gains.plot(printed["ratio"], printed["reduction"], color=plots.PAPER, linestyle="--", linewidth=1.2)
    plots.paper_points(gains, list(printed["ratio"]), list(printed["reduction"]), "paper (LLaMA-2-7B)")
    gains.axhline(0, color=plots.EDGE, linewidth=1)
    gains.legend(loc="center right")
    return figure


def by_layer(findings: Findings) -> Figure:
    """The change of eviction's error by merging in each layer, by cache ratio; findings: of `merging.figure_4`."""
    figure, ax = plt.subplots(figsize=(8, 6.4))
    plots.heatmap(
        -merging.reduction_by_layer(findings),
        xlabel=BUDGET,
        ylabel="layer",
        unit="change of the error against eviction",
        title="Merging against eviction, by layer",
        diverging=True,
        ax=ax,
    )
    return figure


def figure_5(findings: Findings) -> Figure:
    """Figure 5: a panel for each swept hyper-parameter, and how flat the curves are where the paper calls them stable.

    findings: of `sensitivity.figure_5`.
    """
    printed = papers.figure("zsmerge", "figure5")
    changes = sensitivity.changes(findings)
    swept = changes["parameter"].unique()
    figure, grid = plt.subplots(2, 3, figsize=(14, 7.6))
    *panels, last = grid.flat
    for ax, parameter in zip(panels, swept, strict=False):
        ours, paper = (table.loc[table["parameter"] == parameter] for table in (changes, printed))
        _sweep(ax, parameter, ours, paper)
    for ax in panels[len(swept) :]:
        ax.set_visible(False)
    labelled = {label: line for ax in panels for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower left", ncols=3)
    _flatness(last, findings, printed)
    return figure


def _sweep(ax: Axes, parameter: str, changes: pandas.DataFrame, printed: pandas.DataFrame) -> None:
    """Curves over one parameter, in per cent; behind them the printed loss for a value or a range."""
    plots.lines(
        changes.assign(**{column: 100 * changes[column] for column in ("mean", "low", "high")}),
        x="value",
        y="mean",
        hue="measure",
        low="low",
        high="high",
        names=MEASURES,
        xlabel=sensitivity.SYMBOLS[parameter],
        ylabel="worse than recommended (%)",
        title=parameter,
        ax=ax,
    )
    ax.legend().remove()
    logarithmic = parameter == "window"
    if logarithmic:
        windows = sorted(changes["value"].unique())
        ax.set_xscale("log", base=2)
        ax.set_xticks(windows, [f"{window:g}" for window in windows])
    left, right = ax.get_xlim()
    thin = 0.008 * (right - left)
    for first, final, lowest, highest in zip(
        *(printed[c] for c in ("first", "last", "lowest", "highest")), strict=True
    ):
        ends = (first, final) if logarithmic else (first - thin, final + thin)
        ax.fill_between(
            ends, -100 * highest, -100 * lowest, color=plots.PAPER, alpha=0.55, zorder=1, label="paper, ROUGE lost"
        )
    ax.axvline(sensitivity.RECOMMENDED[parameter], color=plots.EDGE, linestyle=":", linewidth=1.2)
    ax.set_xlim(left, right)


def _flatness(ax: Axes, findings: Findings, printed: pandas.DataFrame) -> None:
    ours, intervals = plots.by_key(findings.frame(sensitivity.SPREAD_OVER_MERGING), "parameter")
    plots.paper_beside_ours(
        sensitivity.paper_yardstick(printed),
        ours,
        intervals,
        ylabel="spread / gain from merging",
        title="spread within the stable range",
        ax=ax,
    )
    ax.axhline(1, color=plots.EDGE, linewidth=1)
