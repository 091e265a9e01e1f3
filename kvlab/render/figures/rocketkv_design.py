"""RocketKV's figures on its design, from `kvlab.analyses.rocketkv.design`, with the paper's printed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from kvlab import papers
from kvlab.analyses.rocketkv import budgets, common, design
from kvlab.render.figures import plots

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

BLUE, ORANGE, GREEN, *_ = plots.COLOURS
LOSSES = {"output_error": "relative error of the output", "mass_lost": "share of attention lost"}


def figure_6(findings: Findings) -> Figure:
    """Figure 6: losses at each change from SnapKV to RocketKV, and the entries that a group stores more than once."""
    compressions = sorted(findings.table["compression"].unique())
    labels = {c: f"c = {c:g}" for c in compressions}
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.2), width_ratios=[1, 1, 0.62])
    values = findings.frame(budgets.VALUE)
    _losses(axes[:2], values, design.LADDER, plots.COLOURS, labels, "compression S / t", "Figure 6")
    again = findings.frame(design.REDUNDANCY).set_index("compression")["value"].reindex(compressions)
    chance = again - findings.frame(design.OVER_CHANCE).set_index("compression")["value"].reindex(compressions)
    xs = range(len(compressions))
    axes[2].bar(xs, again, 0.5, color=BLUE, label="measured")
    axes[2].bar(xs, chance, 0.5, color=plots.PAPER, label="by chance")
    axes[2].set_xticks(xs, list(labels.values()))
    axes[2].set_xlabel("compression S / t")
    axes[2].set_ylabel("share of entries stored again")
    axes[2].set_title("Stored more than once")
    axes[2].margins(y=0.25)
    axes[2].legend(loc="upper right")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def first_stage(findings: Findings) -> Figure:
    """The losses with the first stage alone, by its pooling."""
    values = findings.frame(design.FIRST_STAGE + budgets.VALUE)
    labels = {c: f"S / {c**0.5:.1f}" for c in sorted(values["compression"].unique())}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    # Both have the colours of figure 6.
    colours = [ORANGE, GREEN]
    _losses(
        axes, values, design.FIRST_STAGES, colours, labels, "tokens that the first stage leaves", "First stage alone"
    )
    for ax in axes:
        ax.margins(y=0.2)
    axes[0].legend()
    return figure


def figure_7(findings: Findings) -> Figure:
    """Figure 7: losses by pooling kernel and length, and the best kernel by length next to the paper's."""
    printed, best = papers.figure("rocketkv", "figure7"), design.best_kernels(findings.table)
    mean = best.groupby("length")["kernel"].agg(stats.gmean)
    values, kernels = findings.frame(design.KERNEL), sorted(findings.table["kernel"].unique())
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.8))
    for ax, (measure, label) in zip(axes, LOSSES.items(), strict=False):
        plots.estimates(
            values.loc[values["measure"] == measure],
            x="kernel",
            hue="length",
            names={length: f"{length} tokens" for length in values["length"].unique()},
            xlabel="pooling kernel (tokens)",
            ylabel=label,
            title=f"Figure 7: {label}",
            ax=ax,
        )
        plots.doublings(ax, kernels)
    axes[0].legend(title="prompt")
    axes[1].get_legend().remove()
    plots.paper_points(axes[2], list(printed["length"]), list(printed["kernel"]), "paper, three models")
    axes[2].scatter(best["length"], best["kernel"], s=22, color=BLUE, alpha=0.5, label="here, each document")
    axes[2].plot(mean.index, mean, marker="o", color=BLUE, label="here, geometric mean")
    axes[2].set_xscale("log", base=2)
    axes[2].set_xticks([500, 2000, 8000, 32000, 96000], ["500", "2K", "8K", "32K", "96K"])
    axes[2].set_yscale("log", base=2)
    axes[2].set_yticks(kernels, [str(kernel) for kernel in kernels])
    axes[2].minorticks_off()
    axes[2].set_xlabel("prompt (tokens)")
    axes[2].set_ylabel("best kernel (tokens)")
    axes[2].set_title("Best kernel by length")
    axes[2].legend(loc="upper left")
    return figure


