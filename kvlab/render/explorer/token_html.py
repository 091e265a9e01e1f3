"""The tokens of a prompt as HTML: the text with the loss on each token, and the tokens that lost the most."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlab.render.explorer.html_medium import (
    BLUE,
    FAINT,
    GONE,
    INK,
    LEVELS,
    LOOKS,
    LOST_MOST,
    READ,
    STATIC,
    STORED,
    Medium,
)

if TYPE_CHECKING:
    from kvlab.render.explorer.query_view import Look

# Shares of the attention that was lost on one token. From STRONG on it has the full colour. From MODERATE on its number
# is shown under the mouse. Below WEAK it is not painted.
STRONG, MODERATE, WEAK = 0.05, 0.002, 0.0005
# In a long text at most PASSAGES passages are open at first, so all of them fit into the height. They have the tokens
# that lost the most, with CONTEXT_TOKENS tokens on each side. Each such token lost at least LEAST_SHARE of the largest
# loss.
PASSAGES, CONTEXT_TOKENS, LEAST_SHARE = 4, 12, 0.1
SHORT = 300  # tokens; a text this short is open as a whole, and a gap below a tenth of it is not folded


class _Visible(dict):
    """Code point -> the text shown for it.

    Line breaks get a sign, since attention is lost on them too. Characters without a shape are named. So are those that
    change the direction of the text.
    """

    # Joiners and marks of direction, which ordinary text of many scripts needs.
    HARMLESS = (0x200C, 0x200D, 0x200E, 0x200F)

    def __missing__(self, code: int) -> str:
        invisible = unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in self.HARMLESS
        self[code] = f"⟨U+{code:04X}⟩" if invisible else chr(code)
        return self[code]


_VISIBLE = _Visible({ord("\n"): "↵\n", ord("\t"): "⇥\t"})


def visible(text: str) -> str:
    """The text as HTML in which every character is visible."""
    return escape(text.translate(_VISIBLE))


def inline(tokens: Iterable[str]) -> str:
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


def tag_of(look: str | int, medium: Medium) -> tuple[str, str]:
    """The tags that begin and end a look; both empty where a token looks like the text around it."""
    return (medium.looks[look], f"</{LOOKS[look][0]}>") if look in LOOKS else ("", "")


def passages(looks: Sequence[Look], count: int) -> list[range]:
    """The spans of positions to show at first, in order, around the tokens that lost the most at one query.

    A token counts with its largest loss in any of the looks. If the text is short, or nothing was lost, one span has
    all positions.

    count: number of tokens that have a text.
    """
    return passages_of(torch.stack([look.lost[:count] for look in looks]).amax(0))


def passages_of(lost: Tensor) -> list[range]:
    """The same as `passages`, from the share lost on each token `[tokens]`."""
    length = len(lost)
    best = lost.topk(min(PASSAGES, length))
    least = max(WEAK, LEAST_SHARE * float(best.values[0])) if length else 0.0
    centres = sorted(p for share, p in zip(best.values.tolist(), best.indices.tolist(), strict=True) if share >= least)
    if length <= SHORT or not centres:
        return [range(length)]
    spans: list[range] = []
    for centre in centres:
        start, stop = max(0, centre - CONTEXT_TOKENS), min(length, centre + CONTEXT_TOKENS + 1)
        start = 0 if start < SHORT / 10 else start
        if spans and start - spans[-1].stop < SHORT / 10:
            start = spans.pop().start
        spans.append(range(start, length if length - stop < SHORT / 10 else stop))
    return spans


def text(
    look: Look,
    tokens: Sequence[str],
    medium: Medium = STATIC,
    mark: str = "kvlab",
    opened: Sequence[range] | None = None,
) -> str:
    """The prompt and the response up to the query as HTML, each token as the policy left it.

    Text between the opened passages is folded away; a line shows how much was lost on it.

    opened: from `passages`; by default those of this look alone.
    """
    length = min(len(look.lost), len(tokens))
    linked = set(lost_most(look, len(tokens)))
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
    """A span of the text as HTML.

    Neighbours with the same look share an element. A token with lost attention shows its share under the mouse.
    """
    lost, read, stored = (values[span.start : span.stop].tolist() for values in (look.lost, look.read, look.stored))
    runs: list[tuple[str | int, str, list[str]]] = []
    for position, share, is_read, is_stored in zip(span, lost, read, stored, strict=True):
        state = READ if is_read else STORED if is_stored else GONE
        kind = _level(share) or state
        extra = f' id="{mark}-{position}"' if position in linked else ""
        if share >= MODERATE:
            extra += f' title="position {position}: {share:.2%} of the attention, {state}"'
        if not extra and runs and runs[-1][:2] == (kind, extra):
            runs[-1][2].append(tokens[position])
        else:
            runs.append((kind, extra, [tokens[position]]))
    parts = []
    for kind, extra, group in runs:
        tag, end = tag_of(kind, medium)
        parts.append(f"{tag[:-1]}{extra}>{visible(''.join(group))}{end}" if tag else visible("".join(group)))
    return "".join(parts)


def lost_most(look: Look, count: int, rows: int = 8) -> dict[int, float]:
    """Position -> attention lost there, largest first; only losses that are worth showing."""
    best = look.lost[:count].topk(min(rows, len(look.lost), count))
    return {
        position: share
        for share, position in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        if share >= WEAK
    }


def worst(look: Look, tokens: Sequence[str], mark: str = "kvlab", context: int = 2) -> str:
    """The tokens on which the most attention was lost, each with its neighbours and a link to its place."""
    lines = []
    for position, share in lost_most(look, len(tokens)).items():
        before, after = tokens[max(0, position - context) : position], tokens[position + 1 : position + context + 1]
        left, token, right = map(inline, (before, tokens[position] or shown(tokens, position), after))
        lines.append(
            f'<tr style="background:none"><td style="text-align:right">{share:.1%}</td><td style="text-align:right">'
            f'<a href="#{mark}-{position}" title="show it in the text" style="color:rgb{BLUE}">{position:,}</a></td>'
            f'<td style="text-align:left;overflow-wrap:anywhere">{left}<b style="color:{LOST_MOST}">{token}</b>{right}'
            "</td></tr>"
        )
    if not lines:
        return f'<div style="font-size:12px;color:{FAINT}">No token lost {WEAK:.2%} of the attention or more.</div>'
    heads = "".join(
        f'<th style="text-align:{side};font-weight:400;color:{FAINT}">{name}</th>'
        for side, name in (("right", "lost"), ("right", "position"), ("left", "token in context"))
    )
    return (
        '<div style="font-size:12px">tokens that lost the most'
        '<table class="kvlab-worst" style="font-size:12px;border-spacing:6px 1px;margin:0;'
        f'color:{INK}"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )
