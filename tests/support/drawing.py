"""What the tests of the papers' figures share: findings of seeded numbers, and what a reader sees on the axes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import matplotlib.pyplot as plt
import numpy as np
import pandas
from matplotlib.axes import Axes

from kvlab.analyses.findings import Findings
from kvlab.workbench.figures import plots


@contextmanager
def drawing() -> Iterator[None]:
    """Figures in kvlab's style on no screen, closed in the end."""
    with plt.rc_context():
        plt.switch_backend("agg")
        plots.style()
        yield
        plt.close("all")


def seeded(effects: Mapping[str, Mapping[str, Sequence[Hashable]]], table: pandas.DataFrame | None = None) -> Findings:
    """A random number between 0 and 1 with an interval around it at each combination of each effect's keys."""
    random, findings = np.random.default_rng(7), Findings(pandas.DataFrame() if table is None else table)
    for effect, axes in effects.items():
        for values in itertools.product(*axes.values()):
            value = random.uniform(0.1, 0.9)
            findings.set(effect, value, (value - 0.05, value + 0.08), **dict(zip(axes, values, strict=True)))
    return findings


def curve(ax: Axes, label: str) -> dict[float, float]:
    """The points of the curve with this name in the legend."""
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def curves(ax: Axes) -> list[str]:
    """The names of all curves that have one, in the order in which they were drawn."""
    return [line.get_label() for line in ax.lines if not str(line.get_label()).startswith("_")]


def named(owner) -> list[str]:
    """The legend of axes, or the first one of a figure."""
    legend = owner.get_legend() if isinstance(owner, Axes) else owner.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def ticks(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_xticklabels()]


def heights(ax: Axes) -> list[float]:
    """Of all bars."""
    return [bar.get_height() for bar in ax.patches]


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def values(findings: Findings, effect: str, by: str, **keys: Hashable) -> dict:
    """The values of an effect at certain keys, by one other key."""
    frame = findings.frame(effect)
    part = frame[(frame[list(keys)] == pandas.Series(keys)).all(axis=1)]
    return dict(zip(part[by], part["value"], strict=True))
