"""One decoding query of a replay as a picture in HTML: which tokens it could read, and where its attention was lost.

Plain strings, made in milliseconds, so that a slider can redraw them. There are two ways to write them down: `STATIC`
needs no style sheet and no script and draws within images, since a code host takes out everything else; `LIVE` names
the classes of one style sheet and draws in place, which is a third of the size.
"""

from __future__ import annotations

import math
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.replays.reference import reference
from kvlab.replays.run import Replay

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace

READ, STORED, GONE = "read", "stored, not read", "evicted or merged"
# Okabe and Ito's palette, as in the figures: what is read is blue, what is lost vermilion.
BLUE, RED, INK, FAINT = (0, 114, 178), (213, 94, 0), "#1c2430", "#566173"
# Of tokens that the query cannot read, and of those that it lost the most on.
DIM, LOUD = "#525b67", "#a84a00"
STRIP_BINS = 360
# Attention of a single token that is painted in full colour, what is told when pointed at, what is too little to paint.
STRONG, TOLD, WEAK = 0.05, 0.002, 0.0005
LEVELS = 8
CELL, SHADES = 11, 16
MARGIN = 18  # left of a map, for the numbers of its layers
TEXT_HEIGHT = 320
# What of a long text is open from the first: so many of the tokens that lost the most, with so many on each side, if
# they lost at least this share of what the first of them did; so all of it fits into the text's height.
PASSAGES, AROUND, WORTH = 4, 12, 0.1
SHORT = 300  # tokens; a text of so many is open as a whole, and a piece below a tenth of it is not worth folding


# ---------------------------------------------------------------------- how it is written down


def _shade(colour: tuple[int, int, int], share: float) -> str:
    """The colour over white, as in `#rrggbb`."""
    return "#" + "".join(f"{round(255 + (c - 255) * share):02x}" for c in colour)


# What a token looks like -> the element that it stands in, and its style. Where a host takes styles out, the elements
# still tell: what is read is marked, and what much was lost of is underlined. What there are many of is kept short.
_WEAKEST = {1: "#fdc", 2: "#fca"}
_LOOKS: dict[str | int, tuple[str, str]] = {
    READ: ("mark", "background:#bdf;color:#000"),
    STORED: ("span", "background:#e8ecf0"),
    **{level: ("span", f"background:{colour}") for level, colour in _WEAKEST.items()},
    **{
        level: ("ins", f"background:{_shade(RED, 0.1 + 0.9 * level / LEVELS)};color:#000;text-decoration:underline")
        for level in range(len(_WEAKEST) + 1, LEVELS + 1)
    },
}
_FOLD = "border-left:3px solid #d6dbe1;padding-left:6px;margin:2px 0"
_FOLDED = f"cursor:pointer;font-size:11px;color:{FAINT}"
_CLASSES = {look: f"k{number}" for number, look in enumerate(_LOOKS)}
_PAGE = f"font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;color:{INK};background:#fff;padding:8px"
_SIDES, _SIDE = "display:flex;flex-wrap:wrap;gap:22px", "flex:1 1 420px;min-width:0"
_BELOW = "display:flex;flex-wrap:wrap;gap:14px;margin-top:6px"
_TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #d6dbe1;padding:6px;font-size:12px;"
    f"color:{DIM};max-height:{TEXT_HEIGHT}px;overflow:auto"
)

# The style sheet of LIVE; JupyterLab's own margins and heights of widgets give way within the picture.
SHEET = (
    "<style>"
    f".kvlab-picture{{{_PAGE};border-radius:4px}}.kvlab-sides{{{_SIDES}}}.kvlab-side{{{_SIDE}}}"
    ".kvlab-picture,.kvlab-sides,.kvlab-side{overflow:visible}"
    ".kvlab-picture .widget-html{margin:0;width:auto;height:auto;min-width:0}"
    f".kvlab-picture .widget-html-content{{line-height:1.45;font-size:13px;min-width:0;color:{INK}}}"
    f".kvlab-scroll{{{_TEXT}}}.kvlab-scroll .widget-html-content{{font-size:12px;color:{DIM}}}"
    f".kvlab-text details{{{_FOLD}}}.kvlab-text summary{{{_FOLDED}}}"
    ".kvlab-text :target{outline:2px solid #000}.kvlab-text [id]{scroll-margin:110px}"
    + "".join(f".{_CLASSES[look]}{{{style}}}" for look, (_, style) in _LOOKS.items())
    + "</style>"
)


