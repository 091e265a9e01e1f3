"""The forest plot alone, as one slide: `kvlab report --poster FILE`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab import papers
from kvlab.errors import KvlabError
from kvlab.lib.files import replacing
from kvlab.render import theme
from kvlab.render.phrases import number
from kvlab.workbench.report import forest, model_trends
from kvlab.workbench.report.ledger import Entry
from kvlab.workbench.report.ledger_models import subjects

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".pdf", ".png")
SIZE = (13.33, 7.5)
"""A slide of 16 to 9, in inches."""
STRIP = (0.47, 0.82)
"""Where the strips of a column begin and end, as shares of its width; names stand left of them, numbers right."""
Group = tuple[str, str, list[forest.Line]]
"""A paper's label, its headline and its lines."""


def check(path: Path) -> None:
    """Raise KvlabError where a poster cannot have this file's format."""
    if path.suffix.lower() not in FORMATS:
        raise KvlabError(f"a poster is {', '.join(FORMATS)}: {path} is none of these")


def groups(judged: Sequence[Entry]) -> list[Group]:
    """The papers in their order; those of which nothing can be drawn are left out."""
    order = subjects(judged)
    rows = model_trends.rows(judged, order)
    found = []
    for paper in papers.of_project():
        mine = forest.of_paper([row for row in rows if row.claim.paper == paper.name], paper)
        if mine:
            found.append((paper.label, forest.headline(mine, len(order)), mine))
    return found


def save(judged: Sequence[Entry], path: Path) -> Path:
    """Draw the poster of these entries into `path`, whose suffix is its format; returns `path`."""
    import matplotlib.pyplot as plt

    from kvlab.render.figures import plots

    check(path)
    found, order = groups(judged), subjects(judged)
    if not found:
        raise KvlabError("nothing of what the poster shows has been measured; run `kvlab reproduce` first")
    plots.style()
    figure, columns = plt.subplots(1, 2, figsize=SIZE, gridspec_kw={"wspace": 0.08})
    try:
        halves = _halves(found)
        height = max(map(_height, halves))
        for ax, half in zip(columns, halves, strict=True):
            _column(ax, half, height)
        figure.suptitle(
            f"Claims of {len(found)} papers" + (f" on {len(order)} models" if len(order) > 1 else ""),
            x=0.01,
            ha="left",
            weight="bold",
            color=theme.INK,
        )
        labels = ", ".join(subject.label for subject in order)
        figure.supxlabel(
            "Each line has its own scale, with 95 % intervals. Right of the dotted line lies what the paper says; "
            f"a grey bar is its number.\nModels from top to bottom: {labels}. Filled: holds, at least in direction. "
            "Hollow: fails (orange) or undecided (blue).",
            x=0.01,
            ha="left",
            fontsize=8,
            color=theme.EDGE,
        )
        with replacing(path) as whole:
            figure.savefig(whole, format=path.suffix[1:].lower())
    finally:
        plt.close(figure)
    return path


def _height(half: Sequence[Group]) -> int:
    return sum(len(lines) + 2 for _, _, lines in half)


def _halves(found: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Cut between two papers such that the longer column is as short as it can be."""
    cuts = ((list(found[:cut]), list(found[cut:])) for cut in range(1, len(found) + 1))
    return min(cuts, key=lambda halves: max(map(_height, halves)))


def _column(ax: Axes, half: Sequence[Group], height: int) -> None:
    ax.set(xlim=(0, 1), ylim=(height, 0))
    ax.axis("off")
    y = 0.5
    for label, headline, lines in half:
        ax.text(0, y, label, weight="bold", fontsize=11, color=theme.INK, va="center")
        ax.text(STRIP[0], y, headline, fontsize=9, color=theme.EDGE, va="center")
        for line in lines:
            y += 1
            _row(ax, y, line)
        y += 2


def _row(ax: Axes, y: float, line: forest.Line) -> None:
    def x(percent: float) -> float:
        return STRIP[0] + (STRIP[1] - STRIP[0]) * percent / 100

    ax.text(0, y, textwrap.fill(line.name, 40), fontsize=8.5, color=theme.INK, va="center", linespacing=0.95)
    ax.plot([x(forest.NO_EFFECT)] * 2, [y - 0.5, y + 0.5], color=theme.FAINT, lw=1, ls=":")
    if line.paper is not None:
        ax.plot([x(line.paper)] * 2, [y - 0.4, y + 0.4], color=theme.PAPER, lw=3)
        shown = number(line.claim.paper_value) + (" ▸" if line.beyond else "")
        ax.text(0.92, y, shown, fontsize=8.5, color=theme.EDGE, va="center", ha="right")
    ax.text(1, y, line.holds, fontsize=8.5, weight="bold", color=theme.INK, va="center", ha="right")
    step = 0.8 / max(1, len(line.dots))
    for place, dot in enumerate(line.dots):
        at = y - 0.4 + step * (place + 0.5)
        colour = theme.MARKS[dot.state]
        ax.plot([x(dot.low), x(dot.high)], [at, at], color=colour, lw=1.2, alpha=0.7)
        hollow = dot.state in (papers.FAILS, papers.UNDECIDED)
        ax.plot(x(dot.x), at, "o", ms=3.2, mfc="white" if hollow else colour, mec=colour, mew=1)
