"""Figures of many policies at once: each curve and row has its name next to it, without a legend of twenty entries.

Policies have their family's colour, so that a reader sees first what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.transforms import blended_transform_factory

from kvlab.render import theme
from kvlab.render.figures import plots

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

INK, FAINT, AXIS = theme.INK, theme.FAINT, theme.EDGE
BETTER, WORSE = theme.BETTER, theme.WORSE


def spread_out(preferred: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels, each as near as possible to its wanted place, at least `gap` apart and within low .. high.

    Neighbours that are too close form a block, centred on the mean of their wanted places (pool adjacent violators);
    the order stays. Without room for all they are spaced evenly.
    """
    count = len(preferred)
    if not count:
        return []
    order = np.argsort(preferred, kind="stable")
    if gap * (count - 1) >= high - low:
        positions = np.linspace(low, high, count)
    else:
        # With the i-th label moved down by i gaps, keeping them apart means keeping them in order.
        targets = [preferred[i] - rank * gap for rank, i in enumerate(order)]
        means, sizes = [], []
        for target in targets:
            means.append(target)
            sizes.append(1)
            while len(means) > 1 and means[-2] > means[-1]:
                mean, size = means.pop(), sizes.pop()
                means[-1] = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
                sizes[-1] += size
        positions = np.clip(np.repeat(means, sizes), low, high - gap * (count - 1)) + gap * np.arange(count)
    spread = np.empty(count)
    spread[order] = positions
    return spread.tolist()


def plain_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis that read like numbers, and their labels."""
    ticks = [base * 10**power for power in range(-5, 3) for base in (1, 2, 5) if low <= base * 10**power <= high]
    return ticks, [f"{tick:g}" for tick in ticks]


def at(table: pandas.DataFrame, /, **keys: object) -> pandas.DataFrame:
    """The rows that have these values in the columns of these names."""
    for column, value in keys.items():
        table = table.loc[table[column] == value]
    return table


def dots(
    table: pandas.DataFrame,
    *,
    xlabel: str,
    title: str,
    reference: tuple[float, str] | None = None,
    ours: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """One row for each policy, in the order given: a dot with its interval, coloured by family; a paper's is grey.

    table: policy, value, and low, high where there is an interval; reference: where to draw a line, and its name.
    """
    ax = plots.axes(ax, (6.4, 0.9 + 0.29 * len(table)))
    rows = table.to_dict("records")
    for y, row in enumerate(rows):
        tint = theme.look(row["policy"]).colour if ours else plots.PAPER
        interval = row.get("low", row["value"]), row.get("high", row["value"])
        dot(ax, y, row["value"], interval, tint, "{:.2f}", marker="o" if ours else "D")
    named_rows(ax, [row["policy"] for row in rows], [theme.look(row["policy"]).colour if ours else INK for row in rows])
    if reference:
        ax.axvline(reference[0], color=FAINT, linewidth=1, linestyle=":")
        ax.annotate(
            reference[1],
            (reference[0], 1),
            xycoords=blended_transform_factory(ax.transData, ax.transAxes),
            xytext=(3, -2),
            textcoords="offset points",
            fontsize=9,
            color=FAINT,
            va="top",
        )
    ax.margins(x=0.16)
    ax.set_xlabel(xlabel)
    ax.set_title(title)
    return ax


def dot(
    ax: Axes,
    y: float,
    value: float,
    interval: tuple[float, float],
    tint: str,
    value_format: str = "",
    marker: str = "o",
) -> None:
    """One row: the interval as a bar, the value as a mark, and behind them as a number if there is a format."""
    ax.plot(interval, [y, y], color=tint, linewidth=2.4, alpha=0.5, solid_capstyle="round")
    ax.plot(value, y, marker, color=tint, markersize=6.5)
    if value_format:
        ax.annotate(
            value_format.format(value),
            (interval[1], y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )


def whiskers(table: pandas.DataFrame, *, names: Mapping[str, str], colours: Mapping[str, str], ax: Axes) -> Axes:
    """Curves over the budget with a whisker at each point; they are moved aside a little so that none hides another.

    table: policy, budget, value, low, high; names: policy -> its name in the legend, in the order of the legend.
    """
    present = [name for name in names if name in set(table["policy"])]
    for number, name in enumerate(present):
        part = at(table, policy=name).sort_values("budget")
        ax.errorbar(
            part["budget"] * 1.05 ** (number - (len(present) - 1) / 2),
            part["value"],
            yerr=plots.spread(part),
            marker=theme.look(name).marker,
            color=colours[name],
            label=names[name],
            elinewidth=1.2,
            capsize=2.5,
        )
    return ax


def forest(table: pandas.DataFrame, *, xlabel: str, title: str) -> Axes:
    """Paired differences, one row each: blue where the whole interval lies above zero, orange below, grey across it.

    table: label, value, low, high, and paper, which is shown as a heading where it changes.
    """
    rows = table.to_dict("records")
    papers = list(dict.fromkeys(row["paper"] for row in rows))
    ax = plots.axes(size=(8.6, 1.0 + 0.27 * (len(rows) + len(papers))))
    y, ys, labels = 0, [], []
    for paper in papers:
        in_row(ax, y, paper, fontsize=10, fontweight="bold", color=INK)
        y += 1
        for row in rows:
            if row["paper"] == paper:
                tint = BETTER if row["low"] > 0 else WORSE if row["high"] < 0 else FAINT
                dot(ax, y, row["value"], (row["low"], row["high"]), tint)
                ys.append(y)
                labels.append(row["label"])
                y += 1
    ax.axvline(0, color=INK, linewidth=1)
    named_rows(ax, labels, [INK] * len(labels), ys, y)
    ax.set_xlabel(xlabel)
    ax.set_title(title)
    return ax


def in_row(ax: Axes, y: float, text: str, **font: Any) -> None:
    """A text at the left end of a row, inside the axes."""
    where = blended_transform_factory(ax.transAxes, ax.transData)
    offset = {"xytext": (6, 0), "textcoords": "offset points"}
    ax.annotate(text, (0, y), xycoords=where, va="center", **offset, **font)


def named_rows(
    ax: Axes, names: Sequence[str], tints: Sequence[str], ys: Sequence[int] | None = None, count: int | None = None
) -> None:
    """Names of rows down the left side, the first at the top, and vertical grid lines only."""
    ax.set_yticks(range(len(names)) if ys is None else ys, names, fontsize=9.5)
    for label, tint in zip(ax.get_yticklabels(), tints, strict=True):
        label.set_color(tint)
    ax.set_ylim((len(names) if count is None else count) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", visible=True)
