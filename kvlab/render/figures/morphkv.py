"""MorphKV's figures: the findings of its analyses, with the paper's printed values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import pandas

from kvlab import papers
from kvlab.analyses.morphkv import printed as recomputed
from kvlab.analyses.morphkv import responses, sizes, windows
from kvlab.render import theme
from kvlab.render.figures import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

NAMES = {
    "full": "full cache",
    "snapkv": "SnapKV",
    "snapkv_choosing": "SnapKV, free to choose",
    "snapkv_shared": "SnapKV, a set for each KV head",
    "h2o": "H2O",
    "keyformer": "Keyformer",
    "scissorhands": "Scissorhands",
    "streamingllm": "StreamingLLM",
    "random_response": "the prompt, and the response at random",
    "morphkv": "MorphKV",
}
COLOURS = theme.colours(NAMES)
MEASURES = {
    "mass_lost": "attention mass lost",
    "step_recall": "recall of each step's own top-k",
    "output_error": "relative output error",
}
BETTER = {"mass_lost": "lower is better", "step_recall": "higher is better", "output_error": "lower is better"}
# Benchmarks whose cache sizes the paper draws, and their figures.
SIZES = {"longwriter": "figure 6", "longgenbench": "figure 8", "longbench": "figure 9"}
REGIMES = {"writing": "long response", "answering": "short answer"}
H100 = 80
"""Gigabytes of an H100's memory."""


# ---------------------------------------------------------------------------------------------- long responses


def figures_10_and_11(small: Findings) -> Figure:
    """Every method at small budgets, by three measures, and how far SnapKV lies behind MorphKV.

    small: of `responses.small_budgets`.
    """
    figure, axes = plt.subplots(1, 4, figsize=(16, 4.3), width_ratios=[1, 1, 1, 0.8])
    points = small.frame(responses.AT_SHARE)
    points["percent"] = 100 * points["share"]
    for ax, (measure, title) in zip(axes, MEASURES.items(), strict=False):
        plots.estimates(
            points.loc[points["measure"] == measure],
            x="percent",
            hue="policy",
            names=NAMES,
            colours=COLOURS,
            xlabel="budget (% of the prompt's cache)",
            ylabel=title,
            title=title,
            ax=ax,
        )
        ax.set_xticks(points["percent"].unique())
        ax.get_legend().remove()
    drops = small.frame(responses.RECALL_DROP).query("policy == 'snapkv'")
    drops["budget"] = [f"{share:.0%}" for share in drops["share"]]
    ours, intervals = plots.by_key(drops, "budget", 100)
    paper = papers.figure("morphkv", "figure10").set_index("where")
    plots.paper_beside_ours(
        {next(iter(ours)): 100 * paper.loc["average", "drop"]},
        ours,
        intervals,
        ylabel="SnapKV below MorphKV (%)",
        title="how far SnapKV lies behind",
        ours_label="recall, here",
        paper_label="score, paper",
        value_format="{:.0f}",
        ax=axes[-1],
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=5)
    return figure


def figure_2a(stored: Findings, model: str) -> Figure:
    """Storage of each method along a response: measured and by formula, and by formula for a model of the paper.

    stored: of `sizes.against_formula`; model: the name of the measured model.
    """
    figure, (measured, predicted) = plt.subplots(1, 2, figsize=(13, 4.4))
    for name in stored.table["policy"].unique():
        means = (
            stored.table.loc[stored.table["policy"] == name].pivot_table(index="step", values=["measured", "predicted"])
            / 2**20
        )
        # H2O's curve lies on MorphKV's, so it is drawn broader and below.
        width = 9 if name == "h2o" else 4
        measured.plot(means["measured"], color=COLOURS[name], alpha=0.45, label=NAMES[name], linewidth=width)
        measured.plot(means["predicted"], color=COLOURS[name], linewidth=1.2, linestyle="--")
    measured.set(xlabel="decoding step", ylabel="stored (MiB)", title=f"{model}: measured, and by formula (dashed)")
    measured.legend()
    lengths, batch = list(range(500, 16500, 500)), 32
    plots.lines(
        sizes.over_lengths("Qwen", batch, lengths),
        x="tokens",
        y="gigabytes",
        hue="method",
        names=NAMES,
        colours=COLOURS,
        marker=None,
        xlabel="prompt and response (tokens)",
        ylabel="keys and values (GB)",
        title=f"Qwen2.5-7B by formula, {batch} sequences, bfloat16",
        ax=predicted,
    )
    predicted.axhline(H100, color=plots.PAPER, linestyle="--")
    predicted.annotate(
        f"all memory of an H100 ({H100} GB)",
        (lengths[-1], H100),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=plots.EDGE,
        fontsize=9,
    )
    return figure


