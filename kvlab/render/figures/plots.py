"""The style of all notebooks, and the few kinds of figure that they share.

Every helper draws on `ax` if given, else on a new figure, and returns the axes. The paper's figures are always grey,
ours always coloured; a policy has its colour and marker of `kvlab.render.theme` everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import matplotlib.pyplot as plt
import seaborn
from matplotlib.patches import Patch, Rectangle

from kvlab.errors import KvlabError
from kvlab.render import theme
from kvlab.render.theme import COLOURS, EDGE, FAINT, GRID, INK, MAP, PAPER

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2}
"""Where a legend stands that would hide what is drawn: under the axes."""


WIDTH = 8.0
"""Inches across a figure of two panels. Pages show it as wide, so its text is no smaller than 9 points there."""
INTERVALS = "95 % intervals of the mean"


def style() -> None:
    """Set the look of every figure that follows. Call once at the top of a notebook."""
    seaborn.set_theme(
        context="notebook",
        style="ticks",
        palette=COLOURS,
        rc={
            "figure.figsize": (7.2, 4.2),
            "figure.dpi": 110,
            "savefig.dpi": 144,
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": GRID,
            "axes.edgecolor": EDGE,
            "axes.labelcolor": INK,
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 11,
            "xtick.color": EDGE,
            "ytick.color": EDGE,
            "xtick.labelsize": 10,
            "ytick.labelsize": 10,
            "legend.edgecolor": "none",
            "legend.facecolor": "white",
            "legend.framealpha": 0.75,
            "legend.fontsize": 10,
            "lines.linewidth": 2,
            "lines.markersize": 5,
            "svg.hashsalt": "kvlab",
            "svg.fonttype": "none",
        },
    )


def axes(ax: Axes | None = None, size: tuple[float, float] | None = None) -> Axes:
    """`ax`, or the axes of a new figure of `size` inches."""
    return ax if ax is not None else plt.subplots(figsize=size)[1]


def figure_of(ax: Axes) -> Figure:
    """The figure that axes lie in."""
    figure = ax.get_figure(root=True)
    assert figure is not None, "these axes were removed from their figure"
    return figure


def note(figure: Figure, table: pandas.DataFrame, intervals: str = "", *more: str) -> None:
    """Write under a figure how many documents it is of and what its intervals mean, then each of `more` on a line.

    table: what was measured, with the column document; intervals: such as "bands: 95 % intervals of the mean".
    """
    number = len(set(table["document"])) if "document" in table else 0
    counted = f"n = {number:,} document{'s' if number > 1 else ''}" if number else ""
    said = filter(None, ["; ".join(filter(None, [counted, intervals])), *more])
    figure.supxlabel("\n".join(said), fontsize=9, color=FAINT)


def shades(count: int) -> list[Any]:
    """Colours of an ordered quantity, such as budgets, from the least to the most."""
    return [plt.get_cmap(MAP)(0.85 * number / max(count - 1, 1)) for number in range(count)]


def _finish(ax: Axes, xlabel: str, ylabel: str, title: str) -> Axes:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title)
    return ax


def _bars(low_high: tuple[float, float] | None, value: float) -> tuple[float, float]:
    return (max(value - low_high[0], 0.0), max(low_high[1] - value, 0.0)) if low_high else (0.0, 0.0)


def spread(frame: pandas.DataFrame, scale: float = 1) -> list[pandas.Series]:
    """How far the ends of intervals lie from their values (below, then above), times `scale`, for error bars."""
    below, above = frame.loc[:, "value"] - frame.loc[:, "low"], frame.loc[:, "high"] - frame.loc[:, "value"]
    return [scale * below, scale * above]


def points(
    ax: Axes, frame: pandas.DataFrame, positions: Sequence[float], *, rows: bool = False, **options: Any
) -> ErrorbarContainer:
    """Add findings as points with bars for their intervals: at `positions` along x, or in rows at `positions` along y.

    frame: value, low, high; the options are those of `Axes.errorbar`.
    """
    options = {"fmt": "o", "color": COLOURS[0], "capsize": 3} | options
    if rows:
        return ax.errorbar(frame["value"], positions, xerr=spread(frame), **options)
    return ax.errorbar(positions, frame["value"], yerr=spread(frame), **options)


def by_key(
    frame: pandas.DataFrame, key: str, scale: float = 1
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Values and intervals, times `scale`, as `paper_beside_ours` takes them.

    frame: from `Findings.frame`, with one row for each value of its column `key`.
    """
    scaled = scale * frame.set_index(key).filter(["value", "low", "high"])
    intervals = dict(zip(scaled.index, zip(scaled["low"], scaled["high"], strict=True), strict=True))
    return dict(zip(scaled.index, scaled["value"], strict=True)), intervals


