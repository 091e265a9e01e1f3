"""CompilerKV's tables 1 and 2, figure 2, and the analyses behind them, from `kvlab.analyses.compilerkv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from kvlab import papers
from kvlab.analyses.compilerkv import ablation, printed, quality, theorem
from kvlab.analyses.compilerkv.variants import ladder
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import AXIS, at, named_rows

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

OURS, OTHERS = theme.look("compilerkv").colour, plots.COLOURS[1]
SHOWN = ("filled", *quality.RIVALS)
SETS = {
    "here": (quality.GAIN_FILLED, "P", OURS),
    "here, with SnapKV's pooling and window": (quality.GAIN_TWIN, "s", plots.COLOURS[2]),
    "here, the authors' code": (quality.GAIN_PUBLISHED, "^", OTHERS),
}
"""Whose gain a mark is: the effect, the marker, the colour."""
BUDGET = "budget, entries for each layer and KV head"


def _printed_by_method(values: pandas.Series) -> dict[str, float]:
    """The paper's values of each method, by kvlab's names; its own stands next to the sets that fill the budget."""
    known = values.to_dict()
    return {name: known[label] for name, label in quality.LABELS.items() if label in known}


def _scores() -> pandas.DataFrame:
    return papers.figure("compilerkv", "table1")


# ------------------------------------------------------------------------------------------------------------ table 1


def table_1(findings: Findings) -> Figure:
    """The gain of CompilerKV's filled sets on each rival: a row for each rival, a panel for each measure.

    Next to it stand LongBench's averages, its twin with SnapKV's pooling and window, and the authors' code.

    findings: of `quality.table_1`.
    """
    figure, axes = plt.subplots(1, 2, figsize=(plots.WIDTH, 5.4))
    rivals = [*quality.RIVALS]
    paper = {name: 100 * gain for name, gain in _printed_by_method(printed.gains(_scores())).items()}
    for ax, (measure, title) in zip(axes, {"kept": "attention kept", "recall": "recall"}.items(), strict=True):
        ax.scatter(
            [paper[name] for name in rivals],
            [y - 0.3 for y in range(len(rivals))],
            marker="D",
            s=34,
            color=plots.PAPER,
            edgecolor=AXIS,
            linewidth=0.8,
            label="paper: LongBench's score",
        )
        for number, (label, (effect, marker, tint)) in enumerate(SETS.items()):
            rows = at(findings.frame(effect), measure=measure).set_index("rival").loc[rivals]
            ys = [y - 0.1 + 0.2 * number for y in range(len(rivals))]
            shown = {"fmt": marker, "color": tint, "capsize": 2, "elinewidth": 1.4, "label": label}
            plots.points(ax, 100 * rows.filter(["value", "low", "high"]), ys, rows=True, **shown)
        ax.axvline(0, color=AXIS, linewidth=1)
        named_rows(ax, [quality.LABELS[name] for name in rivals], [theme.look(name).colour for name in rivals])
        for y in range(1, len(rivals)):
            ax.axhline(y - 0.5, color=theme.GRID, linewidth=0.8, zorder=0)
        ax.set_xlabel(f"CompilerKV's gain in {title} (%)", fontsize=10)
        ax.set_title(f"Table 1: {title}")
    axes[1].tick_params(labelleft=False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2)
    right = "right of 0: CompilerKV is better than the method that the row names"
    plots.note(figure, findings.table, f"bars: {plots.INTERVALS}", right)
    return figure


# ------------------------------------------------------------------------------------------------------------ figure 2


def figure_2(findings: Findings, entries: float) -> Figure:
    """The attention kept and the recall of every method by budget.

    findings: of `quality.figure_2`; entries: the paper's budget in entries of the prompts here, where its diamonds
    stand.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6))
    curves = findings.frame(quality.AT_BUDGET)
    _curves(left, at(curves, measure="kept"), "share of the response's attention", "Figure 2: attention kept")
    _curves(right, at(curves, measure="recall"), "share of the gold top-k", "Recall")
    _paper_at(left, entries)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def _curves(ax: Axes, curves: pandas.DataFrame, ylabel: str, title: str) -> None:
    """A curve for each method, CompilerKV's with its interval."""
    plots.lines(
        curves,
        x="budget",
        y="value",
        hue="method",
        names=quality.LABELS,
        colours=theme.colours(SHOWN),
        xlabel=BUDGET,
        ylabel=ylabel,
        title=title,
        ax=ax,
    )
    ours = at(curves, method="filled").sort_values("budget")
    ax.fill_between(ours["budget"], ours["low"], ours["high"], color=OURS, alpha=0.18, linewidth=0)
    plots.doublings(ax, ours["budget"].tolist())
    if legend := ax.get_legend():
        legend.remove()


