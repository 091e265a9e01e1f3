"""ZSMerge's figures: the findings of its analyses, with the paper's printed values."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import pandas

from kvlab import papers
from kvlab.analyses.zsmerge import as_published as published
from kvlab.analyses.zsmerge import decoding, merging, sensitivity
from kvlab.render import theme
from kvlab.render.figures import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

BUDGET = "cache budget, share of the prompt"
ENTRIES = "entries for each layer and KV head, of about 100 tokens"
ALPHAS = {0: "alpha = 0 (called eviction)", 1: "alpha = 1 (residual merging)"}
FITS = 1e-6  # of a prompt that fits into the cache nothing is lost but rounding
VARIANTS = {
    "evict": "eviction (no residual slots)",
    "merge": "residual merging",
    "merge_alpha0": "residual merging, alpha = 0",
    "similarity": "filled by similarity (eq. 6)",
    "displaces": "the newcomer displaces",
    "plain": "scores by eq. 2",
}
CURVES = {"evict": plots.COLOURS[0], "merge": theme.look("zsmerge").colour, "merge_alpha0": plots.COLOURS[6]}
"""Variants that were measured at several budgets, and their colours."""
ONE_BELOW = plots.BELOW | {"ncols": 1}
DECODED = {"merge": "residual merging", "plain": "scores by eq. 2", "displaces": "the newcomer displaces"}
DECODED |= {"alpha0": "alpha = 0"}
DEFINITIONS = {"error": "each head", "squared_error": "each head, squared", "layer_error": "whole layers"}
MEASURES = {"error": "error of the output", "mass_lost": "attention mass lost"}


def figure_4(findings: Findings) -> Figure:
    """Figure 4: the errors of eviction and of merging by cache ratio, and the share of the error that merging removes.

    findings: of `merging.figure_4`.
    """
    printed = papers.figure("zsmerge", "figure4")
    figure, (errors, gains) = plt.subplots(1, 2, figsize=(plots.WIDTH, 5.6))
    curves = findings.frame(merging.ERROR)
    plots.estimates(
        curves.loc[curves["variant"].isin(CURVES)],
        x="ratio",
        hue="variant",
        log=True,
        names=VARIANTS,
        colours=CURVES,
        xlabel=BUDGET,
        ylabel="relative error of the attention output",
        title="Figure 4: eviction and merging",
        ax=errors,
    )
    for line in errors.lines:
        if line.get_label() == VARIANTS["merge_alpha0"]:
            line.set(linestyle="--", marker="s")  # it lies on eviction's
    both = {"eviction": printed["error_evict"], "merging": printed["error_merge"]}
    for name, values in both.items():
        for ratio, value in zip(printed["ratio"], values, strict=True):
            if value == value:  # pandas' missing values are not equal to themselves
                aside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
                errors.annotate(name, (ratio, value), fontsize=9, color=plots.EDGE, **aside)
    plots.paper_points(
        errors, [*printed["ratio"], *printed["ratio"]], pandas.concat(list(both.values())).tolist(), "paper at 50 %"
    )
    errors.legend(fontsize=9, **ONE_BELOW)
    plots.estimates(
        findings.frame(merging.REDUCTION),
        x="ratio",
        xlabel=BUDGET,
        ylabel="share of eviction's error removed",
        title="Error removed by merging",
        ax=gains,
    )
    gains.lines[0].set_label("of the error")
    others = {
        "of the squared error": merging.REDUCTION_SQUARED,
        "of the error of whole layers": merging.REDUCTION_LAYER,
    }
    for colour, marker, (label, effect) in zip(plots.COLOURS[1:], "s^", others.items(), strict=False):
        reduced = findings.frame(effect)
        gains.plot(reduced["ratio"], reduced["value"], color=colour, marker=marker, linestyle=":", label=label)
    chosen = findings.frame(merging.REDUCTION_OF_CHOICE)
    for number, (choice, part) in enumerate(chosen.groupby("choice", sort=False)):
        aside = (part["ratio"] + 0.025 * (number - 1)).tolist()  # at one budget they hide each other
        label = f"of the error: {VARIANTS[str(choice)]}"
        plots.points(gains, part, aside, color=plots.COLOURS[3 + number], fmt="v<>"[number % 3], capsize=2, label=label)
    gains.plot(printed["ratio"], printed["reduction"], color=plots.PAPER, linestyle="--", linewidth=1.2)
    plots.paper_points(gains, list(printed["ratio"]), list(printed["reduction"]), "paper (LLaMA-2-7B)")
    gains.axhline(0, color=plots.EDGE, linewidth=1)
    gains.legend(fontsize=9, **ONE_BELOW)
    plots.note(figure, findings.table, f"bands and bars: {plots.INTERVALS}")
    return figure


def as_published(findings: Findings) -> Figure:
    """Figure 4 as its authors' script makes it: errors with alpha 0 and 1, and the share that the bias removes.

    findings: of `as_published.figure_4`.
    """
    printed = papers.figure("zsmerge", "figure4_published")
    figure, (errors, gains) = plt.subplots(1, 2, figsize=(12, 4.4))
    shown = findings.frame(published.ERROR)
    plots.estimates(
        shown.loc[shown["value"] > FITS],
        x="entries",
        hue="alpha",
        log=True,
        names=ALPHAS,
        xlabel=ENTRIES,
        ylabel="half of the relative error",
        title="Figure 4 as published: the same merged cache",
        ax=errors,
    )
    both = [*printed["entries"], *printed["entries"]]
    plots.paper_points(errors, both, [*printed["alpha0"], *printed["alpha1"]], "published (LLaMA-2-7B, one text)")
    errors.legend(fontsize=9, **plots.BELOW)
    plots.estimates(
        findings.frame(published.REDUCTION),
        x="entries",
        xlabel=ENTRIES,
        ylabel="share of the error removed",
        title="Error removed by the logit bias",
        ax=gains,
    )
    plots.paper_points(gains, list(printed["entries"]), list(printed["reduction"]), "printed (LLaMA-2-7B)")
    for ax in (errors, gains):
        plots.doublings(ax, [10, 20, 40, 100])
    gains.axhline(0, color=plots.EDGE, linewidth=1)
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


def while_decoding(findings: Findings) -> Figure:
    """Merging step by step along a long response: by three definitions of the error, and by quarters of the response.

    findings: of `decoding.merging_while_decoding`.
    """
    figure, (kinds, parts) = plt.subplots(1, 2, figsize=(plots.WIDTH, 4.6), width_ratios=[1.5, 1], sharey=True)
    rows = findings.frame(decoding.REDUCTION)
    for number, (marker, (definition, label)) in enumerate(zip("os^", DEFINITIONS.items(), strict=True)):
        part = rows.loc[rows["definition"] == definition].set_index("variant").loc[list(DECODED)]
        xs = [x + (number - 1) * 0.22 for x in range(len(part))]
        shown: dict[str, Any] = {"fmt": marker, "color": plots.COLOURS[number], "label": label}
        plots.points(kinds, 100 * part[["value", "low", "high"]], xs, **shown)
    kinds.set_xticks(range(len(DECODED)), [fill(name, 12) for name in DECODED.values()])
    kinds.set(ylabel="eviction's error removed (%)", title="Whole response, by setting")
    kinds.legend(title="error of", title_fontsize=9, fontsize=9, **plots.BELOW | {"ncols": 3, "columnspacing": 1})
    quarters = findings.frame(decoding.REDUCTION_OF_PART)
    shown = {"fmt": "o-", "label": f"{DECODED['merge']}, {DEFINITIONS['error']}"}
    plots.points(parts, 100 * quarters.filter(["value", "low", "high"]), quarters["part"].tolist(), **shown)
    parts.set_xticks(range(1, decoding.PARTS + 1))
    parts.set(xlabel="quarter of the response", title="Along the response")
    parts.legend(fontsize=9, **ONE_BELOW)
    for ax in (kinds, parts):
        ax.axhline(0, color=plots.INK, linewidth=1)
    plots.note(figure, findings.table, f"bars: {plots.INTERVALS}", "below 0: the error is larger than eviction's")
    return figure


def open_choices(findings: Findings) -> Figure:
    """The choices that the paper leaves open: the change of the error over that by switching merging off.

    findings: of `sensitivity.open_choices`.
    """
    figure, ax = plt.subplots(figsize=(7.5, 2.8))
    rows = findings.frame(sensitivity.CHOICE_OVER_MERGING)
    plots.points(ax, rows, range(len(rows)), rows=True)
    ax.axvline(1, color=plots.PAPER, linestyle="--", label="as much as merging itself")
    ax.set_yticks(range(len(rows)), [VARIANTS[choice] for choice in rows["choice"]])
    ax.set(xlabel="change of the error / gain from merging", ylim=(len(rows) - 0.5, -0.5))
    ax.legend()
    return figure


def tables_2_and_3(over_snapkv: Findings, summaries: Findings) -> Figure:
    """Table 3's differences from SnapKV, cell by cell, and table 2's gains over H2O with the range that is stated.

    over_snapkv: of `printed.over_snapkv`; summaries: of `printed.summaries`.
    """
    figure, (scores, gains) = plt.subplots(1, 2, figsize=(12.5, 4))
    third = over_snapkv.table.query("table == 'table3'").sort_values("gain")
    shades = [plots.COLOURS[0] if gain > 0 else plots.PAPER for gain in third["gain"]]
    scores.bar(range(len(third)), third["gain"], color=shades, zorder=2)
    scores.axhline(0, color=plots.INK, linewidth=1)
    scores.set(
        xlabel="kinds of tasks, models and sizes",
        ylabel="ZSMerge less SnapKV (points)",
        title="table 3: filled where above SnapKV",
    )
    over_h2o = summaries.table.query("method == 'h2o'")
    for marker, (model, part) in zip("osD", over_h2o.groupby("model"), strict=False):
        gains.plot(100 * part["budget"], 100 * part["relative"], marker, color=plots.COLOURS[0], label=model, alpha=0.8)
    (low, high) = papers.figure("zsmerge", "headline")[["low", "high"]].iloc[0]
    gains.axhspan(100 * low, 100 * high, color=plots.PAPER, alpha=0.5, label="stated in section 5")
    gains.set(xlabel="budget (% of the prompt)", ylabel="ROUGE over H2O's (%)", title="table 2: gains over eviction")
    gains.set_yscale("symlog", linthresh=10)
    gains.legend()
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