def paper_beside_ours(
    paper: Mapping[str, float | None],
    ours: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    *,
    ylabel: str,
    title: str = "",
    labels: Mapping[str, str] | None = None,
    ours_label: str = "measured here",
    paper_label: str = "paper",
    value_format: str = "{:.2f}",
    ax: Axes | None = None,
) -> Axes:
    """Grouped bars: the paper's figure in grey, ours in blue with its interval, one group for each key of `ours`.

    paper: key -> printed value (a missing key or None leaves a gap); intervals: key -> (low, high);
    labels: key -> text below the group.
    """
    ax = axes(ax)
    keys, width = list(ours), 0.38
    for x, key in enumerate(keys):
        if (printed := paper.get(key)) is not None:
            _bar(ax, x - width / 2, float(printed), width, PAPER, value_format)
        _bar(ax, x + width / 2, float(ours[key]), width, COLOURS[0], value_format, (intervals or {}).get(key))
    ax.set_xticks(range(len(keys)), [(labels or {}).get(key, key) for key in keys])
    ax.tick_params(axis="x", length=0)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (PAPER, COLOURS[0])]
    ax.margins(y=0.14)
    ax.legend(handles, [paper_label, ours_label], ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return _finish(ax, "", ylabel, title)


def _bar(
    ax: Axes,
    x: float,
    value: float,
    width: float,
    colour: str,
    value_format: str,
    interval: tuple[float, float] | None = None,
) -> None:
    below, above = _bars(interval, value)
    ax.bar(x, value, width, color=colour, zorder=2)
    if interval:
        ax.errorbar(x, value, yerr=[[below], [above]], color=INK, capsize=3, linewidth=1.2, zorder=3)
    up = value >= 0
    ax.annotate(
        value_format.format(value),
        (x, value + above if up else value - below),
        ha="center",
        va="bottom" if up else "top",
        xytext=(0, 2 if up else -2),
        textcoords="offset points",
        fontsize=9,
        color=INK,
    )


def boxes(
    frame: pandas.DataFrame,
    *,
    x: str,
    y: str,
    ylabel: str,
    xlabel: str = "",
    title: str = "",
    order: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    hue: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Boxplots of the column `y` for each value of the column `x`: median, quartiles, whiskers at 1.5 IQR, outliers."""
    ax = axes(ax)
    order = list(order) if order is not None else list(frame[x].unique())
    seaborn.boxplot(
        frame,
        x=x,
        y=y,
        hue=hue or x,
        order=order,
        width=0.55,
        linewidth=1.1,
        fliersize=2.5,
        ax=ax,
        palette=COLOURS[: len(frame[hue or x].unique())],
        legend=bool(hue),
        hue_order=None if hue else order,
    )
    ax.set_xticks(range(len(order)), [(labels or {}).get(key, key) for key in order])
    return _finish(ax, xlabel, ylabel, title)


def lines(
    frame: pandas.DataFrame,
    *,
    x: str,
    y: str,
    xlabel: str,
    ylabel: str,
    title: str = "",
    hue: str | None = None,
    low: str | None = None,
    high: str | None = None,
    log: bool = False,
    names: Mapping[str, str] | None = None,
    marker: str | None = "o",
    colours: Mapping[str, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A line of `y` over `x` for each value of `hue`, with the band between the columns `low` and `high` if named.

    One row of `frame` for each point; log=True draws y on a logarithmic scale; names: value of `hue` -> legend;
    colours: value of `hue` -> colour. A value that names a policy has the policy's colour and marker.
    """
    ax = axes(ax)
    groups = [(None, frame)] if hue is None else list(frame.groupby(hue, sort=False, observed=True))
    for number, (value, part) in enumerate(groups):
        part = part.sort_values(x)
        own = theme.look(str(value)) if theme.is_policy(value) else theme.Look(COLOURS[number % len(COLOURS)], "o")
        colour = (colours or {}).get(cast(str, value), own.colour)
        label = None if value is None else (names or {}).get(cast(str, value), str(value))
        ax.plot(part[x], part[y], color=colour, label=label, marker=marker and own.marker, zorder=3)
        if low and high:
            ax.fill_between(part[x], part[low], part[high], color=colour, alpha=0.18, linewidth=0, zorder=2)
    if log:
        ax.set_yscale("log")
    if hue is not None:
        ax.legend()
    return _finish(ax, xlabel, ylabel, title)


def estimates(frame: pandas.DataFrame, *, x: str, **options: Any) -> Axes:
    """`lines` of findings: their values over `x`, with the bands of their intervals.

    frame: from `Findings.frame`; the options are those of `lines`.
    """
    return lines(frame, x=x, y="value", low="low", high="high", **options)


def bars(
    frame: pandas.DataFrame,
    *,
    x: str,
    hue: str,
    names: Mapping[str, str],
    labels: Mapping[float, str],
    xlabel: str,
    ylabel: str,
    title: str = "",
    colours: Sequence[str] = COLOURS,
    ax: Axes | None = None,
) -> Axes:
    """Bars of findings with their intervals: a group for each of `labels`, in it a bar for each of `names`.

    frame: from `Findings.frame`, with one row for each bar; a bar without a row is left out. labels: value of `x` ->
    text below the group; names: value of `hue` -> legend, in the order of the bars.
    """
    ax = axes(ax)
    width = 0.8 / len(names)
    for number, (value, name) in enumerate(names.items()):
        part = frame[frame[hue] == value].set_index(x).reindex(list(labels))
        xs = [group + (number - (len(names) - 1) / 2) * width for group in range(len(labels))]
        ax.bar(xs, part["value"], width * 0.94, color=colours[number], label=name, zorder=2)
        ax.errorbar(xs, part["value"], yerr=spread(part), fmt="none", color=INK, capsize=3, linewidth=1.2, zorder=3)
    ax.set_xticks(range(len(labels)), list(labels.values()))
    return _finish(ax, xlabel, ylabel, title)


def doublings(ax: Axes, values: Sequence[float]) -> Axes:
    """An x axis on which each doubling is as wide as the last, with plain numbers at `values` alone."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [f"{value:,g}" for value in values])
    ax.minorticks_off()
    return ax


def paper_points(ax: Axes, x: Sequence[float], y: Sequence[float], label: str = "paper") -> Axes:
    """Add the numbers that the paper prints to an existing figure, as grey diamonds."""
    ax.scatter(x, y, marker="D", s=44, color=PAPER, edgecolor=EDGE, linewidth=0.8, zorder=4, label=label)
    ax.legend()
    return ax


def heatmap(
    table: pandas.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    unit: str,
    title: str = "",
    annotate: bool = False,
    diverging: bool = False,
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A matrix such as layer x ratio (index down, columns across), its colour bar labelled with `unit`.

    diverging=True centres the colours on zero, for differences.
    """
    ax = axes(ax)
    low, high = limits or (None, None)
    seaborn.heatmap(
        table,
        cmap="RdBu_r" if diverging else MAP,
        center=0 if diverging else None,
        vmin=low,
        vmax=high,
        annot=annotate,
        fmt=".2f",
        annot_kws={"size": 8},
        cbar_kws={"label": unit},
        linewidths=0,
        ax=ax,
    )
    ax.grid(False)
    ax.tick_params(axis="y", rotation=0)
    return _finish(ax, xlabel, ylabel, title)


def needle_heatmap(
    table: pandas.DataFrame,
    *,
    policies: Sequence[str] | None = None,
    columns: int = 3,
    names: Mapping[str, str] | None = None,
    title: str = "",
) -> list[Axes]:
    """One panel of depth by length for each policy and budget: scores of the needles (RocketKV figures 12-14, DapQ
    figure 5).

    table: tidy, with the columns policy, budget (tokens, or a share of the prompt; missing for the full cache), length
    (tokens), depth (0 .. 1) and score (0 .. 1); scores of one cell are averaged, a cell without any stays empty.
    policies: those to draw, in this order; names: policy -> its title. A panel's title ends with its mean.
    """
    missing = {"policy", "budget", "length", "depth", "score"} - set(table.columns)
    if missing:
        raise KvlabError(f"a needle heatmap needs the columns {', '.join(sorted(missing))}, which the table lacks")
    order = list(policies) if policies is not None else list(table["policy"].unique())
    table = table.loc[table["policy"].isin(order)]
    if table.empty:
        raise KvlabError("there are no scores of these policies to draw a needle heatmap of")
    groups = [
        (policy, budget, part)
        for policy in order
        for budget, part in table[table["policy"] == policy].groupby("budget", sort=False, dropna=False)
    ]
    across = min(columns, len(groups))
    down = -(-len(groups) // across)
    figure, grid = plt.subplots(
        down, across, figsize=(0.9 + 3.1 * across, 0.4 + 2.5 * down), squeeze=False, sharex=True, sharey=True
    )
    lengths, depths = sorted(table["length"].unique()), sorted(table["depth"].unique())
    drawn = list(grid.flat)[: len(groups)]
    for number, (ax, (policy, budget, part)) in enumerate(zip(drawn, groups, strict=True)):
        cells = part.pivot_table(index="depth", columns="length", values="score").reindex(index=depths, columns=lengths)
        ax.imshow(cells.to_numpy(dtype=float), cmap=MAP, vmin=0, vmax=1, aspect="auto")
        ax.grid(False)
        ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize="x-small")
        ax.set_yticks(range(len(depths)), [f"{100 * depth:g}" for depth in depths])
        _finish(
            ax,
            "prompt (tokens)" if number + across >= len(groups) else "",
            "depth of the needle (%)" if number % across == 0 else "",
            f"{(names or {}).get(policy, policy)}{_budget(budget)}: {part['score'].mean():.2f}",
        )
        ax.tick_params(labelbottom=number + across >= len(groups))
    for ax in list(grid.flat)[len(groups) :]:
        ax.set_visible(False)
    if set(table["score"].unique()) <= {0, 1}:
        _legend_of_two(figure, drawn[0].images[0])
    else:
        figure.colorbar(drawn[0].images[0], ax=drawn, label="score (1: found)", shrink=0.9)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    return drawn


def _legend_of_two(figure: Figure, image: AxesImage) -> None:
    """Values that are only found or not need no scale of colours."""
    ends = ((1.0, "found"), (0.0, "missed"))
    patches = [Patch(color=cast("Any", image.cmap(share)), label=label) for share, label in ends]
    figure.legend(handles=patches, loc="outside lower left", ncols=2)


def _budget(budget: object) -> str:
    if budget is None or budget != budget:  # pandas' missing values are not equal to themselves
        return ""
    return f", {budget:g}" if isinstance(budget, Real) else f", {budget}"
