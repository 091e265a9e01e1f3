"""Figures of many policies at once, each curve and row named where it lies: no legend of twenty entries.

Policies get their family's colour; what they do, not who they are, is what a reader sees first.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from kvlab.analyses.together import equal_bytes
from kvlab.workbench.figures import plots

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

INK, FAINT = "#1c2430", "#7a8594"
_FAMILY_COLOURS = dict(
    zip(equal_bytes.FAMILIES, (FAINT, "#8a5a2b", "#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True)
)


def colour(policy: str) -> str:
    """The colour of the family of a policy, which is the first word of `policy`."""
    return _FAMILY_COLOURS.get(equal_bytes.family(policy.partition(" ")[0]), "#5B5B5B")


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels, each as near as can be to where it is wanted, at least `gap` apart and within low .. high.

    Neighbours that are too close form a block that is centred on what its members want (pool adjacent violators); the
    order stays. If there is no room for all, they are spaced evenly.
    """
    count = len(wanted)
    if not count:
        return []
    order = np.argsort(wanted, kind="stable")
    if gap * (count - 1) >= high - low:
        places = np.linspace(low, high, count)
    else:
        # With the i-th label moved down by i gaps, keeping them apart means keeping them in order.
        targets = [wanted[i] - rank * gap for rank, i in enumerate(order)]
        blocks: list[list[float]] = []
        for target in targets:
            blocks.append([target, 1])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                mean, size = blocks.pop()
                blocks[-1] = [
                    (blocks[-1][0] * blocks[-1][1] + mean * size) / (blocks[-1][1] + size),
                    blocks[-1][1] + size,
                ]
        level = np.repeat([mean for mean, _ in blocks], [size for _, size in blocks])
        places = np.clip(level, low, high - gap * (count - 1)) + gap * np.arange(count)
    found = np.empty(count)
    found[order] = places
    return found.tolist()


def pareto(points: pandas.DataFrame, *, xlabel: str, ylabel: str, title: str, ax: Axes | None = None) -> Figure:
    """Loss against bytes: one curve for each policy, its name beside its last point, the Pareto front ringed and named.

    points: from `equal_bytes.points`; both axes are logarithmic, so the full cache, which loses nothing, is
    drawn as a line at its bytes.
    """
    ax = plots.axes(ax, (10.2, 6.6))
    full = points[points["policy"] == "full"]
    drawn = points[(points["policy"] != "full") & (points["value"] > 0)]
    for name, part in drawn.groupby("policy", sort=False):
        loud = part["front"].any()
        ax.plot(
            part["bytes"] / 2**20,
            part["value"],
            color=colour(name),
            marker="o",
            markersize=4,
            linewidth=2 if loud else 1.2,
            alpha=1 if loud else 0.75,
            zorder=3,
        )
    best = drawn[drawn["front"]].sort_values("bytes")
    ax.step(
        best["bytes"] / 2**20, best["value"], where="post", color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=4
    )
    ax.scatter(best["bytes"] / 2**20, best["value"], s=75, facecolor="none", edgecolor=INK, linewidth=1.3, zorder=5)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title)
    if len(full):
        at = float(full["bytes"].iloc[0]) / 2**20
        ax.axvline(at, color=FAINT, linewidth=1, linestyle=":")
        ax.annotate(
            "full cache",
            (at, 1),
            xycoords=blended_transform_factory(ax.transData, ax.transAxes),
            xytext=(-3, -4),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top",
            fontsize=9,
            color=FAINT,
        )
    _mebibyte_ticks(ax)
    _names_at_the_side(ax, drawn)
    _families(ax, drawn["policy"].unique())
    return ax.figure


def _mebibyte_ticks(ax: Axes) -> None:
    ticks = [
        t
        for t in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000, 10000)
        if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]
    ]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.set_yticks(*_plain(*ax.get_ylim()))


