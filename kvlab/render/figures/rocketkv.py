"""RocketKV's figures on token budgets, from `kvlab.analyses.rocketkv.budgets`, with the paper's printed values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from kvlab import papers
from kvlab.analyses.rocketkv import budgets, design
from kvlab.analyses.rocketkv.budgets import NAMES
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import BETTER, WORSE

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

    from kvlab.analyses.findings import Findings

COLOURS = theme.colours(("exact_topk", "duoattention", "snapkv", "quest", "sparq", "hybrid", "rocketkv"))
# The methods that RocketKV is compared with; Exact-TopK, an oracle, gives way to the published split.
OTHERS = theme.colours(("duoattention", "snapkv", "quest", "sparq", "hybrid", "rocketkv_published"))
COMPRESSION = "compression S / t (budgets grow to the right)"
ERROR = "relative error of the output"


def figure_1(findings: Findings) -> Figure:
    """Figure 1: the paper's F1 on qasper next to the attention that is kept; eviction and selection apart."""
    methods = ["exact_topk", "duoattention", "snapkv", "quest", "sparq"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8))
    qasper = papers.figure("rocketkv", "figure1")
    _printed(left, qasper, "qasper", methods, "F1 on qasper (%)", "Paper, figure 1: Mistral-7B")
    _ours(right, budgets.attention_kept(findings), methods, "share of attention kept", "Here: attention kept")
    _legend(figure, methods)
    return figure


def figure_4(findings: Findings) -> Figure:
    """Figure 4: the paper's LongBench, needles and RULER above; below, three measures on the attention."""
    methods = list(COLOURS)
    ruler = papers.figure("rocketkv", "ruler").query("model == 'Mistral-7B-v0.2' and length == 16000")
    ruler = ruler.assign(compression=(ruler["length"] / ruler["budget"]).round(1))
    figure, (above, below) = plt.subplots(2, 3, figsize=(14, 9))
    _longbench(above[:2], methods)
    title = "Paper: RULER 16K, Mistral-7B"
    _printed(above[2], ruler, "average", methods, "RULER average (%)", title, "compression", COMPRESSION)
    _ours(below[0], budgets.attention_kept(findings), methods, "share of attention kept", "Here: attention kept")
    errors, recalls = (budgets.values_of(findings, measure) for measure in ("output_error", "step_recall"))
    _ours(below[1], errors, methods, ERROR, "Here: output error")
    _ours(below[2], recalls, methods, "share of the step's top t read", "Here: recall")
    _legend(figure, methods)
    return figure


