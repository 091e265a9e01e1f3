"""CompilerKV's tables 1 and 2, figure 2, and the analyses behind them, from `kvlab.analyses.compilerkv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt

from kvlab import papers
from kvlab.analyses.compilerkv import ablation, printed, quality, theorem
from kvlab.analyses.compilerkv.variants import ladder
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import AXIS, at

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

OURS, OTHERS = theme.look("compilerkv").colour, plots.COLOURS[1]
SHOWN = ("filled", *quality.RIVALS)
BUDGET = "budget, entries for each layer and KV head"
GATED = "CompilerKV, gated"
PARTS = {
    "no_head_table": "no head\nreliability",
    "static_threshold": "static\nthresholds",
    "raw_attention": "raw\nattention",
    "no_gate": "no gate\nat all",
}
"""Names of table 2's settings below their bars."""


def _printed_by_method(values: pandas.Series) -> dict[str, float]:
    """The paper's values of each method, by kvlab's names; its own stands beside the sets that fill the budget."""
    known = values.to_dict()
    names = {name: label for name, label in quality.LABELS.items() if name != "compilerkv"}
    names["filled"] = quality.LABELS["compilerkv"]
    return {name: known[label] for name, label in names.items() if label in known}


def _scores() -> pandas.DataFrame:
    return papers.figure("compilerkv", "table1")


# ------------------------------------------------------------------------------------------------------------ table 1


def table_1(findings: Findings) -> Figure:
    """What every method retains, and the gain of CompilerKV's filled sets on each rival, beside LongBench's averages;
    diamonds: gated sets, squares: the twin with SnapKV's pooling and window.

    findings: of `quality.table_1`.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(18, 4.8), width_ratios=[11, 8, 8])
    labels = {name: label.replace("KV", "-\nKV").replace("LLM", "-\nLLM") for name, label in quality.LABELS.items()}
    labels |= {"compilerkv": "gated", "filled": "filled\nup", "twin": "SnapKV's\ntwin"}
    plots.paper_beside_ours(
        _printed_by_method(printed.retained(_scores())),
        *plots.by_key(findings.frame(quality.RETAINED), "method"),
        labels=labels,
        ylabel="share of the full cache's",
        title="Table 1: what is retained",
        ours_label="attention kept here",
        paper_label="paper: LongBench over FullKV's",
        ax=left,
    )
    for ax, measure, title in ((middle, "kept", "gain in attention kept"), (right, "recall", "gain in recall")):
        plots.paper_beside_ours(
            {name: 100 * gain for name, gain in _printed_by_method(printed.gains(_scores())).items()},
            *plots.by_key(at(findings.frame(quality.GAIN_FILLED), measure=measure), "rival", 100),
            labels=labels,
            ylabel="CompilerKV over the competitor, %",
            title=f"Table 1: {title}",
            ours_label="here, filled up",
            paper_label="paper: LongBench",
            value_format="{:.1f}",
            ax=ax,
        )
        _other_sets(
            ax,
            {
                ("gated", "D", OTHERS): at(findings.frame(quality.GAIN), measure=measure),
                ("SnapKV's twin", "s", plots.COLOURS[2]): at(findings.frame(quality.GAIN_TWIN), measure=measure),
            },
        )
        ax.axhline(0, color=AXIS, linewidth=1)
    return figure


def _other_sets(ax: Axes, gains: Mapping[tuple[str, str, str], pandas.DataFrame]) -> None:
    """Marks beside each pair of bars, one for each (label, marker, colour): the same gains of other sets."""
    legend = ax.get_legend()
    assert legend is not None
    handles: list[Any] = list(legend.get_patches())
    labels = [text.get_text() for text in legend.get_texts()]
    for number, ((label, marker, tint), rows) in enumerate(gains.items()):
        xs = [x + 0.44 + 0.08 * number for x in range(len(rows))]
        handles.append(
            ax.errorbar(
                xs,
                100 * rows["value"],
                yerr=plots.spread(rows, 100),
                fmt=marker,
                markersize=5,
                capsize=2,
                zorder=4,
                color=tint,
            )
        )
        labels.append(label)
    ax.legend(handles, labels, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=8.5, columnspacing=1)


# ------------------------------------------------------------------------------------------------------------ figure 2


def figure_2(findings: Findings, entries: float) -> Figure:
    """What every method keeps and recalls by budget, and how many entries the gate lets through.

    findings: of `quality.figure_2`; entries: the paper's budget in entries of the prompts here, where its diamonds
    stand.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.6))
    curves = findings.frame(quality.AT_BUDGET)
    _curves(left, at(curves, measure="kept"), "share of the response's attention", "Figure 2: attention kept")
    _curves(middle, at(curves, measure="recall"), "share of the gold top-k", "Recall")
    _paper_at(left, entries)
    _through_the_gate(right, at(curves, measure="stored", method="compilerkv"))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def _curves(ax: Axes, curves: pandas.DataFrame, ylabel: str, title: str) -> None:
    """A curve for each method, CompilerKV's filled sets with their interval, and dashed as the gate decides."""
    plots.lines(
        curves.query("method in @SHOWN"),
        x="budget",
        y="value",
        hue="method",
        names=quality.LABELS,
        colours=theme.colours(SHOWN) | {"filled": OURS},
        xlabel=BUDGET,
        ylabel=ylabel,
        title=title,
        ax=ax,
    )
    ours = at(curves, method="filled").sort_values("budget")
    ax.fill_between(ours["budget"], ours["low"], ours["high"], color=OURS, alpha=0.18, linewidth=0)
    gated = at(curves, method="compilerkv").sort_values("budget")
    ax.plot(gated["budget"], gated["value"], "--", color=OURS, label=GATED)
    plots.doublings(ax, ours["budget"].tolist())
    if legend := ax.get_legend():
        legend.remove()


