"""How the picture is written as HTML: colours, the looks of tokens, and two media.

`STATIC` needs no style sheet and no script and draws in images, because a code host removes everything else. `LIVE`
uses the classes of one style sheet (`SHEET`) and draws in place, which takes a third of the size.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape

from kvlab.render import theme

READ, STORED, GONE = "read", "stored, not read", "evicted or merged"
# Okabe and Ito's palette, as in the figures: read attention is blue, lost attention vermilion.
BLUE, RED, INK, FAINT = (0, 114, 178), (213, 94, 0), theme.INK, theme.EDGE
LOST_MOST = "#a84a00"  # the tokens that the query lost the most on
DIM = "#525b67"  # tokens that the query cannot read
LEVELS = 8  # shades of attention that is lost on a token
HEIGHT = 320  # of the text, in pixels; a longer text is scrolled


def shade(colour: tuple[int, int, int], share: float) -> str:
    """The colour over white, as in `#rrggbb`."""
    return "#" + "".join(f"{round(255 + (c - 255) * share):02x}" for c in colour)


# The look of a token -> its HTML element and style. Some hosts remove all styles; there <mark> still shows what is
# read, and <ins> (underlined) where much was lost. Names are short because there are many elements.
_WEAKEST = {1: "#fdc", 2: "#fca"}
LOOKS: dict[str | int, tuple[str, str]] = {
    READ: ("mark", "background:#bdf;color:#000"),
    STORED: ("span", "background:#e8ecf0"),
    **{level: ("span", f"background:{colour}") for level, colour in _WEAKEST.items()},
    **{
        level: ("ins", f"background:{shade(RED, 0.1 + 0.9 * level / LEVELS)};color:#000;text-decoration:underline")
        for level in range(len(_WEAKEST) + 1, LEVELS + 1)
    },
}
_FOLD = "border-left:3px solid #d6dbe1;padding-left:6px;margin:2px 0"
_FOLDED = f"cursor:pointer;font-size:11px;color:{FAINT}"
_CLASSES = {look: f"k{number}" for number, look in enumerate(LOOKS)}
PAGE = f"font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;color:{INK};background:#fff;padding:8px"
SIDES, SIDE = "display:flex;flex-wrap:wrap;gap:22px", "flex:1 1 420px;min-width:0"
BELOW = "display:flex;flex-wrap:wrap;gap:14px;margin-top:6px"
TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #d6dbe1;padding:6px;font-size:12px;"
    f"color:{DIM};max-height:{HEIGHT}px;overflow:auto"
)

# The style sheet of LIVE; within the picture it replaces JupyterLab's own margins and heights of widgets.
SHEET = (
    "<style>"
    f".kvlab-picture{{{PAGE};border-radius:4px}}.kvlab-sides{{{SIDES}}}.kvlab-side{{{SIDE}}}"
    ".kvlab-picture,.kvlab-sides,.kvlab-side{overflow:visible}"
    ".kvlab-picture .widget-html{margin:0;width:auto;height:auto;min-width:0}"
    f".kvlab-picture .widget-html-content{{line-height:1.45;font-size:13px;min-width:0;color:{INK}}}"
    f".kvlab-scroll{{{TEXT}}}.kvlab-scroll .widget-html-content{{font-size:12px;color:{DIM}}}"
    f".kvlab-text details{{{_FOLD}}}.kvlab-text summary{{{_FOLDED}}}"
    ".kvlab-text :target{outline:2px solid #000}.kvlab-text [id]{scroll-margin:110px}"
    + "".join(f".{_CLASSES[look]}{{{style}}}" for look, (_, style) in LOOKS.items())
    + "</style>"
)


@dataclass(frozen=True)
class Medium:
    """How looks and drawings are written down.

    Attributes:
        looks: the look of a token -> the tag that opens it.
        fold: attributes of a folded piece of text, and of the line that is shown instead.
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
    {look: f'<{tag} style="{style}">' for look, (tag, style) in LOOKS.items()},
    (f' style="{_FOLD}"', f' style="{_FOLDED}"'),
    _as_image,
)
LIVE = Medium({look: f"<{tag} class={_CLASSES[look]}>" for look, (tag, _) in LOOKS.items()}, ("", ""), _in_place)