def gains(findings: Findings) -> Figure:
    """RocketKV's gain over each other method by compression, paired by document, in three measures."""
    measures = {"mass_lost": "attention mass", "output_error": "output error", "step_recall": "recall"}
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.8))
    for ax, (measure, label) in zip(axes, measures.items(), strict=True):
        points = budgets.gains_of(findings, measure)
        plots.estimates(
            points.loc[points["other"].isin(OTHERS)],
            x="compression",
            hue="other",
            colours=OTHERS,
            names=NAMES,
            xlabel=COMPRESSION,
            ylabel=f"gain in {label}",
            title=f"RocketKV against the others: {label}",
            ax=ax,
        )
        _by_compression(ax, points)
        ax.axhline(0, color=plots.EDGE, linewidth=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    for ax in axes:
        ax.get_legend().remove()
    return figure


def next_best_table(best: pandas.DataFrame) -> Styler:
    """`budgets.next_best` as a table to read."""
    shown = best.assign(next_best=[NAMES[method] for method in best["next_best"]]).style.hide()
    shown.format({"compression": "{:g}", **dict.fromkeys(["value", "low", "high"], "{:+.3f}")})
    return shown


def figure_8(findings: Findings) -> Figure:
    """Figure 8: hybrid attention against its two halves, pages and dimensions; the paper's scores on the left."""
    methods = ["hybrid", "quest", "sparq"]
    figure, axes = plt.subplots(1, 4, figsize=(17, 4.6))
    _longbench(axes[:2], methods)
    _ours(axes[2], budgets.attention_kept(findings), methods, "share of attention kept", "Here: attention kept")
    errors = budgets.values_of(findings, "output_error")
    _ours(axes[3], errors, methods, ERROR, "Here: output error")
    _legend(figure, methods)
    return figure


def longer(findings: Findings) -> Figure:
    """RocketKV's lead over the best rival on shorter and longer prompts, at one token budget; the paper's on RULER."""
    leads = findings.frame(design.LONGER_LEAD)
    tokens: Any = findings.table.groupby("end")["length"].mean()
    leads = leads.assign(tokens=leads["end"].map(tokens))
    names = {"output_error": "output error", "mass_lost": "attention mass"}
    printed = papers.figure("rocketkv", "ruler").query("model == 'Llama3.1-8B'")
    figure, (left, right) = plt.subplots(1, 2, figsize=(plots.WIDTH, 5))
    scores: Any = printed.pivot_table(index=["budget", "length"], columns="method", values="average").dropna()
    gaps = (scores["rocketkv"] - scores.filter(budgets.RIVALS).max(axis=1)).rename("lead").reset_index()
    shades = plots.shades(gaps["budget"].nunique())
    for colour, (budget, part) in zip(shades, gaps.groupby("budget"), strict=True):
        left.plot(
            part["length"], part["lead"], "--", marker="D", markersize=4, color=colour, label=f"{budget:g} tokens"
        )
    plots.doublings(left, sorted(gaps["length"].unique()))
    left.set_xlabel("sequence (tokens)")
    left.set_ylabel("lead over the best rival (points)")
    left.set_title("Paper: RULER, Llama3.1-8B")
    left.legend(title="token budget", title_fontsize=9, fontsize=9, **plots.BELOW)
    plots.estimates(
        leads,
        x="tokens",
        hue="measure",
        names=names,
        xlabel="prompt (tokens), at one token budget",
        ylabel="best rival's loss less RocketKV's, share",
        title="Here: RocketKV's lead",
        ax=right,
    )
    right.legend(title="loss", title_fontsize=9, fontsize=9, **plots.BELOW)
    for ax in (left, right):
        ax.axhline(0, color=plots.EDGE, linewidth=1)
    plots.note(figure, findings.table, f"bands: {plots.INTERVALS}", "above 0: RocketKV is better than the best rival")
    return figure


def printed(findings: Findings) -> Figure:
    """The cells of the paper's own tables: RocketKV's lead over the best of the others in each, benchmark by benchmark.

    Args:
        findings: from `kvlab.analyses.rocketkv.printed.findings`.
    """
    table: Any = findings.table.query("method == 'rocketkv'")
    figure, ax = plt.subplots(figsize=(9, 4.2))
    labels = {"longbench": "LongBench", "needle": "needles", "ruler": "RULER"}
    for y, benchmark in enumerate(labels):
        part: Any = table[table["benchmark"] == benchmark].sort_values("gap")
        across = [y + 0.7 * (i / max(1, len(part) - 1) - 0.5) for i in range(len(part))]
        colours = [WORSE if gap < 0 else BETTER for gap in part["gap"]]
        ax.scatter(across, part["gap"], s=16, c=colours)
    ax.axhline(0, color=plots.EDGE, linewidth=1)
    ax.set_yscale("symlog", linthresh=1)
    ax.set_xticks(range(len(labels)), list(labels.values()))
    ax.set_ylabel("RocketKV less the best of the others (points)")
    ax.set_title(f"As printed, cell by cell; {theme.WORDS[theme.WORSE]}: another method is ahead")
    return figure


def costs(means: pandas.DataFrame) -> Figure:
    """The bytes that each method stores against those that it reads at a step, from the least to the most compression.

    Args:
        means: from `budgets.costs`.
    """
    figure, ax = plt.subplots(figsize=(8.6, 5))
    for method, colour in COLOURS.items():
        part = means.query("method == @method").sort_values("compression")
        ax.plot(part["read"], part["stored"], marker="o", color=colour, label=NAMES[method])
    low = min(means["read"])
    ax.plot([low, 1], [low, 1], color=plots.PAPER, linewidth=1, linestyle=":", label="stored = read")
    ax.set_xscale("log")
    ax.set_yscale("log")
    for set_ticks, shares in ((ax.set_xticks, (2, 5, 10, 25, 100)), (ax.set_yticks, (2, 5, 10, 25, 50, 100, 150))):
        set_ticks([share / 100 for share in shares], [f"{share} %" for share in shares])
    ax.minorticks_off()
    ax.set_xlabel("read at each step, share of the full cache")
    ax.set_ylabel("stored, share of the full cache")
    ax.set_title("Equal token budgets are not equal caches")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def costs_table(means: pandas.DataFrame) -> Styler:
    """`budgets.costs` as a table to read, from least to most compression and from least to most read."""
    named = means.assign(method=[NAMES[method] for method in means["method"]])
    shown = named.sort_values(["compression", "read"]).style.hide()
    shares = ["stored", "read", "mass_lost", "output_error", "step_recall"]
    shown.format({"compression": "{:g}", **dict.fromkeys(shares, "{:.3f}")})
    return shown


def _ours(ax: Axes, points: pandas.DataFrame, methods: Sequence[str], ylabel: str, title: str) -> None:
    """A measure of some methods by compression."""
    part = points.loc[points["method"].isin(methods)]
    plots.estimates(
        part,
        x="compression",
        hue="method",
        colours=COLOURS,
        names=NAMES,
        xlabel=COMPRESSION,
        ylabel=ylabel,
        title=title,
        ax=ax,
    )
    _by_compression(ax, part)
    ax.legend().remove()


def _by_compression(ax: Axes, points: pandas.DataFrame) -> None:
    """Compressions along x, the largest on the left, so that budgets grow to the right."""
    plots.doublings(ax, sorted(points["compression"].unique()))
    ax.invert_xaxis()


def _printed(
    ax: Axes,
    table: pandas.DataFrame,
    column: str,
    methods: Sequence[str],
    ylabel: str,
    title: str,
    x: str = "budget",
    xlabel: str = "token budget t",
) -> None:
    """One column of a printed table for some methods, and the full cache's as a line."""
    for method in methods:
        part = table.query("method == @method").dropna(subset=[column]).sort_values(x)
        ax.plot(part[x], part[column], "--", marker="D", markersize=4, linewidth=1.4, color=COLOURS[method])
    for full in table.loc[table["method"] == "full", column].head(1):
        ax.axhline(full, color=plots.PAPER, linewidth=1)
        at_the_right = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        ax.annotate("full cache", (1, full), fontsize=8, color=plots.EDGE, **at_the_right)
    ax.set_xscale("log")
    ax.set_ylim(0, None)
    ticks = sorted(table[x].dropna().unique())
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=9)
    ax.minorticks_off()
    if x == "compression":
        ax.invert_xaxis()
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title)


def _longbench(axes: Sequence[Axes], methods: Sequence[str]) -> None:
    """The paper's average on LongBench and its needle score, for Llama3.1-8B."""
    printed = papers.figure("rocketkv", "longbench").query("model == 'Llama3.1-8B'")
    average, needle = axes
    _printed(average, printed, "average", methods, "LongBench average (%)", "Paper: LongBench, Llama3.1-8B")
    _printed(needle, printed, "needle", methods, "needles found (%)", "Paper: needle, Llama3.1-8B")


def _legend(figure: Figure, methods: Sequence[str]) -> None:
    """The legend below all panels: solid lines are ours, dashed ones the paper's."""
    handles = [Line2D([], [], color=COLOURS[method], marker="o", label=NAMES[method]) for method in methods]
    printed = Line2D(
        [], [], color=plots.PAPER, linestyle="--", marker="D", markersize=4, label="as the paper prints it"
    )
    figure.legend(handles=[*handles, printed], loc="outside lower center", ncols=4)
