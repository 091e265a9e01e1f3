"""One HTML file of a trace under two to four policies: it needs no kernel, no network and no other file.

Its pictures are SVG made by a hand-written script. Plotly's library alone would be larger than the page of a 2k trace,
and anywidget needs a kernel.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvlab.render import theme
from kvlab.render.explorer.token_html import WEAK, shown
from kvlab.replays.reference import reference
from kvlab.replays.replay import Replay
from kvlab.version import __version__

if TYPE_CHECKING:
    from kvlab.attribution.results import Attribution
    from kvlab.render.explorer.query_view import Look, Spot
    from kvlab.traces.trace import Trace

FLOOR = 0.00025
"""Attention below this share of a query is not drawn: 4 % of it in a prompt of 2,000 tokens, a third of the bytes."""
CELLS = 2**26
"""Attention weights in a page: a browser holds a byte for each. Of a longer response the first steps are taken."""
LEVELS = 255
FINE = 2**16 - 1
ERROR = 8.0
"""Output errors above it are shown as this."""


def html(
    trace: Trace,
    runs: Mapping[tuple[str, int], Replay],
    start: tuple[str, int, Spot],
    tokens: Sequence[str],
    effects: Attribution | None = None,
) -> str:
    """The page.

    Args:
        runs: replays of the trace by policy and budget; every policy has every budget.
        start: policy, budget and query that are shown first.
        tokens: the text of each token.
        effects: of one policy, to colour the tokens by.
    """
    names = list(dict.fromkeys(name for name, _ in runs))
    policy, budget, spot = start
    steps, store = steps_shown(trace), _Store()
    weights = torch.stack([reference(trace).weights(row)[:, :steps].cpu() for row in range(trace.n_layers)])
    about: dict[str, Any] = {
        "signature": f"{trace.signature}|kvlab {__version__}",
        "document": trace.document.split("@")[0],
        "model": str(trace.meta.get("model", "tensors")).split("@")[0],
        "tokens": list(tokens),
        "prompt": trace.prompt_length,
        "length": trace.length,
        "steps": steps,
        "allSteps": trace.steps,
        "layers": list(trace.layers),
        "heads": trace.heads,
        "kvHeads": trace.kv_heads,
        "policies": names,
        "budgets": list(dict.fromkeys(budget for _, budget in runs)),
        "start": {"policy": policy, "budget": budget, "layer": spot.layer, "head": spot.head, "step": spot.step},
        "floor": FLOOR,
        "largestError": ERROR,
        "attention": store.add(_rooted(weights)),
        "runs": {f"{name}@{budget}": _run(result, steps, store) for (name, budget), result in runs.items()},
        "effects": None if effects is None else _effects(effects, trace.length, store),
    }
    packed = base64.b64encode(gzip.compress(store.bytes(), 6, mtime=0)).decode()
    page = _part("page.html")
    for mark, content in {
        "TITLE": f"{about['document']}: {' and '.join(names)}".replace("&", "&amp;").replace("<", "&lt;"),
        "COLOURS": theme.screen(names),
        "STYLE": _part("page.css"),
        # No token may end the script element.
        "ABOUT": json.dumps(about, ensure_ascii=False).replace("<", "\\u003c"),
        "DATA": packed,
        "SCRIPT": _part("pictures.js") + _part("page.js"),
    }.items():
        page = page.replace(f"@@{mark}@@", content, 1)
    return page


def frame(html: str, height: int = 900) -> str:
    """The page within another, such as a notebook: it has a style and a script of its own there."""
    return f'<iframe srcdoc="{escape(html)}" style="width:100%;height:{height}px;border:0" title="explorer"></iframe>'


def finding(look: Look, tokens: Sequence[str]) -> str:
    """One sentence on the policy's loss at the query; the page begins with the same words."""
    spot, where = look.spot, int(look.lost.argmax())
    said = (
        f"At step {spot.step}, layer {spot.layer}, head {spot.head}, {look.name} lost {percent(look.mass_lost)} of the "
    )
    if look.mass_lost < WEAK or float(look.lost[where]) < WEAK:
        return f"{said}attention."
    share = min(1.0, float(look.lost[where]) / look.mass_lost)
    return f"{said}attention; {percent(share)} of that went to “{shown(tokens, where)}” (token {where:,})."