def figures_6_8_and_9(predicted: Findings) -> Figure:
    """Cache sizes by formula next to the printed ones, and the memory that MorphKV saves.

    predicted: of `sizes.printed_sizes`.
    """
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.4), width_ratios=[3, 3, 2, 2])
    relative = predicted.frame(sizes.RELATIVE_SIZE).set_index("method")
    for ax, (benchmark, number) in zip(axes, SIZES.items(), strict=False):
        printed = predicted.table[predicted.table["benchmark"] == benchmark].set_index("method")
        methods = [method for method in ("snapkv", "h2o", "morphkv") if method in printed.index]
        part = relative[relative["benchmark"] == benchmark].loc[methods].reset_index()
        plots.paper_beside_ours(
            printed["printed"].to_dict(),
            *plots.by_key(part, "method"),
            labels=NAMES,
            ours_label="by formula",
            ylabel="times the full cache",
            title=f"{number}: {printed['tokens'].iloc[0]:,} tokens",
            ax=ax,
        )
        ax.axhline(1, color=plots.INK, linewidth=1, linestyle=":")
    saved = predicted.frame(sizes.SAVING).set_index("benchmark").loc[sizes.HEADLINE].set_index("method")
    plots.paper_beside_ours(
        as_stated("memory_saving"),
        *plots.by_key(saved.loc[["snapkv", "h2o"]].reset_index(), "method", 100),
        labels=NAMES,
        ours_label="by formula",
        ylabel="memory that MorphKV saves (%)",
        title="LongGenBench: saved against",
        value_format="{:.0f}",
        ax=axes[-1],
    )
    return figure


def as_stated(statement: str) -> dict[str, float]:
    """The statements of abstract and introduction, in per cent, by the method that MorphKV is compared with."""
    headline = papers.figure("morphkv", "headline").set_index("statement").loc[statement]
    return (100 * headline.set_index("against")["value"]).to_dict()


def figure_7(along: Findings, inside: Findings) -> Figure:
    """The loss of each method along a response, by replay and inside the model, and the slopes next to the paper's.

    along: of `responses.along_a_response`; inside: of `responses.teacher_forced`.
    """
    figure, (lost, drift, paper, slopes) = plt.subplots(1, 4, figsize=(16, 4.4), width_ratios=[1, 1, 0.9, 0.9])
    compressed = along.table.query("policy in ['snapkv', 'h2o', 'morphkv']")
    by_step(lost, compressed, "mass_lost", "attention mass lost", "short prompt (as LongWriter)")
    by_step(drift, inside.table, "kl", "KL from the full cache (nats)", "prompt above the budget")
    order = ["morphkv", "h2o", "snapkv"]
    printed = 100 * papers.figure("morphkv", "figure7").set_index("method").loc[order]
    middle, half = (printed["low"] + printed["high"]) / 2, (printed["high"] - printed["low"]) / 2
    paper.bar(range(len(order)), middle, 0.6, color=plots.PAPER, zorder=2)
    ranges = [index for index, extent in enumerate(half) if extent > 0]
    paper.errorbar(
        ranges, middle.iloc[ranges], yerr=half.iloc[ranges], fmt="none", color=plots.INK, capsize=3, linewidth=1.5
    )
    paper.set(ylabel="loss of the judge's score (%)", title="paper: response x 4")
    for findings, measure, marker, shift in ((along, "mass_lost", "o", -0.2), (inside, "kl", "s", 0.2)):
        frame = findings.frame(responses.SLOPE)
        for index, name in enumerate(order):
            row = frame.loc[(frame["measure"] == measure) & (frame["policy"] == name)]
            plots.points(slopes, row, [index + shift], color=COLOURS[name], fmt=marker)
        slopes.plot([], [], marker, color=plots.INK, label={"mass_lost": "mass lost", "kl": "KL (nats)"}[measure])
    slopes.axhline(0, color=plots.INK, linewidth=1)
    slopes.legend()
    slopes.set(ylabel="slope (for each 100 tokens)", title="here: slopes")
    for ax in (paper, slopes):
        ax.set_xticks(range(len(order)), [NAMES[name] for name in order])
        ax.set_xlim(-0.6, len(order) - 0.4)
    return figure


