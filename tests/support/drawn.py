"""What a figure shows, read off matplotlib's artists."""

from __future__ import annotations

import numpy
from matplotlib.colors import to_hex

from kvlab.workbench.figures import plots


def title(ax) -> str:
    return ax.get_title(loc="left")


def names(ax) -> list[str]:
    """What the legend of the axes says."""
    return [text.get_text() for text in ax.get_legend().get_texts()]


def curves(ax) -> dict[str, list[float]]:
    """The y values of the curves that have a name."""
    return {
        line.get_label(): numpy.asarray(line.get_ydata(), dtype=float).tolist()
        for line in ax.lines
        if not line.get_label().startswith("_") and len(line.get_xdata())
    }


def bars(ax, *, printed: bool) -> list[float]:
    """Heights of the bars, from left to right: those in the papers' grey, or the others."""
    patches = sorted(ax.patches, key=lambda patch: patch.get_x())
    return [patch.get_height() for patch in patches if (to_hex(patch.get_facecolor()) == plots.PAPER) == printed]


def diamonds(ax) -> list[tuple[float, float]]:
    """The points that a paper prints, less those that it does not."""
    points = [tuple(point) for group in ax.collections for point in numpy.ma.getdata(group.get_offsets()).tolist()]
    return [point for point in points if point != (0, 0) and not numpy.isnan(point).any()]


def ticks(axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]
