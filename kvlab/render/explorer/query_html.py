"""One decoding query of a replay as a picture in HTML: which tokens it could read, and where its attention was lost.

It is made of plain strings in milliseconds, so that a slider can redraw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from kvlab.render.explorer.drawings import maps, steps, strip
from kvlab.render.explorer.html_medium import (
    BELOW,
    DIM,
    FAINT,
    GONE,
    INK,
    LEVELS,
    PAGE,
    READ,
    SIDE,
    SIDES,
    STATIC,
    STORED,
    TEXT,
    Medium,
)
from kvlab.render.explorer.token_html import CONTEXT_TOKENS, STRONG, WEAK, inline, passages, shown, tag_of, text, worst

if TYPE_CHECKING:
    from kvlab.render.explorer.query_view import Look


def page(looks: Sequence[Look], tokens: Sequence[str], mark: str = "kvlab") -> str:
    """The panels of several policies for the same query, side by side under one legend; the HTML needs nothing else.

    mark: prefix of the ids of this page's tokens; it must differ between pages of one document.
    """
    opened = passages(looks, len(tokens))
    sides = "".join(
        f'<section style="{SIDE}">{top(look, STATIC)}'
        f'<div style="{TEXT}">{text(look, tokens, STATIC, f"{mark}{n}", opened)}</div>'
        f"{below(look, tokens, STATIC, f'{mark}{n}')}</section>"
        for n, look in enumerate(looks)
    )
    return (
        f'<div class="kvlab-picture" style="{PAGE}">{where(looks[0], tokens)}{legend(STATIC)}'
        f'<div style="{SIDES}">{sides}</div></div>'
    )


def where(look: Look, tokens: Sequence[str]) -> str:
    """The query that is shown, in words, and the trace that it belongs to."""
    spot, position = look.spot, look.trace.prompt_length + look.spot.step - 1
    about, location = "", ""
    if position < len(tokens):
        about = f"the query of <b>{escape(shown(tokens, position))}</b> at "
        before, after = tokens[max(0, position - CONTEXT_TOKENS) : position], tokens[position + 1 : position + 5]
        location = (
            f" in <i>… {inline(before)}<b>{inline(tokens[position : position + 1])}</b>"
            f'<span style="color:{FAINT}">{inline(after)}</span> …</i>'
        )
    return (
        f"<div>layer {spot.layer}, query head {spot.head}, decoding step {spot.step}: {about}position "
        f'{position:,}{location}</div><div style="font-size:11px;color:{FAINT};overflow-wrap:anywhere">'
        f"{escape(look.trace.signature)}</div>"
    )


def legend(medium: Medium) -> str:
    samples = [
        (tag_of(READ, medium), "read by this query"),
        (tag_of(STORED, medium), "stored, not read"),
        (("", ""), GONE),
        (tag_of(2, medium), "some attention lost"),
        (tag_of(LEVELS, medium), f"{STRONG:.0%} or more of it lost at this token"),
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
    result, spot = look.result, look.spot
    error = float(result.output_error[look.row, spot.head, spot.step - 1])
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


def below(look: Look, tokens: Sequence[str], medium: Medium, mark: str = "kvlab") -> str:
    """The whole model at this step, the steps of this head, and the tokens that lost the most."""
    return (
        f'<div style="{BELOW}">{maps(look, medium)}<div style="flex:1 1 220px;min-width:0">{steps(look, medium)}'
        f"{worst(look, tokens, mark)}</div></div>"
    )