@dataclass(frozen=True)
class Medium:
    """How looks and drawings are written down.

    Attributes:
        looks: what a token looks like -> the tag that opens it.
        fold: attributes of a piece of text that is folded away, and of the line that stands for it.
        drawing: (name, about, SVG elements, (width, height), width on the page) -> HTML.
    """

    looks: Mapping[str | int, str]
    fold: tuple[str, str]
    drawing: Callable[[str, str, str, tuple[float, float], str], str]


def _svg(attributes: str, drawing: str, size: tuple[float, float]) -> str:
    return (
        f'<svg {attributes} viewBox="0 0 {size[0]:g} {size[1]:g}" preserveAspectRatio="none" '
        f'font-family="sans-serif" font-size="8" fill="{FAINT}">{drawing}</svg>'
    )


def _as_image(name: str, about: str, drawing: str, size: tuple[float, float], width: str) -> str:
    svg = _svg('xmlns="http://www.w3.org/2000/svg"', drawing, size)
    return (
        f'<img class="kvlab-{name}" alt="{escape(about)}" width="{width}" height="{size[1]:g}" '
        f'style="display:block;margin:0;height:{size[1]:g}px" '
        f'src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'
    )


def _in_place(name: str, about: str, drawing: str, size: tuple[float, float], width: str) -> str:
    attributes = (
        f'class="kvlab-{name}" role="img" aria-label="{escape(about)}" width="{width}" '
        f'height="{size[1]:g}" style="display:block"'
    )
    return _svg(attributes, drawing, size)


STATIC = Medium(
    {look: f'<{tag} style="{style}">' for look, (tag, style) in _LOOKS.items()},
    (f' style="{_FOLD}"', f' style="{_FOLDED}"'),
    _as_image,
)
LIVE = Medium({look: f"<{tag} class={_CLASSES[look]}>" for look, (tag, _) in _LOOKS.items()}, ("", ""), _in_place)


