"""Figures of policies and storages at equal stored bytes: the fronts of three losses, and paired differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from kvlab.analyses.together import storing
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import FAINT, INK, at, named_rows, plain_ticks, spread_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

DASHES: dict[str, Any] = {storing.PLAIN: "-", "turbo-4": (0, (1, 1)), "nvfp4": (0, (5, 1, 1, 1))}
OTHER_DASH = (0, (3, 1.5))
FRONT = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 2}
LABEL_GAP = 0.075
"""The distance between the names of storages above a panel, as a share of its width."""
TITLE = "Differences at equal stored bytes, as a share of the full cache"
SHOWN = 5
"""Policies with a colour of their own; the others are grey."""
SHARES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def pareto(measured: pd.DataFrame) -> Figure:
    """Draw a panel for each loss over stored bytes.

    A policy's line is solid where its entries are stored as they are, and dashed in another storage. The full cache in
    each storage is a named square. A dotted line joins the systems on the front, which nothing beats.

    measured: from `storing.measure`.
    """
    curves = {name: storing.points(measured, name) for name in storing.MEASURES}
    tints = _tints(measured)
    figure, axes = plt.subplots(1, len(curves), figsize=(5.0 * len(curves), 5.6))
    for ax, (name, points) in zip(axes, curves.items(), strict=True):
        _panel(ax, points, tints)
        ax.set_title(storing.MEASURES[name], fontsize=11, pad=62)
        ax.set_xlabel("stored bytes, % of the full cache in bfloat16")
        if name == "needles_lost":
            ax.set_ylim(-0.05, 1.05)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        else:
            ax.set_yscale("log")
            ax.set_yticks(*plain_ticks(*ax.get_ylim()))
            ax.minorticks_off()
    figure.legend(handles=_legend(measured, tints), loc="outside lower center", ncols=4, fontsize=9.5)
    figure.suptitle("Losses over stored bytes", x=0.01, ha="left", fontweight="bold", fontsize=12.5)
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
            marker=theme.look(policy).marker,
            markersize=4.5,
            markerfacecolor=tint if storage == storing.PLAIN else "white",
            zorder=3,
        )
    best = points.query("front").sort_values("share")
    ax.step(best["share"], best["value"], where="post", **FRONT)
    ax.axvline(1, color=FAINT, linewidth=1, linestyle=":")
    ax.set_xscale("log")
    low, high = float(points["share"].to_numpy().min()), max(float(points["share"].to_numpy().max()), 1.0)
    ax.set_xlim(low / 1.15, high * 1.15)
    ticks = [share for share in SHARES if low / 1.15 <= share]
    ax.set_xticks(ticks, [f"{100 * share:g}" for share in ticks])
    ax.minorticks_off()
    _name_squares(ax, points.query("policy == 'full' and storage != @storing.PLAIN").sort_values("share"))


def _name_squares(ax: Axes, wholes: pd.DataFrame) -> None:
    """The full cache's storages as squares, their names above the panel, where near neighbours do not meet."""
    across = ax.get_xaxis_transform()
    places = ax.transAxes.inverted().transform(ax.transData.transform([(x, 1.0) for x in wholes["share"]]))[:, 0]
    for row, place in zip(wholes.to_dict("records"), spread_out(places.tolist(), LABEL_GAP, 0.0, 1.0), strict=True):
        (across_at, _) = ax.transData.inverted().transform(ax.transAxes.transform((place, 0.0)))
        ax.plot([row["share"]], [row["value"]], "s", color=INK, markersize=6.5, zorder=5)
        ax.annotate(
            row["storage"],
            (row["share"], row["value"]),
            xytext=(across_at, 1.02),
            textcoords=across,
            rotation=40,
            ha="left",
            va="bottom",
            rotation_mode="anchor",
            fontsize=8.5,
            color=INK,
            arrowprops={
                "arrowstyle": "-",
                "color": FAINT,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 3,
                "relpos": (0, 0),
            },
        )