def percent(share: float) -> str:
    digits = 0 if share >= 0.0995 else 1 if share >= 0.00995 else 2
    return f"{100 * share:.{digits}f} %"


def steps_shown(trace: Trace) -> int:
    """How many of the response's steps a page has room for."""
    return max(1, min(trace.steps, CELLS // (trace.n_layers * trace.heads * trace.length)))


class _Store:
    """Arrays one behind the other; each is known by its place and its length in bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._end = 0

    def add(self, array: np.ndarray) -> list[int]:
        # A browser reads numbers of four bytes only from places that four divides.
        content = array.tobytes() + bytes(-array.nbytes % 4)
        self._parts.append(content)
        self._end += len(content)
        return [self._end - len(content), array.nbytes]

    def bytes(self) -> bytes:
        return b"".join(self._parts)


def _part(name: str) -> str:
    return files("kvlab.render.explorer").joinpath("templates", name).read_text(encoding="utf-8")


def _rooted(weights: Tensor) -> np.ndarray:
    """Shares as bytes on a root scale, 0 below FLOOR."""
    return (weights.sqrt() * LEVELS).round().masked_fill(weights < FLOOR, 0).to(torch.uint8).numpy()


def _fine(values: Tensor, top: float = 1.0) -> np.ndarray:
    """Values from 0 to `top` in two bytes each, the low one first."""
    return (values.nan_to_num(0).clamp(0, top) / top * FINE).round().cpu().numpy().astype("<u2")


def _run(result: Replay, steps: int, store: _Store) -> dict[str, Any]:
    """One policy at one budget: its retained sets and its losses."""
    read = _masks(result.trace, steps, result.kept)
    stored = _masks(result.trace, steps, lambda layer, step: result.stored(layer, step - 1))
    position = np.arange(steps) + result.trace.prompt_length
    stored[np.arange(steps), :, :, position] = True  # its own entry is there when a query comes
    stored |= read
    return {
        "sets": read.shape[2],
        "read": store.add(_changes(read)),
        "stored": None if np.array_equal(read, stored) else store.add(_changes(stored)),
        "lost": store.add(_fine(result.mass_lost[:, :, :steps])),
        "error": store.add(_fine(result.output_error[:, :, :steps], ERROR)),
        "concentrated": store.add(_fine(result.concentrated_loss[:, :, :steps])),
        "meanLost": round(float(result.mass_lost.mean()), 4),
        "recall": round(float(result.recall.mean()), 4),
    }


def _masks(trace: Trace, steps: int, sets: Callable[[int, int], Tensor]) -> np.ndarray:
    """Which entries each step has, bool `[steps, layers, sets, length]`."""
    first = sets(trace.layers[0], 1)
    mask = torch.zeros(steps, trace.n_layers, len(first), trace.length + 1, dtype=torch.bool)
    for step in range(steps):
        for row, layer in enumerate(trace.layers):
            positions = sets(layer, step + 1).cpu()
            mask[step, row].scatter_(-1, positions.masked_fill(positions < 0, trace.length), True)
    return mask[..., :-1].numpy()


def _changes(mask: np.ndarray) -> np.ndarray:
    """Bits of the first step, and of each further step those that change: nearly all are 0, which packs well."""
    bits = np.packbits(mask, axis=-1)
    bits[1:] ^= bits[:-1].copy()
    return bits


def _effects(why: Attribution, length: int, store: _Store) -> dict[str, Any]:
    """Nats by token, summed over layers and KV heads; none for the last, which no query of the response follows."""
    from kvlab.render.explorer.effects import token_effects

    of_tokens, _ = token_effects(why)
    nats = torch.zeros(length)
    nats[: len(of_tokens)] = of_tokens
    budget = getattr(why.policy, "budget", None)
    return {
        "policy": why.policy.name if budget is None else f"{why.policy.name}, budget {budget}",
        "nats": store.add(nats.numpy().astype("<f4")),
        "harm": float(nats.clamp_min(0).sum()),
    }
