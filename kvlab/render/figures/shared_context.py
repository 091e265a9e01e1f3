"""Figures of several questions over one compressed context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from kvlab.analyses.shared_context import asking as analysis
from kvlab.render.figures import many_policies, plots
from kvlab.render.figures.many_policies import at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

LOSS = "loss of the right answer, nats a token"
TITLES = {"each": "Each question read", "first": "One chat: the first one read", "none": "Requests: none read"}
SHORT = {"each": "each question read", "first": "the first one read", "none": "none read"}


def question(findings: Findings) -> Figure:
    """Losses of every policy by what had been read when the cache was compressed.

    findings: of `asking.findings`.
    """
    table = findings.frame(analysis.LOSS)
    budgets = sorted(table["budget"].unique())
    policies = list(dict.fromkeys(table["policy"]))
    rows = len(policies) * len(SHORT)
    figure, grid = plt.subplots(
        1, len(budgets), figsize=(6.4 * len(budgets), 1.2 + 0.3 * rows), squeeze=False, sharex=True
    )
    for ax, budget in zip(grid[0], budgets, strict=True):
        part = at(table, budget=budget)
        part = part.assign(
            place=part["policy"].map(policies.index) * len(SHORT) + part["way"].map(list(SHORT).index),
            policy=part["policy"] + ", " + part["way"].replace(SHORT),
        ).sort_values("place")
        many_policies.dots(part, xlabel=LOSS, title=f"{budget:g} entries", reference=(0.0, "full cache"), ax=ax)
    return figure


def turns(findings: Findings) -> Figure:
    """The loss at each turn, by what had been read.

    findings: of `asking.findings`.
    """
    table = findings.frame(analysis.BY_TURN)
    least = table["budget"].min()
    figure, axes = plt.subplots(1, len(TITLES), figsize=(4.4 * len(TITLES), 3.8), sharey=True)
    for ax, (way, title) in zip(axes, TITLES.items(), strict=True):
        part = at(table, way=way, budget=least)
        plots.estimates(part, x="turn", hue="policy", xlabel="question", ylabel=LOSS, title=title, ax=ax)
        ax.axhline(0, color=many_policies.FAINT, linewidth=1, linestyle=":")
        ax.set_xticks(sorted(part["turn"].unique()))
    for ax in axes[1:]:
        ax.set_ylabel("")
        ax.get_legend().remove()
    figure.suptitle(f"{least:g} entries", x=0.01, y=1.06, ha="left")
    return figure
