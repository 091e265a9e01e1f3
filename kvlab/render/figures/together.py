"""Figures of every policy at equal bytes: Pareto fronts, rows of dots, a table for readers, and needles."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from kvlab.analyses.together import equal_bytes
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import (
    FAINT,
    INK,
    dot,
    in_row,
    named_rows,
    plain_ticks,
    spread_out,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas.io.formats.style import Styler

    from kvlab.analyses.findings import Findings

FRONT = {"color": INK, "linewidth": 0.9, "linestyle": (0, (4, 2))}
MEASURES = {
    "output_error": "output error",
    "mass_lost": "mass lost",
    "step_recall": "step recall",
    "recall": "recall",
    "window_recall": "window recall",
}
LABELS = {"output_error": "relative error of the attention output", "mass_lost": "attention mass lost"}
LIMIT = {"color": INK, "linewidth": 1.6, "linestyle": ":"}
CHANCE = 0.1  # of ten digits
FEW = 10
"""Policies that a figure names all of."""
PAPERS = ("compilerkv", "dapq", "morphkv", "rocketkv", "zsmerge", "snapkv", "h2o", equal_bytes.ORACLE)
"""The policies of the five papers, two that they compare with, and the oracle that reads the best tokens."""
LIMIT_LABEL = f"limit: {equal_bytes.LIMIT}, a reference that sees the response"
TITLES = {"output_error": "Who is nearest to the full cache?", "mass_lost": "Who misses least of the attention?"}


def pareto(measured: pd.DataFrame, side: str, limit: pd.DataFrame | None = None) -> Figure:
    """Error against bytes: a curve for each policy, the Pareto front ringed, names next to the last points.

    Of more than `FEW` policies only those on the front and those of `PAPERS` have a colour, bars and a name. The others
    are thin and grey. Both axes are logarithmic, so the full cache, which loses nothing, is a line at its bytes.

    measured: from `equal_bytes.measure`; side: "read" or "stored" bytes; limit: as `measured`, of the oracle, which is
    drawn as a dotted line.
    """
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 6.6))
    every = measured if limit is None else pd.concat([measured, limit])
    points = equal_bytes.points(every, side, "output_error")
    full, lossy = points.query("policy == 'full'"), points.query("policy != 'full' and value > 0")
    drawn, oracle = lossy.query("policy != @equal_bytes.LIMIT"), lossy.query("policy == @equal_bytes.LIMIT")
    oracle = oracle.sort_values("bytes")
    every_name, on_front = list(drawn["policy"].unique()), set(drawn.query("front")["policy"])
    named = [name for name in every_name if len(every_name) <= FEW or name in on_front or name in PAPERS]
    for name, part in drawn.groupby("policy", sort=False):
        tint, marker = theme.look(str(name)) if name in named else theme.Look(theme.RULE, "")
        ax.plot(
            part["bytes"] / 2**20,
            part["value"],
            color=tint,
            marker=marker,
            markersize=5,
            linewidth=2 if name in on_front else 1.2 if name in named else 0.8,
            zorder=3 if name in named else 1,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    if len(oracle):
        ax.plot(oracle["bytes"] / 2**20, oracle["value"], zorder=4, **LIMIT)
    ends = ax.get_ylim()
    for row in drawn.loc[drawn["policy"].isin(named)].to_dict("records"):
        tint, size = theme.look(row["policy"]).colour, row["bytes"] / 2**20
        ax.plot([size, size], [max(row["low"], ends[0]), row["high"]], color=tint, linewidth=1, alpha=0.5, zorder=2)
    ax.set_ylim(ends)
    best = drawn.query("front").sort_values("bytes")
    ax.step(best["bytes"] / 2**20, best["value"], where="post", zorder=4, **FRONT)
    ax.scatter(best["bytes"] / 2**20, best["value"], s=75, facecolor="none", edgecolor=INK, linewidth=1.3, zorder=5)
    when = {"read": "read at a step", "stored": "stored after a step"}[side]
    ax.set_xlabel(f"keys, values and metadata {when}, MiB")
    ax.set_ylabel(LABELS["output_error"])
    ax.set_title(f"Error against {side} bytes")
    for size in full["bytes"] / 2**20:
        ax.axvline(size, color=FAINT, linewidth=1, linestyle=":")
        ax.annotate(
            "full cache",
            (size, 1),
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
    _names_at_the_side(ax, pd.concat([drawn.loc[drawn["policy"].isin(named)], oracle]))
    _families(ax, named, others=len(every_name) - len(named), limited=len(oracle) > 0)
    plots.note(figure, measured, f"thin bars: {plots.INTERVALS}")
    return figure


def _mebibyte_ticks(ax: Axes) -> None:
    ticks = [
        t
        for t in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000, 10000)
        if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]
    ]
    ax.set_xticks(ticks, [f"{t:,}" for t in ticks])
    ax.minorticks_off()
    ax.set_yticks(*plain_ticks(*ax.get_ylim()))


def _names_at_the_side(ax: Axes, drawn: pd.DataFrame) -> None:
    """Each policy's name to the right of the axes, joined to its last point by a thin line."""
    last = drawn.sort_values("budget").groupby("policy", sort=False).tail(1)
    front = set(drawn.query("front")["policy"])
    low, high = ax.get_ylim()
    ends = (np.log(last["value"].to_numpy()) - np.log(low)) / (np.log(high) - np.log(low))
    ys = spread_out(ends.tolist(), 0.042, 0.0, 1.0)
    for row, y in zip(last.to_dict("records"), ys, strict=True):
        tint = theme.look(row["policy"]).colour
        line = {"arrowstyle": "-", "color": tint, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3}
        ax.annotate(
            row["policy"],
            (row["bytes"] / 2**20, row["value"]),
            xycoords="data",
            xytext=(1.035, y),
            textcoords="axes fraction",
            fontsize=9.5,
            va="center",
            ha="left",
            color=tint,
            fontweight="bold" if row["policy"] in front else "normal",
            annotation_clip=False,
            arrowprops=line,
        )