def table_1(findings: Findings, compression: float = 16) -> Figure:
    """Table 1: what methods store at one compression, by the paper's formula and measured; RocketKV at all of them."""
    at = findings.table.query("compression == @compression").set_index("method")
    ours = findings.table.query("method == 'rocketkv'").sort_values("c")
    c = np.geomspace(ours["c"].min(), ours["c"].max(), 60)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8))
    plots.paper_beside_ours(
        at["storage_paper"].to_dict(),
        at["storage_measured"].to_dict(),
        ylabel="stored, share of the full cache",
        title=f"Storage at a compression of {compression:g}",
        labels=budgets.NAMES,
        paper_label="table 1's formula",
        ax=left,
    )
    by_paper, by_tensors = (
        [share("rocketkv", at) for at in c] for share in (common.storage_by_paper, common.storage_by_tensors)
    )
    right.plot(c, by_paper, "--", color=plots.PAPER, label="table 1: 1/√c + 2/c^(3/4)")
    right.plot(c, by_tensors, color=GREEN, label="tensors: 1/√c + 1/c^(3/4)")
    right.plot(ours["c"], ours["storage_measured"], "o", color=BLUE, label="stored, measured")
    right.plot(c, [common.traffic_by_paper("rocketkv", at) for at in c], ":", color=ORANGE, label="traffic: 1/c")
    right.plot(ours["c"], ours["traffic_measured"], "s", color=ORANGE, label="read at each step, measured")
    plots.doublings(right, list(ours["compression"]))
    right.set_xlabel("compression c = S / t")
    right.set_ylabel("share of the full cache")
    right.set_title("RocketKV: storage and traffic by compression")
    right.legend()
    return figure


def splits(findings: Findings) -> Figure:
    """The losses, and what the first stage leaves, by its share of the compression; stars: the published code's."""
    measures = {**LOSSES, "survived": "share of the top t still stored"}
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8))
    for ax, (measure, label) in zip(axes, measures.items(), strict=True):
        points = design.by_exponent(findings, measure)
        _by_exponent(ax, points, "exponent x of the first stage, S / c^x", label)
        star = {"marker": "*", "markersize": 13, "linestyle": "none"}
        for c, colour in zip(points["compression"].unique(), plots.COLOURS, strict=False):
            published = findings.row(budgets.VALUE, measure=measure, method=design.PUBLISHED, compression=c)
            at = [design.published_exponent(c)], [published.value]
            ax.plot(*at, color=colour, markeredgecolor="white", zorder=5, **star)
        _even_split(ax)
        ax.plot([], [], color=plots.PAPER, label="published code", **star)
        ax.legend()
    axes[2].axhline(0.5, color=plots.PAPER, linewidth=1, linestyle=":")
    return figure


def pages(findings: Findings) -> Figure:
    """The losses by the way that the search is shared between pages and dimensions."""
    measures = {**LOSSES, "step_recall": "share of the step's top t read"}
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4))
    for ax, (measure, label) in zip(axes, measures.items(), strict=True):
        points = design.by_exponent(findings, measure)
        _by_exponent(ax, points, "exponent x of the pages, c^x entries", label)
        _even_split(ax)
        ax.legend()
    return figure


def _losses(
    axes: Sequence[Axes],
    values: pandas.DataFrame,
    names: Mapping[str, str],
    colours: Sequence[str],
    labels: Mapping[float, str],
    xlabel: str,
    title: str,
) -> None:
    """A panel for each of `LOSSES`: bars for the methods in `names` at the compressions in `labels`."""
    for ax, (measure, label) in zip(axes, LOSSES.items(), strict=True):
        plots.bars(
            values.loc[values["measure"] == measure],
            x="compression",
            hue="method",
            names=names,
            labels=labels,
            colours=colours,
            xlabel=xlabel,
            ylabel=label,
            title=f"{title}: {label}",
            ax=ax,
        )


def _by_exponent(ax: Axes, points: pandas.DataFrame, xlabel: str, label: str) -> None:
    """A measure by the exponent of a split, a curve for each compression."""
    plots.estimates(
        points,
        x="exponent",
        hue="compression",
        names={c: f"c = {c:g}" for c in points["compression"].unique()},
        xlabel=xlabel,
        ylabel=label,
        title=label.capitalize(),
        ax=ax,
    )


def _even_split(ax: Axes) -> None:
    ax.axvline(0.5, color=plots.PAPER, linestyle="--", linewidth=1.2, label="paper: even split")