def _paper_at(ax: Axes, entries: float) -> None:
    """The paper's averages over the full cache's, three of them named."""
    retained = _printed_by_method(printed.retained(_scores()))
    for name, side in {"filled": -1, "h2o": -1, "streamingllm": 1}.items():
        ax.annotate(
            quality.LABELS["compilerkv" if name == "filled" else name],
            (entries, retained[name]),
            xytext=(7 * side, 0),
            textcoords="offset points",
            fontsize=8,
            ha="left" if side > 0 else "right",
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


def _through_the_gate(ax: Axes, stored: pandas.DataFrame) -> None:
    plots.estimates(
        stored,
        x="budget",
        xlabel=BUDGET,
        ylabel="entries stored of the prompt",
        title="What CompilerKV's gate lets through",
        ax=ax,
    )
    budgets = sorted(stored["budget"])
    ax.plot(budgets, budgets, color=AXIS, linewidth=1, linestyle=":")
    ax.annotate("the budget", (budgets[-1], budgets[-1]), ha="right", va="bottom", fontsize=9, color=AXIS)
    plots.doublings(ax, budgets)
    ax.set_yscale("log", base=2)
    ax.set_yticks(budgets, [f"{budget:,}" for budget in budgets])


# ------------------------------------------------------------------------------------------------------------ table 2


def table_2(findings: Findings, entries: float) -> Figure:
    """What is lost without each part, beside the paper's losses, and what each setting stores.

    findings: of `ablation.table_2`; entries: the budget.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.6), width_ratios=[4, 4, 5])
    lost = printed.parts(papers.figure("compilerkv", "table2")).to_dict()
    losses = findings.frame(ablation.LOSS)
    for ax, measure, label in ((left, "kept", "attention kept"), (middle, "recall", "recall")):
        plots.paper_beside_ours(
            {part: 100 * loss for part, loss in lost.items()},
            *plots.by_key(_in_order(at(losses, measure=measure), list(PARTS)), "part", 100),
            labels=PARTS,
            ylabel="loss without the part, %",
            title=f"Table 2: {label}",
            ours_label=f"{label} here",
            paper_label="paper: LongBench",
            value_format="{:.1f}",
            ax=ax,
        )
        ax.axhline(0, color=AXIS, linewidth=1)
    stored = _in_order(findings.frame(ablation.STORED), ["full", *PARTS])
    right.bar(
        range(len(stored)),
        stored["value"],
        0.5,
        color=OURS,
        yerr=plots.spread(stored),
        error_kw={"capsize": 3, "linewidth": 1.2},
    )
    right.axhline(entries, color=AXIS, linewidth=1, linestyle=":")
    names = {"full": "Compiler-\nKV", **PARTS}
    right.set_xticks(range(len(stored)), [names[part] for part in stored["part"]])
    right.set(ylabel="entries stored of the prompt", title="What each stores; dotted: the budget")
    return figure


def _in_order(table: pandas.DataFrame, parts: Sequence[str]) -> pandas.DataFrame:
    """The rows of these parts, in this order, without parts that were not measured."""
    return table.query("part in @parts").sort_values("part", key=lambda column: column.map(parts.index))


# ------------------------------------------------------------------------------------------------- behind the tables


def thresholds(admitted: pandas.DataFrame) -> Figure:
    """The thresholds that would let exactly the budget pass, and those of the tables.

    admitted: of `thresholds.admitted`.
    """
    figure, ax = plt.subplots(figsize=(8, 4.2))
    needed = admitted.pivot_table(index="layer", columns="document", values="needed")
    ax.fill_between(needed.index, needed.min(axis=1), needed.max(axis=1), alpha=0.2, color=OURS)
    ax.plot(needed.median(axis=1), marker="o", color=OURS, label="would let exactly the budget pass")
    positive = admitted.query("threshold > 0")
    ax.scatter(
        positive["layer"],
        positive["threshold"],
        marker="_",
        s=60,
        color=OTHERS,
        label="the table's, for each document",
    )
    ax.set_yscale("log")
    ax.set(xlabel="layer", ylabel="threshold, relative to the largest score", title="Which thresholds matter")
    ax.set_ylim(top=2)
    ax.legend()
    return figure


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