def _families(ax: Axes, policies: Iterable[str], others: int, limited: bool) -> None:
    colours = {equal_bytes.family(name): theme.family_colour(name) for name in policies}
    handles = [
        Line2D([], [], color=colours[label], linewidth=2.5, label=label)
        for label in (*theme.FAMILIES, *sorted(colours.keys() - theme.FAMILIES.keys()))
        if label in colours
    ]
    ring = {"marker": "o", "markersize": 8, "markerfacecolor": "none"}
    handles.append(Line2D([], [], label="Pareto front (bold names)", **FRONT, **ring))
    handles += [Line2D([], [], color=theme.RULE, linewidth=0.8, label=f"{others} other policies")] if others else []
    handles += [Line2D([], [], label=LIMIT_LABEL, **LIMIT)] if limited else []
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.55, -0.11), ncols=2, fontsize=9)


def at_equal_bytes(
    measured: pd.DataFrame,
    shares: Mapping[str, float],
    measure: str = "output_error",
    limit: pd.DataFrame | None = None,
) -> Figure:
    """A panel for each kind of bytes: the policies' dots at equal bytes, the best at the top.

    A policy that does not reach these bytes is listed below the others, with a dash and the reason.

    Args:
        measured: from `equal_bytes.measure`.
        shares: shares of the full cache, for "stored" and "read".
        measure: the measure on the axis.
        limit: as `measured`, of the oracle; it is drawn as a dotted line.
    """
    full = measured["full_bytes"].to_numpy().mean() / 2**20
    tables = {
        f"equal {side} bytes: {share * full:.1f} MiB, {share:.1%} of the full cache": equal_bytes.summary(
            equal_bytes.at_equal(measured, side, share), by=measure
        )
        for side, share in shares.items()
    }
    count = max(len(table) for table in tables.values())
    size = 6.6 * len(tables), 0.8 + 0.29 * count
    figure, grid = plt.subplots(1, len(tables), figsize=size, squeeze=False, sharex=True)
    for ax, (heading, table), (side, share) in zip(grid.flat, tables.items(), shares.items(), strict=True):
        rows = table.to_dict("records")
        for y, row in enumerate(rows):
            if row["reason"]:
                # The reason for a missing value replaces the dot.
                in_row(ax, y, f"–  {row['reason']}", fontsize=9.5, color=FAINT, style="italic")
            else:
                interval = row[f"{measure}_low"], row[f"{measure}_high"]
                dot(ax, y, row[measure], interval, theme.look(row["policy"]).colour, "{:.3f}")
        policies = [row["policy"] for row in rows]
        named_rows(ax, policies, [theme.look(name).colour for name in policies], count=count)
        if limit is not None:
            # Next to the dots; there is no line where the oracle was not measured at these bytes.
            bottom = sum(not row["reason"] for row in rows) - 0.5
            for value in equal_bytes.summary(equal_bytes.at_equal(limit, side, share), by=measure)[measure].dropna():
                ax.plot([value, value], [-0.6, bottom], zorder=1, **LIMIT)
        ax.set_xscale("log")
        ax.margins(x=0.16)
        ax.set_xlabel(LABELS[measure])
        ax.set_title(heading, fontsize=11)
    low, high = grid.flat[0].get_xlim()
    grid.flat[0].set_xticks(*plain_ticks(low, high))
    grid.flat[0].minorticks_off()
    figure.suptitle(TITLES[measure], x=0.01, ha="left", fontweight="bold", fontsize=12.5)
    if limit is not None:
        figure.legend(handles=[Line2D([], [], label=LIMIT_LABEL, **LIMIT)], loc="upper right", fontsize=9.5)
    return figure


