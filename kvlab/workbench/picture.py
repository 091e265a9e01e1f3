"""One decoding query of a replay as a picture in HTML: which tokens it could read, and where its attention was lost.

Plain strings with inline styles, drawn in milliseconds, so that a slider can redraw them and a code host can show them
without any script. Drawings are SVG inside images: where a notebook is not trusted, markup of SVG is taken out.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.replay import Replay, reference

if TYPE_CHECKING:
    from kvlab.trace import Trace

READ, STORED, GONE = "read", "stored, not read", "evicted"
# Okabe and Ito's palette, as in the figures: what is read is blue, what is lost vermilion.
BLUE, RED = (0, 114, 178), (213, 94, 0)
STRIP_BINS = 360
# Attention of a single token that is painted in full colour, what is told when pointed at, what is too little to paint.
STRONG, TOLD, WEAK = 0.05, 0.002, 0.0005
CELL = 11
SHADES = 24


@dataclass(frozen=True)
class Place:
    """A decoding query: its layer and query head from 0, its decoding step from 1."""

    layer: int
    head: int
    step: int


@dataclass(frozen=True, eq=False)
class Look:
    """What one policy leaves of one query's attention.

    Attributes:
        result: the replay.
        place: the query.
    """

    result: Replay
    place: Place

    @property
    def trace(self) -> Trace:
        return self.result.trace

    @cached_property
    def weights(self) -> Tensor:
        """Attention with the full cache over every key that the query may see, `[prompt + step]`."""
        return reference(self.trace).at(self.place.step)[self.place.layer, self.place.head]

    def _mask(self, sets: Tensor) -> Tensor:
        """Of the query head's set, bool `[prompt + step]`."""
        mine = sets[self.place.head * len(sets) // self.trace.heads]
        mask = torch.zeros(len(self.weights), dtype=torch.bool)
        mask[mine[(mine >= 0) & (mine < len(mask))]] = True
        return mask

    @cached_property
    def read(self) -> Tensor:
        """Which keys the query reads, bool `[prompt + step]`."""
        return self._mask(self.result.kept(self.place.layer, self.place.step))

    @cached_property
    def stored(self) -> Tensor:
        """Which keys are stored when the query comes, its own included, read or not, bool `[prompt + step]`."""
        held = self._mask(self.result.stored(self.place.layer, self.place.step - 1))
        held[-1] = True
        return held | self.read

    @cached_property
    def lost(self) -> Tensor:
        """Attention on keys that the query cannot read, `[prompt + step]`."""
        return self.weights.masked_fill(self.read, 0)

    @property
    def mass_lost(self) -> float:
        return float(self.result.mass_lost[self.place.layer, self.place.head, self.place.step - 1])


def side(look: Look, tokens: Sequence[str]) -> str:
    """The panel of one policy: its numbers, the query's attention over the positions, the text, and the whole model."""
    result = look.result
    facts = [
        ("lost by this query", f"{look.mass_lost:.1%}"),
        ("keys read", f"{int(look.read.sum()):,} of {len(look.weights):,}"),
        ("lost, whole model", f"{float(result.mass_lost.mean()):.1%}"),
        ("recall, whole model", f"{float(result.recall.mean()):.0%}"),
    ]
    cells = "".join(
        f'<div style="margin-right:14px"><div style="font-size:11px;color:#566173">{name}</div>'
        f'<div style="font-size:15px;font-weight:600">{value}</div></div>'
        for name, value in facts
    )
    budget = getattr(result.policy, "budget", None)
    title = result.policy.name + ("" if budget is None else f", budget {budget}")
    return (
        f'<section style="flex:1 1 420px;min-width:0"><h3 style="margin:4px 0 6px;font-size:15px">{escape(title)}</h3>'
        f'<div style="display:flex;flex-wrap:wrap;margin-bottom:6px">{cells}</div>{strip(look)}'
        f'{text(look, tokens)}<div style="display:flex;flex-wrap:wrap;gap:16px;margin-top:6px">{maps(look)}'
        f"{worst(look, tokens)}</div></section>"
    )


def page(looks: Sequence[Look], tokens: Sequence[str]) -> str:
    """The panels of several policies for the same query, side by side, under one legend."""
    place = looks[0].place
    position = looks[0].trace.prompt_length + place.step - 1
    about = escape(tokens[position].strip() or repr(tokens[position])) if position < len(tokens) else ""
    head = (
        f"layer {place.layer}, query head {place.head}, decoding step {place.step}"
        + (f": the query of <b>{about}</b> at position {position:,}" if about else "")
    )
    return (
        '<div class="kvlab-picture" style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;'
        'color:#1c2430;background:#fff;padding:8px">'
        f'<div style="margin-bottom:4px">{head}</div>{_legend()}'
        f'<div style="display:flex;flex-wrap:wrap;gap:22px">{"".join(side(look, tokens) for look in looks)}</div></div>'
    )


def _legend() -> str:
    samples = [
        (_style(READ, 0), "read by this query"),
        (_style(STORED, 0), "stored, not read"),
        (_style(GONE, 0), "evicted"),
        (_style(GONE, STRONG), f"attention lost here ({STRONG:.0%} or more in full colour)"),
    ]
    return '<div style="font-size:12px;margin-bottom:6px">' + "".join(
        f'<span style="margin-right:14px"><span style="{style};padding:0 4px">text</span> {name}</span>'
        for style, name in samples
    ) + "</div>"


def _style(state: str, lost: float) -> str:
    if lost >= WEAK:
        # In steps, so that neighbours share a span.
        strength = round(20 * (0.1 + 0.9 * min(1.0, lost / STRONG) ** 0.5)) / 20
        ink = "#fff" if strength > 0.75 else "#1c2430"
        return f"background:rgba{(*RED, strength)};color:{ink}"
    return {
        READ: "background:#cfe6f5",
        STORED: "background:#eef1f4;color:#566173",
        GONE: "color:#8a94a2",
    }[state]


def text(look: Look, tokens: Sequence[str], height: int = 260) -> str:
    """The prompt and the response up to the query, each token as the policy left it; neighbours of one look share a
    span, and a token that attention was lost on says how much when pointed at."""
    lost, read, stored = look.lost.tolist(), look.read.tolist(), look.stored.tolist()
    spans: list[tuple[str, str, list[str]]] = []
    for position in range(min(len(lost), len(tokens))):
        state = READ if read[position] else STORED if stored[position] else GONE
        style = _style(state, lost[position])
        title = f"position {position}: {lost[position]:.2%} of the attention, {state}" if lost[position] >= TOLD else ""
        if spans and spans[-1][:2] == (style, title):
            spans[-1][2].append(tokens[position])
        else:
            spans.append((style, title, [tokens[position]]))
    body = "".join(
        f'<span style="{style}"' + (f' title="{title}"' if title else "") + f">{escape(''.join(parts))}</span>"
        for style, title, parts in spans
    )
    return (
        f'<div class="kvlab-text" style="max-height:{height}px;overflow:auto;white-space:pre-wrap;'
        f'overflow-wrap:anywhere;border:1px solid #d6dbe1;padding:6px;font-size:12px;margin-top:6px">{body}</div>'
    )


def worst(look: Look, tokens: Sequence[str], rows: int = 8, around: int = 3) -> str:
    """The tokens that the most attention was lost on, each within its neighbours."""
    best = look.lost.topk(min(rows, len(look.lost)))
    lines = []
    for share, position in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        if share < WEAK or position >= len(tokens):
            continue
        before, after = tokens[max(0, position - around) : position], tokens[position + 1 : position + around + 1]
        parts = (escape("".join(part).replace("\n", " ")) for part in (before, tokens[position : position + 1], after))
        within = '{}<b style="color:rgb(213,94,0)">{}</b>{}'.format(*parts)
        lines.append(
            f'<tr><td style="text-align:right">{share:.1%}</td><td style="text-align:right">{position:,}</td>'
            f'<td style="text-align:left">{within}</td></tr>'
        )
    if not lines:
        return '<div style="font-size:12px;color:#566173">nothing worth showing was lost</div>'
    return (
        '<div style="font-size:12px;flex:1 1 200px;min-width:0">lost most<br>'
        '<span style="color:#566173">attention, position, and where</span>'
        '<table class="kvlab-worst" style="font-size:12px;border-spacing:6px 1px;margin:0">'
        f"{''.join(lines)}</table></div>"
    )


def strip(look: Look, height: int = 64) -> str:
    """The query's attention over the positions, on a square-root scale: blue what is read, vermilion what is lost."""
    n = len(look.weights)
    bins = min(STRIP_BINS, n)
    which = (torch.arange(n) * bins // n).clamp_max(bins - 1)
    parts = look.weights - look.lost, look.lost
    kept, lost = (torch.zeros(bins).index_add_(0, which, part.float()) for part in parts)
    highest = max(float((kept + lost).max()), 1e-9)
    blue_bars, red_bars = [], []
    for place, (blue, red) in enumerate(zip(kept.tolist(), lost.tolist(), strict=True)):
        whole = ((blue + red) / highest) ** 0.5 * height
        if whole >= 0.5:
            share = red / (blue + red)
            blue_bars.append(_box(place, height - whole * (1 - share), 1, whole * (1 - share)))
            red_bars.append(_box(place, height - whole, 1, whole * share))
    bars = [f'<path d="{"".join(some)}" fill="rgb{colour}"/>' for some, colour in ((blue_bars, BLUE), (red_bars, RED))]
    end = look.trace.prompt_length * bins / n
    bars.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="0" y2="{height}" stroke="#566173" stroke-dasharray="3 3"/>')
    bars.append(f'<path d="{_box(0, height - 1, bins, 1)}" fill="#566173"/>')
    return (
        f'{_image("strip", "attention over positions", "".join(bars), (bins, height), "100%")}'
        '<div style="display:flex;justify-content:space-between;gap:8px;font-size:11px;color:#566173">'
        '<span style="white-space:nowrap">position 0</span>'
        f'<span style="text-align:center">attention (root scale, highest bin {highest:.1%}); dashed: end of prompt'
        f"</span><span>{n - 1:,}</span></div>"
    )


def _image(name: str, about: str, drawing: str, size: tuple[float, int], width: str) -> str:
    """A drawing of SVG elements as an image; size: of the drawing, width: on the page."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]}" preserveAspectRatio="none" '
        f'font-family="sans-serif">{drawing}</svg>'
    )
    return (
        f'<img class="kvlab-{name}" alt="{about}" width="{width}" height="{size[1]}" '
        f'style="display:block;margin:0;height:{size[1]}px" '
        f'src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'
    )


def _box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as a part of a path; nothing where it would not be seen."""
    if round(height, 1) == 0:
        return ""
    x, y, width, height = (f"{round(value, 1):g}" for value in (x, y, width, height))
    return f"M{x} {y}h{width}v{height}h-{width}z"


def maps(look: Look) -> str:
    """The whole model at this step: attention lost by every query head, and recall of every KV head."""
    result, place = look.result, look.place
    group = place.head * result.trace.kv_heads // result.trace.heads
    lost, recall = result.mass_lost[:, :, place.step - 1], result.recall
    title = f"attention lost at step {place.step}"
    of_lost, of_recall = f"{lost.mean():.1%}, layers by query heads", f"{recall.mean():.0%}, layers by KV heads"
    # The root brings out small losses; a recall is read as it is.
    return _map(lost.sqrt(), (place.layer, place.head), RED, title, f"mean {of_lost}") + _map(
        recall, (place.layer, group), BLUE, "recall of the gold top-k", f"mean {of_recall}"
    )


def _shade(colour: tuple[int, int, int], shade: int) -> str:
    return "#" + "".join(f"{round(255 + (c - 255) * shade / SHADES):02x}" for c in colour)


def _map(values: Tensor, chosen: tuple[int, int], colour: tuple[int, int, int], title: str, about: str) -> str:
    layer, column = chosen
    layers, columns = values.shape
    # Wide models get narrower cells rather than a wider page.
    width = max(3.0, min(CELL * 1.4, 240 / columns))
    # One path for each of a few shades keeps the picture small.
    boxes: dict[int, list[str]] = {}
    for y, row in enumerate((values.nan_to_num(0).clamp(0, 1) * SHADES).round().int().tolist()):
        for x, shade in enumerate(row):
            boxes.setdefault(shade, []).append(_box(18 + x * width, y * CELL, width, CELL))
    cells = [f'<path d="{"".join(some)}" fill="{_shade(colour, shade)}"/>' for shade, some in boxes.items()]
    here = _box(18 + column * width, layer * CELL, width, CELL)
    mark = f'<path id="chosen" d="{here}" fill="none" stroke="#000" stroke-width="1.8"/>'
    ticks = "".join(
        f'<text x="15" y="{y * CELL + 9}" font-size="8" text-anchor="end" fill="#566173">{y}</text>'
        for y in range(0, layers, max(1, layers // 10))
    )
    wide, tall = 20 + columns * width, layers * CELL + 2
    return (
        f'<figure style="margin:0"><figcaption style="font-size:12px;max-width:165px">{title}<br>'
        f'<span style="color:#566173">{about}</span></figcaption>'
        f'{_image("map", title, ticks + "".join(cells) + mark, (wide, tall), f"{wide:.0f}")}</figure>'
    )
