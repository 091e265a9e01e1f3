"""The figures of the first two notebooks: where in the model, and when, attention is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from kvlab.analyses import first_look
from kvlab.render.figures import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings
    from kvlab.replays.replay import Replay
    from kvlab.replays.results import Replays


def where_and_when(result: Replay, results: Replays, budget: float) -> Figure:
    """Attention lost under one policy, layer by head, and under several policies of that budget, step by step."""
    figure, (heads, steps) = plt.subplots(1, 2, figsize=(12.5, 5), width_ratios=[1, 1.25])
    plots.heatmap(
        first_look.lost_by_head(result),
        xlabel="query head",
        ylabel="layer",
        unit="attention mass lost",
        title=f"{result.policy.name}, budget {budget}",
        ax=heads,
    )
    plots.lines(
        first_look.lost_by_step(results),
        x="step",
        y="mass_lost",
        hue="policy",
        marker=None,
        xlabel="decoding step",
        ylabel="attention mass lost",
        title="Every policy at the same budget",
        ax=steps,
    )
    steps.legend(ncols=2)
    return figure


def lost_by_layer(findings: Findings, budget: float) -> Figure:
    """Attention lost by layer, a curve for each policy; findings: of `exploring.lost_by_layer`."""
    figure, ax = plt.subplots()
    plots.lines(
        findings.table,
        x="layer",
        y="mass_lost",
        hue="policy",
        xlabel="layer",
        ylabel="attention mass lost",
        title=f"Attention lost by layer, budget {budget}",
        ax=ax,
    )
    return figure