def by_step(ax: Axes, table: pandas.DataFrame, measure: str, ylabel: str, title: str) -> None:
    """A curve for each policy along the response, with bands over documents."""
    plots.estimates(
        responses.binned(table, measure),
        x="step",
        hue="policy",
        names=NAMES,
        colours=COLOURS,
        marker=None,
        xlabel="decoding step",
        ylabel=ylabel,
        title=title,
        ax=ax,
    )


def tables_2_and_3(on_responses: Findings, answers: Findings) -> Figure:
    """The stated gains next to those recomputed from the tables, and table 3's difference by the authors' answers.

    on_responses: of `printed.long_responses`; answers: of `rescored.table_3`.
    """
    figure, (stated, tasks) = plt.subplots(1, 2, figsize=(13.5, 4.9), width_ratios=[1, 1.9])
    gains = on_responses.frame(recomputed.GAIN).query("table == 'table2'")
    plots.paper_beside_ours(
        as_stated("accuracy_gain"),
        *plots.by_key(gains, "method", 100),
        labels={method: f"over {NAMES[method]}" for method in gains["method"]},
        ours_label="from table 2",
        paper_label="stated",
        ylabel="MorphKV's gain in accuracy (%)",
        title="LongGenBench: stated and recomputed",
        value_format="{:.1f}",
        ax=stated,
    )
    means: Any = answers.table.groupby("task")["over_snapkv"].mean()
    order = sorted(means.index, key=means.to_dict().__getitem__)
    for at, (model, part) in enumerate(answers.table.groupby("model")):
        places = [order.index(task) + 0.22 * (at - 1) for task in part["task"]]
        ends = [part["over_snapkv"] - part["low"], part["high"] - part["over_snapkv"]]
        tasks.errorbar(places, part["over_snapkv"], ends, fmt="osD"[at], markersize=3.5, label=model, linewidth=1)
    left_out = set(answers.table.loc[~answers.table["printed"], "task"])
    tasks.axhline(0, color=plots.INK, linewidth=1)
    tasks.set_xticks(range(len(order)), [f"{task} *" if task in left_out else task for task in order])
    tasks.set(ylabel="MorphKV less SnapKV (points)", title="LongBench by the authors' answers (* not in table 3)")
    tasks.tick_params(axis="x", rotation=75)
    tasks.legend()
    return figure


# ---------------------------------------------------------------------------------------------- windows and fusions


def table_6(ablation: Findings) -> Figure:
    """Each measure by window and fusion, a row for each capacity, and the paper's accuracy by window.

    ablation: of `windows.window_ablation`.
    """
    means = ablation.frame(windows.MEAN)
    capacities, known = means["capacity"].unique(), sorted(means["window"].unique())
    means["place"] = means["window"].map(known.index)
    figure, axes = plt.subplots(len(capacities), 4, figsize=(15, 3.9 * len(capacities)), squeeze=False)
    for row, capacity in zip(axes, capacities, strict=True):
        for ax, (measure, title) in zip(row, MEASURES.items(), strict=False):
            plots.estimates(
                means.loc[(means["measure"] == measure) & (means["capacity"] == capacity)],
                x="place",
                hue="fusion",
                xlabel="window R (tokens)",
                ylabel=title,
                title=f"C + R = {capacity}: {BETTER[measure]}",
                ax=ax,
            )
            ax.set_xticks(range(len(known)), known)
        _accuracy_by_window(row[-1])
    return figure