# ---------------------------------------------------------------------- what is shown


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
        name: what the policy is called; by default its own name.
    """

    result: Replay
    place: Place
    name: str = ""

    @property
    def trace(self) -> Trace:
        return self.result.trace

    @property
    def title(self) -> str:
        name = self.name or self.result.policy.name
        return f"{name}, budget {self.result.budget:,}" if hasattr(self.result.policy, "budget") else name

    @cached_property
    def weights(self) -> Tensor:
        """Attention with the full cache over every key that the query may see, `[prompt + step]`."""
        return reference(self.trace).at(self.place.step)[self.place.layer, self.place.head].cpu()

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
    def spread(self) -> float:
        """On how many tokens, effectively, attention is lost (see `measures.concentrated_loss`)."""
        lost = self.lost.double()
        return float(lost.sum() ** 2 / lost.square().sum().clamp_min(1e-300))

    @property
    def mass_lost(self) -> float:
        return float(self.result.mass_lost[self.place.layer, self.place.head, self.place.step - 1])


def page(looks: Sequence[Look], tokens: Sequence[str], mark: str = "kvlab") -> str:
    """The panels of several policies for the same query, side by side, under one legend; needs nothing else.

    mark: begins the ids of this page's tokens, which must differ between pages of one document.
    """
    opened = passages(looks, len(tokens))
    sides = "".join(
        f'<section style="{_SIDE}">{top(look, STATIC)}'
        f'<div style="{_TEXT}">{text(look, tokens, STATIC, f"{mark}{n}", opened)}</div>'
        f"{below(look, tokens, STATIC, f'{mark}{n}')}</section>"
        for n, look in enumerate(looks)
    )
    return (
        f'<div class="kvlab-picture" style="{_PAGE}">{where(looks[0], tokens)}{legend(STATIC)}'
        f'<div style="{_SIDES}">{sides}</div></div>'
    )


def where(look: Look, tokens: Sequence[str]) -> str:
    """The query that is shown, in words, and the trace that it belongs to."""
    place, position = look.place, look.trace.prompt_length + look.place.step - 1
    about, said = "", ""
    if position < len(tokens):
        about = f"the query of <b>{escape(shown(tokens, position))}</b> at "
        before, after = tokens[max(0, position - AROUND) : position], tokens[position + 1 : position + 5]
        said = (
            f" in <i>… {_inline(before)}<b>{_inline(tokens[position : position + 1])}</b>"
            f'<span style="color:{FAINT}">{_inline(after)}</span> …</i>'
        )
    return (
        f"<div>layer {place.layer}, query head {place.head}, decoding step {place.step}: {about}position "
        f'{position:,}{said}</div><div style="font-size:11px;color:{FAINT};overflow-wrap:anywhere">'
        f"{escape(look.trace.signature)}</div>"
    )


def legend(medium: Medium) -> str:
    samples = [
        (_opened(READ, medium), "read by this query"),
        (_opened(STORED, medium), "stored, not read"),
        (("", ""), GONE),
        (_opened(2, medium), "some attention lost"),
        (_opened(LEVELS, medium), f"{STRONG:.0%} or more of it lost at this token"),
    ]
    return (
        f'<div style="font-size:12px;margin:4px 0 6px;color:{DIM}">'
        + "".join(
            f'<span style="margin-right:14px;white-space:nowrap">{tag}&nbsp;text&nbsp;{end} '
            f'<span style="color:{INK}">{name}</span></span> '
            for (tag, end), name in samples
        )
        + "</div>"
    )


def top(look: Look, medium: Medium) -> str:
    """A policy's name, its numbers, and the query's attention over the positions."""
    result, place = look.result, look.place
    error = float(result.output_error[place.layer, place.head, place.step - 1])
    facts = [
        ("lost by query", f"{look.mass_lost:.1%}", "share of its attention that lies on keys it cannot read"),
        (
            "on about",
            f"{look.spread:,.0f} token{'s' * (round(look.spread) != 1)}" if look.mass_lost >= WEAK else "-",
            "how many tokens the loss is spread over: equal losses on k tokens give k",
        ),
        ("output error", f"{error:.2f}", "how far this head's output moves, relative to its length"),
        ("keys read", f"{int(look.read.sum()):,} of {len(look.weights):,}", "by this query, of those before it"),
        ("model: lost", f"{float(result.mass_lost.mean()):.1%}", "mean over layers, heads and steps"),
        (
            "model: recall",
            f"{float(result.recall.mean()):.0%}",
            "share of the keys that the response needs most which are kept after the prefill",
        ),
    ]
    cells = "".join(
        f'<div style="margin-right:14px" title="{about}"><div style="font-size:11px;color:{FAINT}">{name}</div>'
        f'<div style="font-size:15px;font-weight:600">{value}</div></div>'
        for name, value, about in facts
    )
    return (
        f'<h3 style="margin:4px 0 6px;font-size:15px;color:{INK}">{escape(look.title)}</h3>'
        f'<div style="display:flex;flex-wrap:wrap;margin-bottom:6px">{cells}</div>{strip(look, medium)}'
    )


# ---------------------------------------------------------------------- the text


class _Visible(dict):
    """Code point -> what stands for it. Line breaks get a sign, since attention is lost on them too; what has no shape,
    or turns the direction of what follows, is named.
    """

    # Joiners and marks of direction that ordinary text of many scripts needs.
    HARMLESS = (0x200C, 0x200D, 0x200E, 0x200F)

    def __missing__(self, code: int) -> str:
        odd = unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in self.HARMLESS
        self[code] = f"⟨U+{code:04X}⟩" if odd else chr(code)
        return self[code]


_VISIBLE = _Visible({ord("\n"): "↵\n", ord("\t"): "⇥\t"})


def visible(text: str) -> str:
    """The text as HTML, every character of it to be seen."""
    return escape(text.translate(_VISIBLE))


def _inline(tokens: Iterable[str]) -> str:
    """Some text within a line, as HTML."""
    return escape("".join(tokens).translate(_VISIBLE).replace("\n", " "))


def shown(tokens: Sequence[str], position: int) -> str:
    """The token at a position, for a sentence: never empty."""
    start = position
    while start > 0 and not tokens[start]:
        start -= 1
    whole = tokens[start].strip() or repr(tokens[start])
    return whole if start == position else f"{whole} (part {position - start + 1})"


def _level(lost: float) -> int:
    """How strongly a token is painted, from 1 to LEVELS, on a square-root scale; 0: not at all."""
    return math.ceil(LEVELS * min(1.0, lost / STRONG) ** 0.5) if lost >= WEAK else 0


def _opened(look: str | int, medium: Medium) -> tuple[str, str]:
    """The tag that begins a look, and the one that ends it; nothing where a token looks like the text around it."""
    return (medium.looks[look], f"</{_LOOKS[look][0]}>") if look in _LOOKS else ("", "")


def passages(looks: Sequence[Look], count: int) -> list[range]:
    """The positions to show when the text is opened, in order: around the tokens that lost the most in any of the looks
    at one query; all of them where the text is short, or nothing was lost.

    count: of tokens that have a text.
    """
    lost = torch.stack([look.lost[:count] for look in looks]).amax(0)
    length = len(lost)
    best = lost.topk(min(PASSAGES, length))
    least = max(WEAK, WORTH * float(best.values[0])) if length else 0.0
    centres = sorted(p for share, p in zip(best.values.tolist(), best.indices.tolist(), strict=True) if share >= least)
    if length <= SHORT or not centres:
        return [range(length)]
    found: list[range] = []
    for centre in centres:
        start, stop = max(0, centre - AROUND), min(length, centre + AROUND + 1)
        start = 0 if start < SHORT / 10 else start
        if found and start - found[-1].stop < SHORT / 10:
            start = found.pop().start
        found.append(range(start, length if length - stop < SHORT / 10 else stop))
    return found


def text(
    look: Look,
    tokens: Sequence[str],
    medium: Medium = STATIC,
    mark: str = "kvlab",
    opened: Sequence[range] | None = None,
) -> str:
    """The prompt and the response up to the query, each token as the policy left it; what lies between the opened
    passages is folded away, with what was lost there.

    opened: of `passages`; by default those of this look alone.
    """
    length = min(len(look.lost), len(tokens))
    linked = set(_worst(look, len(tokens)))
    parts, at = [], 0
    for passage in [*(passages([look], len(tokens)) if opened is None else opened), range(length, length)]:
        if at < passage.start:
            gap = range(at, passage.start)
            lost = float(look.lost[at : passage.start].sum())
            parts.append(
                f"<details{medium.fold[0]}><summary{medium.fold[1]}>{len(gap):,} tokens, {lost:.1%} lost on "
                f"them</summary>{_painted(look, tokens, gap, linked, medium, mark)}</details>"
            )
        parts.append(_painted(look, tokens, passage, linked, medium, mark))
        at = passage.stop
    return f'<div class="kvlab-text">{"".join(parts)}</div>'


def _painted(look: Look, tokens: Sequence[str], span: range, linked: set[int], medium: Medium, mark: str) -> str:
    """Some of the text; neighbours that look the same share an element, and a token that attention was lost on says how
    much when pointed at.
    """
    lost, read, stored = (each[span.start : span.stop].tolist() for each in (look.lost, look.read, look.stored))
    runs: list[tuple[str | int, str, list[str]]] = []
    for position, share, is_read, is_stored in zip(span, lost, read, stored, strict=True):
        state = READ if is_read else STORED if is_stored else GONE
        kind = _level(share) or state
        extra = f' id="{mark}-{position}"' if position in linked else ""
        if share >= TOLD:
            extra += f' title="position {position}: {share:.2%} of the attention, {state}"'
        if not extra and runs and runs[-1][:2] == (kind, extra):
            runs[-1][2].append(tokens[position])
        else:
            runs.append((kind, extra, [tokens[position]]))
    parts = []
    for kind, extra, some in runs:
        tag, end = _opened(kind, medium)
        parts.append(f"{tag[:-1]}{extra}>{visible(''.join(some))}{end}" if tag else visible("".join(some)))
    return "".join(parts)


def _worst(look: Look, count: int, rows: int = 8) -> dict[int, float]:
    """Position -> attention lost there, the most first; only what is worth showing."""
    best = look.lost[:count].topk(min(rows, len(look.lost), count))
    return {
        position: share
        for share, position in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        if share >= WEAK
    }


def worst(look: Look, tokens: Sequence[str], mark: str = "kvlab", around: int = 2) -> str:
    """The tokens that the most attention was lost on, each within its neighbours and linked to its place."""
    lines = []
    for position, share in _worst(look, len(tokens)).items():
        before, after = tokens[max(0, position - around) : position], tokens[position + 1 : position + around + 1]
        left, token, right = map(_inline, (before, tokens[position] or shown(tokens, position), after))
        lines.append(
            f'<tr style="background:none"><td style="text-align:right">{share:.1%}</td><td style="text-align:right">'
            f'<a href="#{mark}-{position}" title="show it in the text" style="color:rgb{BLUE}">{position:,}</a></td>'
            f'<td style="text-align:left;overflow-wrap:anywhere">{left}<b style="color:{LOUD}">{token}</b>{right}</td>'
            "</tr>"
        )
    if not lines:
        return f'<div style="font-size:12px;color:{FAINT}">No token lost {WEAK:.2%} of the attention or more.</div>'
    heads = "".join(
        f'<th style="text-align:{side};font-weight:400;color:{FAINT}">{name}</th>'
        for side, name in (("right", "lost"), ("right", "position"), ("left", "token, in its place"))
    )
    return (
        '<div style="font-size:12px">tokens that lost the most'
        '<table class="kvlab-worst" style="font-size:12px;border-spacing:6px 1px;margin:0;'
        f'color:{INK}"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


# ---------------------------------------------------------------------- drawings


def _skyline(heights: Iterable[float], base: float) -> str:
    """The outline of bars one wide side by side, as a path; heights: in whole units above `base`."""
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
    """The query's attention over the positions, on a square-root scale: blue what is read, vermilion what is lost; and
    below it which keys are read, whether this query attends to them or not.
    """
    n = len(look.weights)
    bins = min(STRIP_BINS, n)
    which = (torch.arange(n) * bins // n).clamp_max(bins - 1)
    parts = look.weights - look.lost, look.lost, look.read, look.stored
    kept, lost, read, stored = (torch.zeros(bins).index_add_(0, which, part.float()) for part in parts)
    whole = kept + lost
    highest = max(float(whole.max()), 1e-9)
    bars = (whole / highest).sqrt() * height
    share = kept / whole.clamp_min(1e-30)
    size = torch.zeros(bins).index_add_(0, which, torch.ones(n))
    band = height + 2
    rug = [
        f'<path d="{_rows(some)}" transform="translate(0 {band + 2.5})" stroke="{colour}" stroke-width="5"/>'
        for some, colour in (
            ((stored > 0) & (read == 0), "#c3cad2"),
            (read > 0, _shade(BLUE, 0.45)),
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
    """A path along the true ones of a row of cells, each one wide."""
    path, start = [], None
    for x, there in enumerate([*cells.tolist(), False]):
        if there and start is None:
            start = x
        elif not there and start is not None:
            path.append(f"M{start} 0h{x - start}")
            start = None
    return "".join(path)


def below(look: Look, tokens: Sequence[str], medium: Medium, mark: str = "kvlab") -> str:
    """The whole model at this step, the steps of this head, and the tokens that lost the most."""
    return (
        f'<div style="{_BELOW}">{maps(look, medium)}<div style="flex:1 1 220px;min-width:0">{steps(look, medium)}'
        f"{worst(look, tokens, mark)}</div></div>"
    )


def steps(look: Look, medium: Medium = STATIC, height: int = 44) -> str:
    """Attention that this head loses at each decoding step, the chosen step framed."""
    place = look.place
    values = look.result.mass_lost[place.layer, place.head]
    n = len(values)
    width = max(1.0, min(14.0, 190 / n))
    here = _box((place.step - 1) * width, 1, width, height - 1)
    chosen = f'<path class="kvlab-chosen" d="{here}" fill="none" stroke="#000" stroke-width="1.5"/>'
    scaled = (values * (height - 2)).tolist()
    drawing = (
        f'<path d="{_skyline(scaled, height)}" transform="scale({width:.4g} 1)" fill="rgb{RED}"/>'
        f'<path d="M0 {height + 0.5}H{n * width:.4g}" stroke="{FAINT}"/>{chosen}'
        + "".join(
            f'<text x="{(step - 0.5) * width:.4g}" y="{height + 10}" text-anchor="middle">{step}</text>'
            for step in sorted({*(t for t in _ticks(n, 4) if t), 1})
        )
    )
    about = f"Attention lost by layer {place.layer}, head {place.head} at each of {n} steps, mean {values.mean():.1%}"
    return (
        f'<figure style="margin:0 0 6px"><figcaption style="font-size:12px">lost by this head at each step'
        f'<br><span style="color:{FAINT}">mean {values.mean():.1%}; top: 100%</span></figcaption>'
        f"{medium.drawing('steps', about, drawing, (n * width + 2, height + 12), f'{n * width + 2:.0f}')}</figure>"
    )


def maps(look: Look, medium: Medium = STATIC) -> str:
    """The whole model at this step: attention lost by every query head, and recall of every KV head."""
    result, place = look.result, look.place
    group = place.head * result.trace.kv_heads // result.trace.heads
    lost, recall = result.mass_lost[:, :, place.step - 1], result.recall
    # The root brings out small losses; a recall is read as it is.
    return _map(lost, (place.layer, place.head), RED, ("attention lost", "query head"), 0.5, medium) + _map(
        recall, (place.layer, group), BLUE, ("recall", "KV head"), 1.0, medium
    )


def _box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as a part of a path."""
    return f"M{x:.4g} {y:.4g}h{width:.4g}v{height:.4g}h-{width:.4g}z"


