"""A picture of the cost of evicted tokens to a response: the text coloured by effect, and the figures under it."""

from __future__ import annotations

import io
import math
from base64 import b64encode
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvlab.lib import extras
from kvlab.lib.files import replacing
from kvlab.render.explorer.html_medium import BLUE, DIM, FAINT, INK, LEVELS, PAGE, RED, TEXT, shade
from kvlab.render.explorer.token_html import inline, passages_of, shown, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvlab.attribution.results import Attribution

STRONG, WEAK = 0.05, 0.0005
"""Shares of the sum of all costs on one token: from the first on in full colour, below the second not painted."""
ROWS = 12  # of the table of the costliest tokens
HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>{title}</title>"
)


class Picture:
    """An attribution to look at: a notebook shows it, and `save` writes it as one page that needs nothing else."""

    def __init__(self, why: Attribution):
        self.why = why

    @cached_property
    def _figure(self) -> Figure:
        import matplotlib.pyplot as plt

        from kvlab.render.figures import attribution

        figure = attribution.attribution(self.why)
        plt.close(figure)
        return figure

    def figure(self, form: Literal["svg", "png"]) -> bytes:
        """The map of layers and heads and the curve of restoring, drawn once, as a file's content."""
        extras.need("matplotlib")
        import matplotlib.pyplot as plt

        from kvlab.render.figures import plots

        drawn = io.BytesIO()
        with plt.rc_context():
            plots.style()
            self._figure.savefig(drawn, format=form, metadata={"Date": None} if form == "svg" else None)
        return drawn.getvalue()

    def html(self) -> str:
        """The text with the effects, the costliest tokens, and the figures."""
        why = self.why
        return (
            f'<div class="kvlab-picture" style="{PAGE}">{_numbers(why)}{_legend(why)}'
            f'<div style="{TEXT}">{_text(why)}</div>{_response(why)}{_costliest(why)}{self._image()}</div>'
        )

    _repr_html_ = html

    def _image(self) -> str:
        source = b64encode(self.figure("svg")).decode()
        about = "effects by layer and KV head, and the loss regained by entries that are put back"
        return f'<img alt="{about}" style="max-width:100%;margin-top:8px" src="data:image/svg+xml;base64,{source}">'

    def save(self, path: str | Path) -> Path:
        """Write the picture as one HTML page, under its name only once it is whole."""
        path, title = Path(path), f"{self.why.name} on {self.why.document}"
        with replacing(path) as part:
            part.write_text(f"{HEAD.format(title=escape(title))}<body>{self.html()}</body></html>", encoding="utf-8")
        return path


def token_effects(why: Attribution) -> tuple[Tensor, Tensor]:
    """Of each token, summed over layers and heads `[prompt + steps]`: effect of evictions and rounding in nats, and
    evicted entries.
    """
    return why.costs.sum((0, 1)), why.evicted.sum((0, 1))


def _numbers(why: Attribution) -> str:
    found = why.summary
    nats = "nats" if why.loss == "nll" else "nats of divergence"
    evicted = found["harmful"] + found["helpful"]
    rounding = (
        ""
        if why.storage.exact
        else f" Rounded keys cost {found['rounding_keys']:.2f}, rounded values {found['rounding_values']:.2f}."
    )
    return (
        f'<h3 style="margin:4px 0 6px;font-size:15px;color:{INK}">{escape(why.name)}</h3>'
        f"<div>The response loses {found['loss_full']:.2f} {nats} with the full cache and {found['loss_policy']:.2f} "
        f"with the policy. The effects of {found['evicted']:,.0f} evicted entries add up to {evicted:.2f}: "
        f"{found['harmful']:.2f} of harm and {found['helpful']:.2f} of help.{rounding}</div>"
        f'<div style="font-size:11px;color:{FAINT};overflow-wrap:anywhere">{escape(why.lm.signature)} · '
        f"{escape(why.document)}</div>"
    )


def _style(effect: float, harm: float) -> str:
    """The look of a token, empty where its effect is next to nothing."""
    share = abs(effect) / harm if harm else 0.0
    if share < WEAK:
        return ""
    strength = 0.1 + 0.9 * math.floor(LEVELS * min(1.0, share / STRONG) ** 0.5) / LEVELS
    underline = ";text-decoration:underline" if effect > 0 and strength > 0.4 else ""
    return f"background:{shade(RED if effect > 0 else BLUE, strength)};color:#000{underline}"