def _accuracy_by_window(ax: Axes) -> None:
    printed = papers.figure("morphkv", "table6")
    for marker, (model, part) in zip("osD", printed.groupby("model"), strict=True):
        ax.plot(range(len(part)), part["average"], color=plots.PAPER, marker=marker, label=model)
    ax.set(xlabel="window R (tokens)", ylabel="accuracy (%)", title="paper, table 6: max, 4K", xlim=(-0.3, 1.3))
    ax.set_xticks([0, 1], sorted(printed["window"].unique()))
    ax.legend()


def along_the_response(ablation: Findings, fusion: str, capacity: int) -> Figure:
    """Each measure step by step, a curve for each window; ablation: of `windows.window_ablation`."""
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(13, 3.9))
    for ax, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        steps = windows.along(ablation, measure, fusion, capacity)
        plots.lines(
            steps,
            x="step",
            y="value",
            hue="window",
            names={window: f"R = {window}" for window in steps["window"]},
            marker=None,
            xlabel="decoding step",
            ylabel=title,
            title=f"{fusion} fusion, C + R = {capacity}",
            ax=ax,
        )
    return figure


def tables_4_and_5(ablation: Findings, regimes: Findings, printed: Findings, capacity: int) -> Figure:
    """The gain of sum fusion over max fusion: at each window, in two regimes, and in the paper's scores.

    ablation: of `windows.window_ablation`; regimes: of `windows.two_regimes`; printed: of `printed.fusions`;
    capacity: that of the ablation whose windows are shown.
    """
    figure, axes = plt.subplots(1, 4, figsize=(15.5, 4), width_ratios=[1, 1, 1, 0.62])
    gains = _gains_by_setting(ablation, regimes, capacity)
    for ax, (measure, title) in zip(axes, MEASURES.items(), strict=False):
        _gain_of_sum(ax, gains.loc[gains["measure"] == measure], title, plots.COLOURS[0], "o")
        if ax is not axes[0]:
            ax.set_yticklabels([])
    by_max = printed.frame(recomputed.MAX_OVER_SUM)
    scores = pandas.concat(
        [
            printed.frame(recomputed.SUM_OVER_MAX).assign(setting="table 5, LongWriter"),
            # The maximum's gain is the sum's loss.
            (-by_max).rename(columns={"low": "high", "high": "low"}).assign(setting="table 4, LongBench"),
        ]
    )
    _gain_of_sum(axes[-1], scores, "the paper's scores", plots.PAPER, "D")
    return figure


def _gains_by_setting(ablation: Findings, regimes: Findings, capacity: int) -> pandas.DataFrame:
    """Rows from both, with a column `setting` that names window and capacity."""
    by_window = ablation.frame(windows.FUSION_GAIN)
    by_window = by_window.loc[by_window["capacity"] == capacity]
    by_regime = regimes.frame(windows.REGIME_GAIN)
    known = regimes.table.drop_duplicates("regime").set_index("regime")
    return pandas.concat(
        [
            by_window.assign(setting=[f"window {window} of {capacity}" for window in by_window["window"]]),
            by_regime.assign(
                setting=[
                    f"{REGIMES[name]}, {known.loc[name, 'window']} of {known.loc[name, 'capacity']}"
                    for name in by_regime["regime"]
                ]
            ),
        ]
    )


def _gain_of_sum(ax: Axes, gains: pandas.DataFrame, title: str, colour: str, marker: str) -> None:
    """A row for each setting: the gain in per cent with its interval."""
    percent = 100 * gains.filter(["value", "low", "high"])
    ys = range(len(gains))
    plots.points(ax, percent, ys, rows=True, fmt=marker, color=colour)
    ax.axvline(0, color=plots.INK, linewidth=1)
    ax.set(xlabel="gain of sum over max (%)", title=title, ylim=(len(gains) - 0.5, -0.5))
    ax.set_yticks(ys, gains["setting"])