def measures_table(table: pd.DataFrame, *, caption: str) -> Styler:
    """`equal_bytes.summary` as a table to read: means with intervals over documents, the best in bold."""
    rows = table.to_dict("records")
    shown = pd.DataFrame({"policy": table["policy"]})
    shown["rank"] = [_with_interval(row, "rank", "{:.1f}") for row in rows]
    for measure, name in MEASURES.items():
        shown[name] = [_with_interval(row, measure, "{:.3f}") for row in rows]
    shown["why not"] = table["reason"]
    values = table.rename(columns=MEASURES).filter(list(MEASURES.values()))
    lowest = [MEASURES[measure] for measure in equal_bytes.BETTER_LOW]
    best = values.max().where(~values.columns.isin(lowest), values.min())
    bold = (values == best).replace({True: "font-weight: bold", False: ""})
    tint = [f"color: {theme.look(row['policy']).colour}; font-weight: bold" for row in rows]
    return (
        shown.style.apply(lambda _: bold, axis=None, subset=list(MEASURES.values()))
        .apply(lambda _: tint, subset=["policy"])
        .hide(axis="index")
        .set_caption(caption)
        .set_uuid(f"together-{zlib.crc32(caption.encode())}")
        .set_properties(subset=["rank", *MEASURES.values()], **{"text-align": "right", "white-space": "nowrap"})
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


def _with_interval(row: Mapping[str, Any], name: str, form: str) -> str:
    if row[name] != row[name]:
        return "–"
    return f"{form.format(row[name])} ({form.format(row[f'{name}_low'])}–{form.format(row[f'{name}_high'])})"


def needles(findings: Findings, budget: float) -> Figure:
    """A row for each policy, those that find most first: a cell for each length and depth, and the mean next to them.

    findings: of `equal_bytes.needles`, at this budget.
    """
    means = findings.frame(equal_bytes.NEEDLE).sort_values("value", ascending=False, kind="stable")
    names = means["policy"].tolist()
    cells = findings.table.pivot_table(index="policy", columns=["length", "depth"], values="score").loc[names]
    size = plots.WIDTH, 2.6 + 0.23 * len(names)
    figure, (ax, mean) = plt.subplots(1, 2, figsize=size, width_ratios=[2.2, 1])
    image = ax.imshow(cells.to_numpy(dtype=float), cmap=theme.MAP, vmin=0, vmax=1, aspect="auto")
    tints = [theme.look(name).colour for name in names]
    for shown in (ax, mean):
        named_rows(shown, names, tints)
        shown.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(False)
    ax.set_xticks(range(cells.shape[1]), [f"{100 * depth:g}" for _, depth in cells.columns])
    lengths = [length for length, _ in cells.columns]
    for length in dict.fromkeys(lengths):
        first, count = lengths.index(length), lengths.count(length)
        ax.axvline(first - 0.5, color="white", linewidth=3)
        above = {"xycoords": ax.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 9.5}
        ax.annotate(f"{length:,} tokens", (first + (count - 1) / 2, 1.005), **above)
    ax.set_xlabel("depth of the needle (%), by length of the prompt")
    ax.set_title(f"Needles at a budget of {budget:g} entries", pad=20)
    for y, (value, tint, name) in enumerate(zip(means["value"], tints, names, strict=True)):
        dot(mean, y, value, (value, value), tint, "{:.2f}", marker=theme.look(name).marker)
    mean.axvline(CHANCE, color=FAINT, linewidth=1, linestyle=":")
    mean.set_xlim(0, 1.25)
    mean.set_xticks([0, 0.5, 1])
    mean.tick_params(labelleft=False)
    mean.set_xlabel("mean share")
    score = "share of the needle's digits right, after the first"
    figure.colorbar(image, ax=[ax, mean], location="bottom", label=score, aspect=45, pad=0.01)
    each = f"n = {cells.shape[1]} needles for each policy, one for each length and depth; dotted: by chance"
    plots.note(figure, findings.table.filter([]), "", each)
    return figure
