"""The picture of a method's page: which tokens of one text it stores in each layer, and which its steps read."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from kvlab.render.figures import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from matplotlib.image import AxesImage

    from kvlab.analyses.portraits import Portrait

BLUES = LinearSegmentedColormap.from_list("shares", ["white", plots.COLOURS[0]])
MERGED = plots.COLOURS[1]
COLOURS_OF_A_FILE = 160


def figure(portrait: Portrait) -> Figure:
    """Draw which tokens are stored when the prompt has ended.

    A policy that acts while decoding has a panel of the tokens that its steps read. A policy that changes keys has a
    panel of the channels that they have left.
    """
    panels = 1 + (portrait.read is not None) + (portrait.channels is not None)
    whole = Figure(figsize=(9.6, 0.5 + 3.3 * panels))
    parts = iter(whole.subfigures(panels, 1, squeeze=False).flat)
    kept = portrait.stored.float()
    of_heads = f"share of {kept.shape[1]} KV heads"
    stored = _panel(
        next(parts), kept, portrait.stored_entries, portrait, "stored after the prompt", "tokens stored", of_heads
    )
    if portrait.merged is not None:
        layer, _, position = portrait.merged.nonzero(as_tuple=True)
        stored.scatter(position, layer, s=9, color=MERGED, linewidths=0, label="holds merged tokens", zorder=4)
        stored.legend(loc="upper right", bbox_to_anchor=(1, -0.1), handletextpad=0.1, fontsize=9)
    if portrait.read is not None:
        steps = portrait.read.shape[-1] - portrait.prompt
        read = _panel(
            next(parts),
            portrait.read,
            portrait.read_entries,
            portrait,
            f"read by the {steps} decoding steps",
            "tokens read",
            "share of heads and steps",
        )
        read.axvline(portrait.prompt - 0.5, color=plots.INK, linewidth=0.8)
        read.set_xlabel("position of the token (right of the line: the response)")
    if portrait.channels is not None:
        _channels(next(parts), portrait)
    budget = f", budget {portrait.policy.asked:g} ({portrait.entries:,} entries)" if portrait.policy.asked else ""
    title = f"{portrait.policy.name}{budget}: {portrait.document}, {portrait.prompt:,} tokens"
    whole.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12.5, color=plots.INK)
    return whole


def _panel(
    part: SubFigure, shares: Tensor, counts: Tensor, portrait: Portrait, title: str, counted: str, unit: str
) -> Axes:
    """Draw shares `[layers, kv_heads, positions]` as a map of layer by position.

    The mean over layers is above the map. The number of tokens of each layer's KV heads, `counts` `[layers, kv_heads]`,
    is next to it.
    """
    grid = part.subplots(
        2,
        3,
        width_ratios=[1, 0.16, 0.018],
        height_ratios=[0.2, 1],
        gridspec_kw={"wspace": 0.02, "hspace": 0.02},
    )
    above, corner, _, ax, rows_ax, bar = grid.flat
    for empty in (corner, grid[0, 2]):
        empty.axis("off")
    positions, rows = np.arange(shares.shape[-1]), np.arange(len(shares))
    shown = _map(ax, shares.mean(1), portrait)
    ax.set_xlabel("position of the token")
    # Panels below each other have one scale.
    ax.set_xlim(-0.5, (portrait.stored if portrait.read is None else portrait.read).shape[-1] - 0.5)
    above.fill_between(positions, shares.mean((0, 1)), color=plots.COLOURS[0], linewidth=0, alpha=0.8)
    above.set_xlim(ax.get_xlim())
    above.set_ylim(0, 1)
    above.set_yticks([0, 1])
    above.tick_params(labelbottom=False, labelsize=8)
    above.set_ylabel("all layers", fontsize=8)
    above.set_title(title, fontsize=11)
    rows_ax.barh(rows, counts.mean(1), height=0.8, color=plots.COLOURS[0], alpha=0.8)
    low, high = counts.amin(1), counts.amax(1)
    rows_ax.hlines(rows, low, high, color=plots.INK, linewidth=1)
    if portrait.policy.asked:
        rows_ax.axvline(portrait.entries, color=MERGED, linewidth=1.4, linestyle=(0, (4, 2)))
    rows_ax.set_ylim(ax.get_ylim())
    rows_ax.set_xlim(0, 1.08 * max(float(high.max()), portrait.entries))
    rows_ax.tick_params(labelleft=False, labelsize=8)
    rows_ax.grid(False)
    dashed = "\n(dashed: budget)" if portrait.policy.asked else ""
    rows_ax.set_xlabel(f"{counted}\nper KV head{dashed}", fontsize=9)
    part.colorbar(shown, cax=bar, label=unit)
    return ax


def _map(ax: Axes, shares: Tensor, portrait: Portrait) -> AxesImage:
    image = ax.imshow(shares, cmap=BLUES, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    ax.grid(False)
    stride = max(1, -(-len(portrait.layers) // 6))
    ticks = range(0, len(portrait.layers), stride)
    ax.set_yticks(list(ticks), [str(portrait.layers[tick]) for tick in ticks])
    ax.set_ylabel("layer")
    return image


def _channels(part: SubFigure, portrait: Portrait) -> None:
    assert portrait.channels is not None, "there is a panel of channels only for these"
    ax, bar = part.subplots(1, 2, width_ratios=[1.18, 0.018], gridspec_kw={"wspace": 0.02})
    image = _map(ax, portrait.channels.mean(1), portrait)
    ax.set_xlabel("channel of the key")
    ax.set_title("channels left of the stored keys", fontsize=11)
    part.colorbar(image, cax=bar, label="share of heads and tokens")


def png(drawn: Figure) -> bytes:
    """The figure as a small PNG, without the time and the versions that it was made with."""
    from PIL import Image

    plain, small = io.BytesIO(), io.BytesIO()
    drawn.savefig(plain, format="png", dpi=100, metadata={"Software": None})
    picture = Image.open(plain).convert("RGB")
    picture.quantize(COLOURS_OF_A_FILE).save(small, format="png", optimize=True)
    return small.getvalue()
