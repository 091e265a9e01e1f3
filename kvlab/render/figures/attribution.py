"""Figures of an attribution: where in the model the loss lies, and how much of it a few entries carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np

from kvlab.render.figures import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.attribution.results import Attribution

ORDERS = {
    "effect": ("by effect", plots.COLOURS[1], "o"),
    "attention": ("by attention", plots.COLOURS[0], "s"),
    "recency": ("newest first", plots.COLOURS[6], "^"),
    "random": ("at random", plots.PAPER, "v"),
}
"""How each order of restoring is drawn: label, colour, marker."""


def attribution(why: Attribution) -> Figure:
    """A map of the effects by layer and KV head, and the curve of restoring."""
    figure, (where, curve) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=[1, 1.5])
    heads_and_layers(why, where)
    restored(why, curve)
    return figure


def heads_and_layers(why: Attribution, ax: Axes | None = None) -> Axes:
    """Draw the effects summed over the entries of each KV head, in nats: red where their loss costs the response.

    Effects of rounded entries count too.
    """
    ax = plots.axes(ax)
    sums = why.costs.sum(-1).numpy()
    layers = why.lm.layout.compressed
    most = float(np.abs(sums).max()) or 1.0
    image = ax.imshow(sums, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
    row, head = np.unravel_index(int(sums.argmax()), sums.shape)
    ax.set_xticks(range(sums.shape[1]))
    shown = range(0, len(layers), max(1, len(layers) // 10))
    ax.set_yticks(list(shown), [str(layers[i]) for i in shown])
    ax.grid(False)
    ax.set(xlabel="KV head", ylabel="layer", title=f"Layer {layers[row]}, KV head {head} costs the most")
    plots.figure_of(ax).colorbar(
        image, ax=ax, label=f"effect of what was evicted{'' if why.storage.exact else ' or rounded'} (nats)"
    )
    return ax


def restored(why: Attribution, ax: Axes | None = None) -> Axes:
    """The loss regained by entries that are put back, in four orders; every point is a run of the model."""
    ax = plots.axes(ax)
    table, difference = why.restored, why.summary["difference"]
    for order, (label, colour, marker) in ORDERS.items():
        rows = table[table.order == order]
        ax.plot(rows.entries, rows.regained, marker=marker, color=colour, label=label)
    ax.axhline(difference, color=plots.INK, linewidth=1, linestyle="--")
    ax.annotate(
        "all that the policy costs", (0.01, difference), xycoords=("axes fraction", "data"), xytext=(0, 3),
        textcoords="offset points", fontsize=9, color=plots.INK,
    )  # fmt: skip
    if len(table):
        ax.set_xscale("log")
    ax.set(
        xlabel=f"entries put back, of {why.summary['evicted']:,.0f} evicted",
        ylabel="loss regained (nats)",
        title=title(why),
    )
    ax.legend()
    return ax


def title(why: Attribution) -> str:
    """The curve's message: how much of the policy's cost the first 50 entries by effect regain.

    If fewer were evicted, or the policy costs nothing, the title has no number.
    """
    table = why.restored
    rows = table[(table.order == "effect") & (table.entries == 50)]
    if rows.empty or why.summary["difference"] <= 0:
        return "Loss regained by entries put back"
    share = float(rows.share.iloc[0])
    # Entries whose eviction helps stay evicted. So 50 entries can regain more than the full cache does.
    return f"50 entries regain {'all' if share >= 1 else f'{share:.0%}'} of what the policy costs"