def _legend(measured: pd.DataFrame, tints: dict[str, str]) -> list[Line2D]:
    named = [
        Line2D([], [], color=tint, marker=theme.look(policy).marker, label=policy)
        for policy, tint in tints.items()
        if tint != FAINT
    ]
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
    """Paired differences at equal bytes and their intervals: a panel for each question, a row for each pair of answers.

    Above zero the question's second answer loses less; a mark is filled where the interval leaves zero out.

    found: of `storing.findings`; name: the measure.
    """
    asked = [(question, rows) for question, rows in _asked(found, name).items() if len(rows)]
    policies = list(dict.fromkeys(policy for _, rows in asked for policy in rows["policy"]))
    beside = [asked[start : start + 2] for start in range(0, len(asked), 2)]
    heights = [max(len(set(rows["label"])) for _, rows in both) for both in beside]
    size = plots.WIDTH, 1.6 + sum(0.9 + height * (0.16 + 0.1 * len(policies)) for height in heights)
    figure, grid = plt.subplots(len(beside), 2, figsize=size, squeeze=False, sharex=True, height_ratios=heights)
    for ax in grid.flat[len(asked) :]:
        ax.set_visible(False)
    for ax, (question, rows) in zip(grid.flat, asked, strict=False):
        _question(ax, rows, policies)
        ax.set_title(question, fontsize=11)
        ax.set_xlabel(f"{storing.MEASURES[name]}:\nfirst answer less second", fontsize=10)
        ax.tick_params(labelbottom=True)
    looks = {policy: theme.look(policy) for policy in policies}
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, markersize=6, linestyle="none", label=policy)
        for policy, look in looks.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, title=TITLE, alignment="left", title_fontsize=12)
    figure.legends[0].get_title().set_fontweight("bold")
    filled = "filled: the interval leaves 0 out; right of 0: the second answer loses less"
    plots.note(figure, at(found.table, measure=name), "bars: 95 % intervals of paired differences", filled)
    return figure


def _question(ax: Axes, rows: pd.DataFrame, policies: list[str]) -> None:
    """The policies' marks one above the other in each row, the first row at the top."""
    labels = list(dict.fromkeys(rows["label"]))
    for row in rows.to_dict("records"):
        look, decided = theme.look(row["policy"]), row["low"] > 0 or row["high"] < 0
        y = labels.index(row["label"]) + 0.8 * ((policies.index(row["policy"]) + 0.5) / len(policies) - 0.5)
        ax.plot([row["low"], row["high"]], [y, y], color=look.colour, linewidth=1.4)
        ax.plot(
            row["value"],
            y,
            look.marker,
            color=look.colour,
            markersize=5.5,
            markerfacecolor=look.colour if decided else "white",
        )
    ax.axvline(0, color=INK, linewidth=1)
    named_rows(ax, labels, [INK] * len(labels))
    for y in range(1, len(labels)):
        ax.axhline(y - 0.5, color=theme.GRID, linewidth=0.8, zorder=0)


def _asked(found: Findings, name: str) -> dict[str, pd.DataFrame]:
    """The rows of each question: label, policy, value, low, high."""
    effects = (storing.EVICT, storing.BOTH, storing.BOTH_OR_EVICT, storing.STORED)
    evict, both, both_or_evict, stored = (at(found.frame(effect), measure=name) for effect in effects)
    # Turned around: above zero, evicting as well is better than quantising alone.
    turned = both.query("storage != other")
    turned = turned.assign(value=-turned["value"], low=-turned["high"], high=-turned["low"])
    return {
        "Evict, or quantise?": _labelled(evict, lambda row: f"{row['storage']}, {_size(found, row['storage'])}"),
        "Quantise, or evict as well?": _labelled(
            turned, lambda row: f"{row['storage']}, or {row['other']}, {_size(found, row['storage'])}"
        ),
        "Evict, or evict less and quantise?": _labelled(
            both_or_evict, lambda row: f"{row['other']}, {row['share']:.0%}"
        ),
        "Which storage?": _labelled(stored, lambda row: f"{row['storage']}, or {row['other']}, {row['share']:.0%}"),
    }


def _labelled(rows: pd.DataFrame, label: Callable[[Any], str]) -> pd.DataFrame:
    return rows.assign(label=[label(row) for row in rows.to_dict("records")])


def _size(found: Findings, storage: str) -> str:
    return f"{found.row(storing.SIZE, storage=storage).value:.0%}"