def _map(
    values: Tensor,
    chosen: tuple[int, int],
    colour: tuple[int, int, int],
    names: tuple[str, str],
    power: float,
    medium: Medium,
) -> str:
    """A heatmap of `[layers, columns]` with its axes, its scale, and the chosen cell framed.

    names: of the values and of the columns; power: values are raised to it before they are shaded.
    """
    layer, column = chosen
    layers, columns = values.shape
    # Wide models get narrower cells rather than a wider page.
    width = max(3.0, min(CELL * 1.4, 240 / columns))
    # One path for each of a few shades keeps the picture small; a row's neighbours of one shade share a piece of it.
    pieces: dict[int, list[str]] = {}
    for y, row in enumerate((values.nan_to_num(0).clamp(0, 1) ** power * SHADES).round().int().tolist()):
        start = 0
        for x in range(1, columns + 1):
            if x == columns or row[x] != row[start]:
                pieces.setdefault(row[start], []).append(f"M{start} {y}h{x - start}")
                start = x
    cells = "".join(
        f'<path d="{"".join(some)}" stroke="{_shade(colour, shade / SHADES)}"/>' for shade, some in pieces.items()
    )
    here = _box(MARGIN + column * width, layer * CELL, width, CELL)
    high, wide = layers * CELL, max(MARGIN + columns * width + 2, 78)
    marks = "".join(
        f'<text x="{MARGIN - 3}" y="{y * CELL + 9}" text-anchor="end">{y}</text>'
        for y in range(0, layers, max(1, layers // 10))
    )
    apart = math.ceil(9 / width)
    marks += "".join(
        f'<text x="{MARGIN + (x + 0.5) * width:.4g}" y="{high + 9}" text-anchor="middle">{x}</text>'
        for x in range(0, columns, next(m for m in (1, 2, 4, 8, 16, 32, 64, 128) if m >= apart))
    )
    marks += f'<text x="{MARGIN}" y="{high + 19}">{names[1]}</text>'
    scale = (
        "".join(
            f'<rect x="{MARGIN + n * 15}" y="{high + 25}" width="15" height="7" fill="{_shade(colour, share**power)}"/>'
            f'<text x="{MARGIN + n * 15 + 7.5}" y="{high + 40}" text-anchor="middle">{100 * share:.0f}</text>'
            for n, share in enumerate((0.0, 0.1, 0.4, 1.0) if power < 1 else (0.0, 0.3, 0.6, 1.0))
        )
        + f'<text x="{MARGIN - 3}" y="{high + 40}" text-anchor="end">%</text>'
    )
    drawing = (
        f'<g transform="translate({MARGIN} {CELL / 2}) scale({width:.4g} {CELL})">{cells}</g>'
        f'<path d="{_box(MARGIN, 0, columns * width, high)}" fill="none" stroke="#c3cad2" stroke-width="0.6"/>'
        f'<path class="kvlab-chosen" d="{here}" fill="none" stroke="#000" stroke-width="1.8"/>{marks}{scale}'
    )
    mean, value = values.mean(), values[layer, column]
    about = f"{names[0]}: {layers} layers by {columns} {names[1]}s, mean {mean:.1%}, here {value:.1%}"
    return (
        f'<figure style="margin:0"><figcaption style="font-size:12px;max-width:{wide:.0f}px">'
        f'{names[0]}<br><span style="color:{FAINT}">here {value:.0%}<br>mean {mean:.0%}</span></figcaption>'
        f'<div style="font-size:10px;color:{FAINT}">layer</div>'
        f"{medium.drawing('map', about, drawing, (wide, high + 42), f'{wide:.0f}')}</figure>"
    )
