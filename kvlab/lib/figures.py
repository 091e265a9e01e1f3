"""Figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import rc_context, rcParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 144


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure, cut to what it shows, in as many forms as there are paths, each after its suffix.

    It is laid out once for all of them, which spares nearly a quarter of the time of two files.
    """
    engine, dpi = figure.get_layout_engine(), figure.get_dpi()
    # With these settings no engine means none, and not the one that new figures get.
    # The same figure is the same file: an SVG has no date, and its ids do not change from one drawing to the next.
    with rc_context({"figure.constrained_layout.use": False, "figure.autolayout": False, "svg.hashsalt": "kvlab"}):
        try:
            figure.set_dpi(DPI)
            figure.draw_without_rendering()
            shown = figure.get_tightbbox().padded(rcParams["savefig.pad_inches"])
            figure.set_layout_engine(None)
            for path in paths:
                undated = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(path, dpi=DPI, bbox_inches=shown, facecolor="white", metadata=undated)
        finally:
            figure.set_dpi(dpi)
            figure.set_layout_engine(engine)