def _legend(why: Attribution) -> str:
    loss = "its loss" if why.storage.exact else "its loss or its rounding"
    samples = [
        (_style(0.2 * STRONG, 1), f"{loss} costs the response"),
        (
            _style(STRONG, 1),
            f"{STRONG:.0%} or more of {_harm(token_effects(why)[0]):.2f} nats, the sum of the tokens that cost",
        ),
        (_style(-0.4 * STRONG, 1), f"{loss} helps the response"),
        ("", "kept, or no effect"),
    ]
    return (
        f'<div style="font-size:12px;margin:4px 0 6px;color:{DIM}">'
        + "".join(
            f'<span style="margin-right:14px;white-space:nowrap"><span style="{style}">&nbsp;text&nbsp;</span> '
            f'<span style="color:{INK}">{name}</span></span> '
            for style, name in samples
        )
        + "</div>"
    )


def _harm(effects: Tensor) -> float:
    """The sum of the tokens' effects that are costs, in nats: the base of the colours.

    A token's entries are summed first, so it is less than `harmful`.
    """
    return float(effects.clamp_min(0).sum())


def _text(why: Attribution) -> str:
    """The prompt, each token coloured by its effect, then the response, each token by what the policy costs it."""
    effects, entries = token_effects(why)
    harm, prompt = _harm(effects), len(why.prompt)
    tokens = why.tokens
    shares = effects[:prompt].abs() / harm if harm else torch.zeros(prompt)
    parts, at = [], 0
    for passage in [*passages_of(shares), range(prompt, prompt)]:
        if at < passage.start:
            gap = range(at, passage.start)
            cost = float(effects[at : passage.start].sum())
            parts.append(
                f'<details><summary style="cursor:pointer;font-size:11px;color:{FAINT}">{len(gap):,} tokens, '
                f"{cost:+.2f} nats on them</summary>{_painted(effects, entries, tokens, gap, harm)}</details>"
            )
        parts.append(_painted(effects, entries, tokens, passage, harm))
        at = passage.stop
    return "".join(parts)


def _response(why: Attribution) -> str:
    costs = [0.0, *why.by_step.tolist()]
    worst = sum(cost for cost in costs if cost > 0)
    spans = []
    for place, (token, cost) in enumerate(zip(why.tokens[len(why.prompt) :], costs, strict=True)):
        about = f"token {place + 1} of the response: the policy costs it {cost:+.3g} nats"
        spans.append(f'<span title="{about}" style="{_style(cost, worst)}">{visible(token)}</span>')
    return (
        f'<div style="font-size:12px;margin-top:6px">the response, by what the policy costs each token</div>'
        f'<div style="{TEXT}">{"".join(spans)}</div>'
    )


def _painted(effects: Tensor, entries: Tensor, tokens: list[str], span: range, harm: float) -> str:
    parts: list[str] = []
    plain: list[str] = []
    for position in span:
        effect = float(effects[position])
        style = _style(effect, harm)
        if not style:
            plain.append(tokens[position])
            continue
        parts.append(visible("".join(plain)))
        plain = []
        title = f"position {position}: {effect:+.3g} nats, {int(entries[position])} entries evicted"
        parts.append(f'<span title="{title}" style="{style}">{visible(tokens[position])}</span>')
    return "".join([*parts, visible("".join(plain))])


def _costliest(why: Attribution, around: int = 3) -> str:
    """A table of the tokens whose loss costs the most, each among its neighbours."""
    table = why.by("token")
    table = table.loc[table.effect > 0].head(ROWS)
    if table.empty:
        return ""
    lines = []
    for row in table.to_dict(orient="records"):
        at = int(row["position"])
        before, after = why.tokens[max(0, at - around) : at], why.tokens[at + 1 : at + around + 1]
        left, token, right = map(inline, (before, why.tokens[at] or shown(why.tokens, at), after))
        numbers = (f"{row['effect']:.3g}", f"{row['attention']:.3g}", str(row["entries"]), f"{at:,}")
        cells = "".join(f'<td style="text-align:right">{number}</td>' for number in numbers)
        words = f'<td style="text-align:left;overflow-wrap:anywhere">{left}<b>{token}</b>{right}</td>'
        lines.append(f'<tr style="background:none">{cells}{words}</tr>')
    columns = {"effect (nats)": "right", "attention": "right", "entries": "right", "position": "right", "token": "left"}
    heads = "".join(
        f'<th style="text-align:{side};font-weight:400;color:{FAINT}">{name}</th>' for name, side in columns.items()
    )
    return (
        '<div style="font-size:12px;margin-top:6px">tokens whose loss costs the most'
        f'<table style="font-size:12px;border-spacing:6px 1px;margin:0;color:{INK}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