def _paper_at(ax: Axes, entries: float) -> None:
    """The paper's averages over the full cache's, three of them named."""
    retained = _printed_by_method(printed.retained(_scores()))
    for name in ("filled", "h2o", "streamingllm"):
        ax.annotate(
            quality.LABELS[name],
            (entries, retained[name]),
            xytext=(7, 0),
            textcoords="offset points",
            fontsize=8,
            ha="left",
            va="center",
            color=AXIS,
        )
    ax.scatter(
        [entries] * len(SHOWN),
        [retained[name] for name in SHOWN],
        marker="D",
        s=44,
        color=plots.PAPER,
        edgecolor=AXIS,
        linewidth=0.8,
        zorder=4,
        label="paper, table 1: LongBench over FullKV's",
    )


# ------------------------------------------------------------------------------------------------------------ table 2


def table_2(findings: Findings) -> Figure:
    """The loss by raw attention instead of the stabilised utility, next to the paper's loss.

    findings: of `ablation.table_2`.
    """
    figure, ax = plt.subplots(figsize=(7, 4.2))
    names = {"kept": "attention kept", "recall": "recall", "error": "output error"}
    lost = 100 * printed.parts(papers.figure("compilerkv", "table2")).to_dict()["raw_attention"]
    plots.paper_beside_ours(
        dict.fromkeys(names, lost),
        *plots.by_key(findings.frame(ablation.LOSS), "measure", 100),
        labels=names,
        ylabel="loss without the part, %",
        title="Table 2: raw attention for the stabilised utility",
        ours_label="here",
        paper_label="paper: LongBench",
        value_format="{:.1f}",
        ax=ax,
    )
    ax.axhline(0, color=AXIS, linewidth=1)
    return figure


# ------------------------------------------------------------------------------------------------- behind the tables


def steps_to_snapkv(findings: Findings, shares: Sequence[float]) -> Figure:
    """Attention lost on the way from CompilerKV to SnapKV: step by step, and at the first share by layer and by head.

    findings: of `ablation.steps_to_snapkv`, at these shares.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 5), width_ratios=[5, 5, 4])
    names, height = list(ladder(shares[0])), 0.8 / len(shares)
    steps = findings.frame(ablation.STEP)
    for number, percent in enumerate(ablation.percent(share) for share in shares):
        part = at(steps, percent=percent)
        left.barh(
            part["step"] + (number + 0.5) * height - 0.4,
            part["value"],
            height,
            color=plots.COLOURS[2 * number],
            xerr=plots.spread(part),
            error_kw={"capsize": 2, "linewidth": 1},
            label=f"{percent} % of the prompt",
        )
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.grid(axis="x")
    left.set(xlabel="attention lost", title="One change at a time")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    plots.estimates(
        ablation.by_layer(findings, shares[0]),
        x="layer",
        hue="method",
        colours={names[1]: plots.COLOURS[0], names[4]: plots.COLOURS[2], names[6]: plots.COLOURS[1]},
        xlabel="layer",
        ylabel="attention lost",
        title=f"By layer, {ablation.percent(shares[0])} % of the prompt",
        ax=middle,
    )
    middle.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=9)
    plots.heatmap(
        ablation.against_snapkv(findings, shares[0]),
        xlabel="query head",
        ylabel="layer",
        diverging=True,
        unit="attention lost, CompilerKV less SnapKV",
        title="By head: red loses more",
        ax=right,
    )
    return figure


def theorem_4_1(findings: Findings) -> Figure:
    """Both sides of A2, a point for each layer and head.

    findings: of `theorem.theorem_4_1`, at shares of the prompt.
    """
    figure, ax = plt.subplots(figsize=(6.4, 5.2))
    heads = theorem.by_head(findings)
    for tint, share in zip(plots.COLOURS, heads["budget"].unique(), strict=False):
        part = at(heads, budget=share)
        label = f"{ablation.percent(share)} % of the prompt"
        ax.scatter(part["bound"], part["lost"], s=14, alpha=0.6, color=tint, label=label)
    ends = 0.7 * min(heads["bound"]), 1.4 * max(heads["bound"])
    ax.plot(ends, ends, color=AXIS, linewidth=1)
    ax.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        xlabel="utility of what is discarded, over the head's weight",
        ylabel="attention that the head discards",
        title="A2: heads above the line break the bound",
    )
    ax.legend()
    return figure
