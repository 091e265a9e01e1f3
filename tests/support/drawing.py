"""What a figure shows, read off matplotlib's artists again."""

from __future__ import annotations

from typing import NamedTuple

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvlab.render.figures import plots


class Curve(NamedTuple):
    """Where a curve runs, point by point."""

    x: list[float]
    y: list[float]

    def points(self) -> dict[float, float]:
        """y by x."""
        return dict(zip(*self, strict=True))


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def titles(figure: Figure) -> list[str]:
    """The titles of a figure's panels, colour bars left out."""
    return [said for ax in figure.axes if (said := title(ax))]


def legend(shown: Axes | Figure) -> list[str]:
    """What the legend of axes says, or the only one of a figure."""
    (found,) = [shown.get_legend()] if isinstance(shown, Axes) else shown.legends
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def texts(ax: Axes) -> list[str]:
    """What is written inside the axes."""
    return [text.get_text() for text in ax.texts]


def ticks(ax: Axes, side: str = "x") -> list[str]:
    """What is written along an axis."""
    return [label.get_text() for label in getattr(ax, f"get_{side}ticklabels")()]


def curves(ax: Axes) -> dict[str, Curve]:
    """The curves that have a name and a point, by it, in the order in which they were drawn."""
    lines = [line for line in ax.lines if not str(line.get_label()).startswith("_") and len(line.get_xdata())]
    found = {
        str(line.get_label()): Curve(*(numpy.asarray(part).tolist() for part in (line.get_xdata(), line.get_ydata())))
        for line in lines
    }
    assert len(found) == len(lines), "two curves have one name"
    return found


def bars(ax: Axes, tint: str | None = None) -> list[float]:
    """Heights of the bars from left to right, of all or of those of one colour."""
    return _heights(bar for bar in ax.patches if tint is None or to_hex(bar.get_facecolor()) == tint.lower())


def our_bars(ax: Axes) -> list[float]:
    """Heights of the bars that are not in the papers' grey, from left to right."""
    return _heights(bar for bar in ax.patches if to_hex(bar.get_facecolor()) != plots.PAPER)


def _heights(patches) -> list[float]:
    return [bar.get_height() for bar in sorted(patches, key=lambda bar: bar.get_x())]


def diamonds(ax: Axes) -> list[tuple[float, float]]:
    """The points that a paper prints, less those that it does not."""
    points = [tuple(point) for group in ax.collections for point in numpy.ma.getdata(group.get_offsets()).tolist()]
    return [point for point in points if point != (0, 0) and not numpy.isnan(point).any()]
