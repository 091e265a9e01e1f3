"""What the tests of the explorer share: its numbers worked out by hand, and its pages read again."""

from __future__ import annotations

import html as markup
import re
from html.parser import HTMLParser

import numpy as np

from kvlab.render.explorer.query_view import Spot
from support import oracles
from support.replaying import HEADS, KV_HEADS, LAYERS, PROMPT, STEPS, tensors
from support.tensors import exact

PLACE = Spot(layer=1, head=4, step=7)


def attention_by_hand(layer, head, step):
    """Weights of one decoding query over all keys that it may see, from the tensors alone."""
    queries, keys = exact(*tensors()[:2])
    seen = PROMPT + step
    return oracles.attention_weights(queries[layer, head, seen - 1], keys[layer, head * KV_HEADS // HEADS, :seen])


def concentrated_by_hand(result):
    """m / sqrt(m^2 / sum w^2) of every query, from the tensors alone, with plain loops."""
    found = np.zeros((LAYERS, HEADS, STEPS))
    for layer, head, step in np.ndindex(found.shape):
        kept = result.kept(layer, step + 1)
        own = set(kept[head * len(kept) // HEADS].tolist())
        lost, squares = 0.0, 0.0
        for position, weight in enumerate(attention_by_hand(layer, head, step + 1)):
            if position not in own:
                lost += weight
                squares += weight * weight
        tokens = lost * lost / squares if squares else 1
        found[layer, head, step] = lost / tokens**0.5
    return found


class Pieces(HTMLParser):
    """The (element, style, text) of each piece of text, in order; nothing for what stands outside of one."""

    def __init__(self, html):
        super().__init__()
        self.found, self._open = [], [("", "")]
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        inside = ("", "") if tag == "div" else (tag, dict(attributes).get("style", ""))
        self._open.append(inside)

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        self.found.append((*self._open[-1], data))


def numbers_in(found):
    """The positions in the texts of pieces, whose tokens are <0>, <1>, ..."""
    return {int(position) for piece in found for position in re.findall(r"<(\d+)>", piece[-1])}


def words(html):
    """What a reader sees of HTML, without the drawings."""
    return markup.unescape(re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]*>", "", html))


def channels(style):
    """The red, green and blue of a style's background."""
    found = re.search("background:#([0-9a-f]+)", style).group(1)
    return [int(part * (2 // len(part)), 16) for part in re.findall("." * (len(found) // 3), found)]


def shown_by(explorer):
    """The HTML of the widgets' picture."""
    return "".join(part.value for part in explorer._parts.values())
