"""Drawings of one query, as SVG: its attention by position, its head at each step, and maps of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.render import theme
from kvlab.render.explorer.html_medium import BLUE, FAINT, RED, STATIC, Medium, shade

if TYPE_CHECKING:
    from kvlab.render.explorer.query_view import Look

STRIP_BINS = 360
CELL, SHADES = 11, 16  # height of a map's cells, and how many shades they have
MARGIN = 18  # on the left of a map, for the layer numbers


def _skyline(heights: Iterable[float], base: float) -> str:
    """The outline of adjacent bars of width 1, as a path; heights: in whole units above `base`."""
    level, run, path = 0, 0, []
    for height in map(round, heights):
        if height != level:
            path.append((f"h{run}" if run else "") + f"v{level - height}")
            level, run = height, 0
        run += 1
    return f"M0 {base:g}{''.join(path)}h{run}V{base:g}z"


def _ticks(end: int, count: int = 5) -> list[int]:
    """Round numbers from 0 to `end`, about `count` of them."""
    rough = max(1, end / count)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    return list(range(0, end + 1, max(1, int(step))))


def strip(look: Look, medium: Medium = STATIC, height: int = 64) -> str:
    """The query's attention over the positions, on a square-root scale: read attention is blue, lost attention
    vermilion. A band below shows which keys are read, whether this query attends to them or not.
    """
    n = len(look.weights)
    bins = min(STRIP_BINS, n)
    bin_of = (torch.arange(n) * bins // n).clamp_max(bins - 1)
    parts = look.weights - look.lost, look.lost, look.read, look.stored
    kept, lost, read, stored = (torch.zeros(bins).index_add_(0, bin_of, part.float()) for part in parts)
    whole = kept + lost
    highest = max(float(whole.max()), 1e-9)
    bars = (whole / highest).sqrt() * height
    share = kept / whole.clamp_min(1e-30)
    size = torch.zeros(bins).index_add_(0, bin_of, torch.ones(n))
    band = height + 2
    rug = [
        f'<path d="{_rows(cells)}" transform="translate(0 {band + 2.5})" stroke="{colour}" stroke-width="5"/>'
        for cells, colour in (
            ((stored > 0) & (read == 0), theme.RULE),
            (read > 0, shade(BLUE, 0.45)),
            (read >= 0.5 * size, f"rgb{BLUE}"),
        )
    ]
    positions = _ticks(n - 1)
    marks = "".join(f"M{(position + 0.5) * bins / n:.1f} {band + 5}v4" for position in positions)
    prompt = look.trace.prompt_length * bins / n
    drawing = (
        f'<path d="{_skyline(bars.tolist(), height)}" fill="rgb{RED}"/>'
        f'<path d="{_skyline((bars * share).tolist(), height)}" fill="rgb{BLUE}"/>'
        f'<path d="M{prompt:.1f} 0v{height}" stroke="{FAINT}" stroke-dasharray="3 3"/>'
        f'<path d="M0 {height + 0.5}H{bins}{marks}" stroke="{FAINT}" vector-effect="non-scaling-stroke"/>'
        f"{''.join(rug)}"
    )
    about = (
        f"Attention of the query over positions 0 to {n - 1:,}: {1 - look.mass_lost:.1%} on "
        f"{int(look.read.sum()):,} keys that it reads, {look.mass_lost:.1%} on others"
    )
    per = "token" if bins == n else f"{n / bins:.2g} tokens"
    labels = " ".join(
        f'<span style="position:absolute;left:{100 * (position + 0.5) / n:.2f}%;margin-left:-30px;width:60px;'
        f'text-align:center">{position:,}</span>'
        for position in positions
        if 0.02 * n < position < 0.9 * n
    )
    return (
        f'<div style="font-size:11px;color:{FAINT}">attention per {per}, root scale up to {highest:.1%}; '
        f"dashed: end of prompt; band: keys read</div>"
        f"{medium.drawing('strip', about, drawing, (bins, height + 11), '100%')}"
        f'<div style="position:relative;height:17px;font-size:11px;color:{FAINT}">'
        f'<span style="position:absolute;left:0">0</span> {labels} '
        '<span style="position:absolute;right:0">position</span></div>'
    )


def _rows(cells: Tensor) -> str:
    """A path along the true cells of a row; each cell has width 1."""
    path, start = [], None
    for x, filled in enumerate([*cells.tolist(), False]):
        if filled and start is None:
            start = x
        elif not filled and start is not None:
            path.append(f"M{start} 0h{x - start}")
            start = None
    return "".join(path)


def steps(look: Look, medium: Medium = STATIC, height: int = 44) -> str:
    """Attention that this head loses at each decoding step, the chosen step framed."""
    spot = look.spot
    values = look.result.mass_lost[look.row, spot.head]
    n = len(values)
    width = max(1.0, min(14.0, 190 / n))
    outline = _box((spot.step - 1) * width, 1, width, height - 1)
    chosen = f'<path class="kvlab-chosen" d="{outline}" fill="none" stroke="#000" stroke-width="1.5"/>'
    scaled = (values * (height - 2)).tolist()
    drawing = (
        f'<path d="{_skyline(scaled, height)}" transform="scale({width:.4g} 1)" fill="rgb{RED}"/>'
        f'<path d="M0 {height + 0.5}H{n * width:.4g}" stroke="{FAINT}"/>{chosen}'
        + "".join(
            f'<text x="{(step - 0.5) * width:.4g}" y="{height + 10}" text-anchor="middle">{step}</text>'
            for step in sorted({*(t for t in _ticks(n, 4) if t), 1})
        )
    )
    about = f"Attention lost by layer {spot.layer}, head {spot.head} at each of {n} steps, mean {values.mean():.1%}"
    return (
        f'<figure style="margin:0 0 6px"><figcaption style="font-size:12px">lost by this head at each step'
        f'<br><span style="color:{FAINT}">mean {values.mean():.1%}; top: 100%</span></figcaption>'
        f"{medium.drawing('steps', about, drawing, (n * width + 2, height + 12), f'{n * width + 2:.0f}')}</figure>"
    )


def maps(look: Look, medium: Medium = STATIC) -> str:
    """The whole model at this step: attention lost by every query head, and recall of every KV head."""
    result, spot = look.result, look.spot
    group = spot.head * result.trace.kv_heads // result.trace.heads
    lost, recall = result.mass_lost[:, :, spot.step - 1], result.recall
    # The root makes small losses visible; recall has a linear scale.
    layers = result.trace.layers
    return _map(lost, (look.row, spot.head), RED, ("attention lost", "query head"), 0.5, medium, layers) + _map(
        recall, (look.row, group), BLUE, ("recall", "KV head"), 1.0, medium, layers
    )


def _box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle, as part of a path."""
    return f"M{x:.4g} {y:.4g}h{width:.4g}v{height:.4g}h-{width:.4g}z"


