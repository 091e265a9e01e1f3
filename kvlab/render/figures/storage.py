"""Figures of policies and storages at equal stored bytes: the fronts of three losses, and paired differences."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from kvlab.analyses.together import storing
from kvlab.render import theme
from kvlab.render.figures.many_policies import FAINT, INK, forest, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

DASHES: dict[str, Any] = {storing.PLAIN: "-", "turbo-4": (0, (1, 1)), "nvfp4": (0, (5, 1, 1, 1))}
OTHER_DASH = (0, (3, 1.5))
FRONT = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 2}
LABEL_OFFSETS = ((0, 13), (-44, -4), (6, 14), (-28, -4), (25, 3), (0, 13), (-25, -6), (17, 8), (-19, -5))
"""Where the names of the full cache's storages stand, in points to the right and above, by their bytes: names of
neighbours stand on different sides.
"""
SHOWN = 5
"""Policies with a colour of their own; the others are grey."""
SHARES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def pareto(measured: pd.DataFrame) -> Figure:
    """A panel for each loss over stored bytes: policies as they are solid, in another storage dashed; the full cache in
    each storage is a named square. Systems on the front, which nothing beats, are joined by a dotted line.

    measured: from `storing.measure`.
    """
    curves = {name: storing.points(measured, name) for name in storing.MEASURES}
    tints = _tints(measured)
    figure, axes = plt.subplots(1, len(curves), figsize=(5.0 * len(curves), 4.9))
    for ax, (name, points) in zip(axes, curves.items(), strict=True):
        _panel(ax, points, tints)
        ax.set_title(storing.MEASURES[name], fontsize=11)
        ax.set_xlabel("stored bytes, % of the full cache in bfloat16")
        if name == "needles_lost":
            ax.set_ylim(-0.05, 1.05)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        else:
            ax.set_yscale("log")
            ax.set_yticks(*plain_ticks(*ax.get_ylim()))
            ax.minorticks_off()
    figure.legend(handles=_legend(measured, tints), loc="outside lower center", ncols=4, fontsize=9.5)
    figure.suptitle("What is lost, over what is stored", x=0.01, ha="left", fontweight="bold", fontsize=12.5)
    return figure


def _tints(measured: pd.DataFrame) -> dict[str, str]:
    """Colours of the policies, those first that stay nearest to the full model."""
    evicting = measured.query("policy != 'full' and measure == 'kl'")
    order = evicting.groupby("policy").agg({"value": "mean"}).sort_values("value").index.tolist()
    return theme.colours(order[:SHOWN]) | dict.fromkeys(order[SHOWN:], FAINT)


def _panel(ax: Axes, points: pd.DataFrame, tints: dict[str, str]) -> None:
    for keys, part in points.query("policy != 'full'").groupby(storing.CURVE, sort=False):
        policy, storage = cast("tuple[str, str]", keys)
        part, tint = part.sort_values("share"), tints[policy]
        ax.plot(
            part["share"],
            part["value"],
            color=tint,
            linestyle=DASHES.get(storage, OTHER_DASH),
            linewidth=1.8 if tint != FAINT else 0.9,
            marker="o",
            markersize=4.5,
            markerfacecolor=tint if storage == storing.PLAIN else "white",
            zorder=3,
        )
    best = points.query("front").sort_values("share")
    ax.step(best["share"], best["value"], where="post", **FRONT)
    wholes = points.query("policy == 'full' and storage != @storing.PLAIN").sort_values("share")
    for row, (dx, dy) in zip(wholes.to_dict("records"), cycle(LABEL_OFFSETS), strict=False):
        ax.plot(row["share"], row["value"], "s", color=INK, markersize=7.5, zorder=5)
        ax.annotate(
            row["storage"],
            (row["share"], row["value"]),
            xytext=(dx, dy),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            color=INK,
            fontweight="bold",
        )
    ax.axvline(1, color=FAINT, linewidth=1, linestyle=":")
    ax.set_xscale("log")
    low, high = float(points["share"].to_numpy().min()), max(float(points["share"].to_numpy().max()), 1.0)
    ax.set_xlim(low / 1.15, high * 1.15)
    ticks = [share for share in SHARES if low / 1.15 <= share]
    ax.set_xticks(ticks, [f"{100 * share:g}" for share in ticks])
    ax.minorticks_off()


def _legend(measured: pd.DataFrame, tints: dict[str, str]) -> list[Line2D]:
    named = [Line2D([], [], color=tint, marker="o", label=policy) for policy, tint in tints.items() if tint != FAINT]
    if FAINT in tints.values():
        named.append(Line2D([], [], color=FAINT, linewidth=0.9, marker="o", label="other policies"))
    storages = measured.query("policy != 'full'")["storage"].unique()
    dashes = [
        Line2D(
            [],
            [],
            color=FAINT,
            linestyle=DASHES.get(storage, OTHER_DASH),
            marker="o",
            markerfacecolor=FAINT if storage == storing.PLAIN else "white",
            label="evicted, kept as it is" if storage == storing.PLAIN else f"evicted, kept in {storage}",
        )
        for storage in map(str, storages)
    ]
    whole = Line2D([], [], color=INK, marker="s", linestyle="none", label="the full cache, quantised")
    front = Line2D([], [], **{**FRONT, "label": "nothing is below and to the left"})
    return [*named, *dashes, whole, front]


def differences(found: Findings, name: str = "kl") -> Figure:
    """Paired differences at equal bytes with their intervals: blue where the question's second answer loses less.

    found: of `storing.findings`; name: the measure.
    """
    rows = [*_evict(found, name), *_both(found, name), *_both_or_evict(found, name), *_stored(found, name)]
    table = pd.DataFrame(rows, columns=["paper", "label", "value", "low", "high"])
    title = f"Differences at equal stored bytes: {storing.MEASURES[name]}"
    better, worse = (theme.WORDS[colour] for colour in (theme.BETTER, theme.WORSE))
    ax = forest(table, xlabel=f"{better}: the second answer loses less; {worse}: the first; grey: neither", title=title)
    figure = ax.get_figure(root=True)
    assert figure is not None, "it was drawn on a new one"
    return figure


def _evict(found: Findings, name: str) -> list[dict[str, Any]]:
    return [
        _row(row, f"Evict, or quantise to {row['storage']}? {_size(found, row['storage'])}", row["policy"])
        for row in found.frame(storing.EVICT).query("measure == @name").to_dict("records")
    ]


def _both(found: Findings, name: str) -> list[dict[str, Any]]:
    """Turned around: above zero, evicting besides is better than quantising alone."""
    return [
        _row(
            {**row, "value": -row["value"], "low": -row["high"], "high": -row["low"]},
            f"Quantise to {row['storage']}, or evict and keep in {row['other']}? {_size(found, row['storage'])}",
            row["policy"],
        )
        for row in found.frame(storing.BOTH).query("measure == @name and storage != other").to_dict("records")
    ]


def _both_or_evict(found: Findings, name: str) -> list[dict[str, Any]]:
    return [
        _row(row, f"Evict alone, or evict less and keep in {row['other']}? at {row['share']:.0%}", row["policy"])
        for row in found.frame(storing.BOTH_OR_EVICT).query("measure == @name").to_dict("records")
    ]


def _stored(found: Findings, name: str) -> list[dict[str, Any]]:
    return [
        _row(row, f"Keep in {row['storage']}, or in {row['other']}? at {row['share']:.0%}", row["policy"])
        for row in found.frame(storing.STORED).query("measure == @name").to_dict("records")
    ]


def _size(found: Findings, storage: str) -> str:
    return f"at {found.row(storing.SIZE, storage=storage).value:.0%}"


def _row(row: dict[str, Any], heading: str, label: str) -> dict[str, Any]:
    return {"paper": heading, "label": label, **{key: row[key] for key in ("value", "low", "high")}}