def _plain(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis that read like numbers, and their labels."""
    ticks = [base * 10**power for power in range(-5, 3) for base in (1, 2, 5) if low <= base * 10**power <= high]
    return ticks, [f"{tick:g}" for tick in ticks]


def _names_at_the_side(ax: Axes, drawn: pandas.DataFrame) -> None:
    """Each policy's name to the right of the axes, joined to its last point by a thin line."""
    last = drawn.sort_values("budget").groupby("policy", sort=False).tail(1)
    front = set(drawn.loc[drawn["front"], "policy"])
    low, high = ax.get_ylim()
    ends = (np.log(last["value"]) - np.log(low)) / (np.log(high) - np.log(low))
    places = spread_out(ends.tolist(), 0.042, 0.0, 1.0)
    for (_, row), place in zip(last.iterrows(), places, strict=True):
        ax.annotate(
            row["policy"],
            (row["bytes"] / 2**20, row["value"]),
            xycoords="data",
            xytext=(1.035, place),
            textcoords="axes fraction",
            fontsize=9.5,
            va="center",
            ha="left",
            color=colour(row["policy"]),
            fontweight="bold" if row["policy"] in front else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour(row["policy"]),
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def _families(ax: Axes, policies: Sequence[str]) -> None:
    there = {equal_bytes.family(name): colour(name) for name in policies}
    handles = [
        Line2D([], [], color=there[label], linewidth=2.5, label=label)
        for label in (*equal_bytes.FAMILIES, "other")
        if label in there
    ]
    handles.append(
        Line2D(
            [],
            [],
            color=INK,
            marker="o",
            markersize=8,
            markerfacecolor="none",
            linewidth=0.9,
            linestyle=(0, (4, 2)),
            label="Pareto front (bold names)",
        )
    )
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2, fontsize=9.5)


def at_equal_bytes(sides: Sequence[tuple[str, pandas.DataFrame]], *, measure: str, xlabel: str, title: str) -> Figure:
    """A row of dots for each policy, the best at the top, and beside it what else could be read off at equal bytes.

    sides: (heading, table) for each panel, tables from `equal_bytes.summary`. A policy that does not reach
    those bytes stands below the others with a dash and the reason.
    """
    count = max(len(table) for _, table in sides)
    size = 6.6 * len(sides), 0.8 + 0.29 * count
    figure, grid = plt.subplots(1, len(sides), figsize=size, squeeze=False, sharex=True)
    for ax, (heading, table) in zip(grid.flat, sides, strict=True):
        for row, one in enumerate(table.to_dict("records")):
            tint = colour(one["policy"])
            if one["reason"]:
                ax.annotate(
                    f"–  {one['reason']}",
                    (0, row),
                    xycoords=blended_transform_factory(ax.transAxes, ax.transData),
                    xytext=(6, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9.5,
                    color=FAINT,
                    style="italic",
                )
                continue
            ax.plot(
                [one[f"{measure}_low"], one[f"{measure}_high"]],
                [row, row],
                color=tint,
                linewidth=2.4,
                alpha=0.5,
                solid_capstyle="round",
            )
            ax.plot(one[measure], row, "o", color=tint, markersize=6.5)
            ax.annotate(
                f"{one[measure]:.3f}",
                (one[f"{measure}_high"], row),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=INK,
            )
        _rows(ax, table["policy"].tolist(), [colour(name) for name in table["policy"]], count=count)
        ax.set_xscale("log")
        ax.margins(x=0.16)
        ax.set_xlabel(xlabel)
        ax.set_title(heading, fontsize=11)
    low, high = grid.flat[0].get_xlim()
    grid.flat[0].set_xticks(*_plain(low, high))
    grid.flat[0].minorticks_off()
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12.5)
    return figure


def measures_table(table: pandas.DataFrame, *, caption: str) -> Styler:
    """`equal_bytes.summary` for a reader: means with intervals over documents, the best in bold."""
    import pandas as pd

    names = {
        "output_error": "output error",
        "mass_lost": "mass lost",
        "step_recall": "step recall",
        "recall": "recall",
        "window_recall": "window recall",
    }
    shown = pd.DataFrame({"policy": table["policy"]})
    shown["rank"] = [_with_interval(one, "rank", "{:.1f}") for one in table.to_dict("records")]
    for measure, name in names.items():
        shown[name] = [_with_interval(one, measure, "{:.3f}") for one in table.to_dict("records")]
    shown["why not"] = table["reason"]
    best = {name: table[m].min() if m in equal_bytes.BETTER_LOW else table[m].max() for m, name in names.items()}
    values = table.rename(columns=names)

    def emphasised(column: pandas.Series) -> list[str]:
        return ["font-weight: bold" if value == best[column.name] else "" for value in values[column.name]]

    tint = [f"color: {colour(name)}; font-weight: bold" for name in table["policy"]]
    return (
        shown.style.apply(emphasised, subset=list(names.values()))
        .apply(lambda _: tint, subset=["policy"])
        .hide(axis="index")
        .set_caption(caption)
        .set_uuid(f"together-{zlib.crc32(caption.encode())}")
        .set_properties(subset=["rank", *names.values()], **{"text-align": "right", "white-space": "nowrap"})
        .set_properties(subset=["policy", "why not"], **{"text-align": "left", "white-space": "nowrap"})
        .set_properties(subset=["why not"], **{"color": FAINT, "font-style": "italic"})
        .set_table_styles(
            [
                {
                    "selector": "caption",
                    "props": "text-align: left; font-weight: bold; padding: 0 0 6px 4px; font-size: 110%",
                },
                {"selector": "td, th", "props": "padding: 2px 9px; vertical-align: baseline"},
            ]
        )
    )


def _with_interval(row: dict, name: str, form: str) -> str:
    if row[name] != row[name]:
        return "–"
    return f"{form.format(row[name])} ({form.format(row[f'{name}_low'])}–{form.format(row[f'{name}_high'])})"


def dots(
    table: pandas.DataFrame,
    *,
    xlabel: str,
    title: str,
    reference: tuple[float, str] | None = None,
    ours: bool = True,
    value_format: str = "{:.2f}",
    ax: Axes | None = None,
) -> Axes:
    """One row for each policy, in the order given: a dot with its interval, coloured by family; a paper's is grey.

    table: policy, value, and low, high where there is an interval; reference: where to draw a line, and its name.
    """
    ax = plots.axes(ax, (6.4, 0.9 + 0.29 * len(table)))
    for row, one in enumerate(table.to_dict("records")):
        tint = colour(one["policy"]) if ours else plots.PAPER
        low, high = one.get("low", one["value"]), one.get("high", one["value"])
        ax.plot([low, high], [row, row], color=tint, linewidth=2.4, alpha=0.5, solid_capstyle="round")
        ax.plot(one["value"], row, "o" if ours else "D", color=tint, markersize=6.5)
        ax.annotate(
            value_format.format(one["value"]),
            (high, row),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    _rows(ax, table["policy"].tolist(), [colour(name) if ours else INK for name in table["policy"]])
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


def whiskers(table: pandas.DataFrame, *, names: Mapping[str, str], colours: Mapping[str, str], ax: Axes) -> Axes:
    """Curves over the budget with a whisker at each point, moved aside a little so that none hides another.

    table: policy, budget, value, low, high; names: policy -> its name in the legend, which also says in what order.
    """
    there = [name for name in names if name in set(table["policy"])]
    for number, name in enumerate(there):
        part = table[table["policy"] == name].sort_values("budget")
        at = part["budget"] * 1.025 ** (number - (len(there) - 1) / 2)
        ax.errorbar(
            at,
            part["value"],
            yerr=[part["value"] - part["low"], part["high"] - part["value"]],
            marker="o",
            color=colours[name],
            label=names[name],
            elinewidth=1.2,
            capsize=2.5,
        )
    return ax


def forest(table: pandas.DataFrame, *, xlabel: str, title: str, ax: Axes | None = None) -> Axes:
    """Paired differences, one row each: blue where the whole interval lies above zero, red below, grey across it.

    table: label, value, low, high; and paper, the side that a paper names, as a heading where it changes.
    """
    ax = plots.axes(ax, (8.6, 1.0 + 0.27 * (len(table) + table["paper"].nunique())))
    row, places, labels = 0, [], []
    for paper, part in table.groupby("paper", sort=False):
        ax.annotate(
            paper,
            (0, row),
            xycoords=blended_transform_factory(ax.transAxes, ax.transData),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            fontweight="bold",
            color=INK,
        )
        row += 1
        for one in part.to_dict("records"):
            tint = "#0072B2" if one["low"] > 0 else "#D55E00" if one["high"] < 0 else FAINT
            ax.plot([one["low"], one["high"]], [row, row], color=tint, linewidth=2.4, alpha=0.5, solid_capstyle="round")
            ax.plot(one["value"], row, "o", color=tint, markersize=6)
            places.append(row)
            labels.append(one["label"])
            row += 1
    ax.axvline(0, color=INK, linewidth=1)
    _rows(ax, labels, [INK] * len(labels), places, row)
    ax.set_xlabel(xlabel)
    ax.set_title(title)
    return ax


def _rows(
    ax: Axes, names: Sequence[str], tints: Sequence[str], places: Sequence[int] | None = None, count: int | None = None
) -> None:
    """Names of rows down the left side, the first at the top, and vertical grid lines only."""
    ax.set_yticks(range(len(names)) if places is None else places, names, fontsize=9.5)
    for label, tint in zip(ax.get_yticklabels(), tints, strict=True):
        label.set_color(tint)
    ax.set_ylim((len(names) if count is None else count) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", visible=True)