def _map(
    values: Tensor,
    chosen: tuple[int, int],
    colour: tuple[int, int, int],
    names: tuple[str, str],
    power: float,
    medium: Medium,
    numbers: Sequence[int],
) -> str:
    """A heatmap of `[layers, columns]` with axes and scale; the chosen cell is framed.

    names: of the values and of the columns; power: values are raised to it before they are shaded; numbers: of the
    layers in the model.
    """
    layer, column = chosen
    layers, columns = values.shape
    # Wide models get narrower cells rather than a wider page.
    width = max(3.0, min(CELL * 1.4, 240 / columns))
    # One path for each of a few shades keeps the picture small; neighbours in a row with one shade share a piece.
    pieces: dict[int, list[str]] = {}
    for y, row in enumerate((values.nan_to_num(0).clamp(0, 1) ** power * SHADES).round().int().tolist()):
        start = 0
        for x in range(1, columns + 1):
            if x == columns or row[x] != row[start]:
                pieces.setdefault(row[start], []).append(f"M{start} {y}h{x - start}")
                start = x
    cells = "".join(
        f'<path d="{"".join(squares)}" stroke="{shade(colour, level / SHADES)}"/>' for level, squares in pieces.items()
    )
    outline = _box(MARGIN + column * width, layer * CELL, width, CELL)
    high, wide = layers * CELL, max(MARGIN + columns * width + 2, 78)
    marks = "".join(
        f'<text x="{MARGIN - 3}" y="{y * CELL + 9}" text-anchor="end">{numbers[y]}</text>'
        for y in range(0, layers, max(1, layers // 10))
    )
    stride = math.ceil(9 / width)
    marks += "".join(
        f'<text x="{MARGIN + (x + 0.5) * width:.4g}" y="{high + 9}" text-anchor="middle">{x}</text>'
        for x in range(0, columns, next(m for m in (1, 2, 4, 8, 16, 32, 64, 128) if m >= stride))
    )
    marks += f'<text x="{MARGIN}" y="{high + 19}">{names[1]}</text>'
    scale = (
        "".join(
            f'<rect x="{MARGIN + n * 15}" y="{high + 25}" width="15" height="7" fill="{shade(colour, share**power)}"/>'
            f'<text x="{MARGIN + n * 15 + 7.5}" y="{high + 40}" text-anchor="middle">{100 * share:.0f}</text>'
            for n, share in enumerate((0.0, 0.1, 0.4, 1.0) if power < 1 else (0.0, 0.3, 0.6, 1.0))
        )
        + f'<text x="{MARGIN - 3}" y="{high + 40}" text-anchor="end">%</text>'
    )
    drawing = (
        f'<g transform="translate({MARGIN} {CELL / 2}) scale({width:.4g} {CELL})">{cells}</g>'
        f'<path d="{_box(MARGIN, 0, columns * width, high)}" fill="none" stroke="{theme.RULE}" stroke-width="0.6"/>'
        f'<path class="kvlab-chosen" d="{outline}" fill="none" stroke="#000" stroke-width="1.8"/>{marks}{scale}'
    )
    mean, value = values.mean(), values[layer, column]
    about = f"{names[0]}: {layers} layers by {columns} {names[1]}s, mean {mean:.1%}, here {value:.1%}"
    return (
        f'<figure style="margin:0"><figcaption style="font-size:12px;max-width:{wide:.0f}px">'
        f'{names[0]}<br><span style="color:{FAINT}">here {value:.0%}<br>mean {mean:.0%}</span></figcaption>'
        f'<div style="font-size:10px;color:{FAINT}">layer</div>'
        f"{medium.drawing('map', about, drawing, (wide, high + 42), f'{wide:.0f}')}</figure>"
    )
