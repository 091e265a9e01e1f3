"""What the tests of figures share: drawing without a screen, and reading a figure again."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvlab.workbench.figures import plots


def headless() -> Iterator[None]:
    """A fixture in each file of tests: drawing needs no screen, has the notebooks' style and leaves no figure open."""
    with plt.rc_context():
        plt.switch_backend("agg")
        plots.style()
        yield
        plt.close("all")


def titles(figure: Figure) -> list[str]:
    """The titles of a figure's panels, colour bars left out."""
    return [title for ax in figure.axes if (title := ax.get_title(loc="left"))]


def legend(shown: Axes | Figure) -> list[str]:
    """What a legend says."""
    found = shown.get_legend() if isinstance(shown, Axes) else shown.legends[0]
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def texts(ax: Axes) -> list[str]:
    """What is written inside the axes."""
    return [text.get_text() for text in ax.texts]


def bars(ax: Axes, tint: str | None = None) -> list[float]:
    """Heights of the bars, or of those of one colour."""
    return [bar.get_height() for bar in ax.patches if tint is None or to_hex(bar.get_facecolor()) == tint.lower()]


def ticks(ax: Axes, side: str = "x") -> list[str]:
    """What is written along an axis."""
    return [label.get_text() for label in getattr(ax, f"get_{side}ticklabels")()]


def curves(ax: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Points of the curves that have a name, by it."""
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in ax.lines
        if not str(line.get_label()).startswith("_")
    }
