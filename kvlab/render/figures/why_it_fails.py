"""Figures of the evicted entries that cost a response: five papers' systems in colour, baselines in grey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from kvlab.analyses.findings import DOCUMENT, estimates
from kvlab.analyses.why_it_fails import lost_entries, token_kinds
from kvlab.render.figures import plots
from kvlab.render.figures.attribution import ORDERS
from kvlab.render.figures.many_policies import named_rows

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

LOOKS = {
    "morphkv": ("MorphKV", plots.COLOURS[0], "o"),
    "compilerkv": ("CompilerKV", plots.COLOURS[1], "s"),
    "rocketkv": ("RocketKV", plots.COLOURS[2], "D"),
    "zsmerge_unmerged": ("ZSMerge, no merging", plots.COLOURS[4], "P"),
    "dapq": ("DapQ", plots.COLOURS[3], "X"),
    "snapkv": ("SnapKV", plots.INK, "^"),
    "h2o": ("H2O", plots.EDGE, "v"),
    "streamingllm": ("StreamingLLM", "#8592a3", "<"),
    "random": ("random", "#b9c1cb", ">"),
}
"""How each policy is drawn: name, colour, marker."""
OTHER = plots.COLOURS[5], "h"
WIDE = 11, 4.6
LEAST = 10
"""Of a kind or a distance: fewer rows are not drawn."""


def concentration(curves: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """Left the share of the harm that the costliest entries carry; right how many carry 50 and 90 % of it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    curves = curves[curves.budget == budget]
    for name, part in curves.groupby("policy", sort=False):
        means = part.groupby("entries").by_effect.mean()
        label, tint, marker = look(str(name))
        left.plot(means.index, means, color=tint, marker=marker, markevery=8, label=label, linewidth=1.6)
    left.axhline(lost_entries.HALF_OF_IT, color=plots.PAPER, linewidth=1, linestyle=":")
    left.set_xscale("log")
    _percent(left.xaxis)
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.set(
        xlabel="evicted entries, the costliest first (% of all evicted)",
        ylabel="harm that they carry (%)",
        title=f"{_range(found, lost_entries.HALF, budget)} of the entries carry half of the harm",
    )
    left.legend(fontsize=8.5, loc="upper left")
    _note(left, f"{budget:g} entries a head; means over {_documents(curves)}", y=0.03, x=0.98, ha="right")
    names = _policies(curves)
    for effect, label, filled in ((lost_entries.HALF, "50 %", True), (lost_entries.MOST, "90 %", False)):
        frame = _at(found, effect, budget).set_index("policy")
        for y, name in enumerate(names):
            _dot(right, frame.loc[name], y, name, filled)
        right.plot(
            [],
            [],
            "o",
            color=plots.EDGE,
            markerfacecolor=plots.EDGE if filled else "white",
            label=f"{label} of the harm",
        )
    right.set_xscale("log")
    _percent(right.xaxis)
    _rows(right, names)
    right.set(xlabel="evicted entries that carry it (% of all evicted)", title="90 % of it takes many more entries")
    right.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.16))
    _note(right, "bars: 95 % intervals over documents", y=0.03, x=0.98, ha="right")
    return figure


def attention(curves: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """Left the harm that the first entries carry by effect and by attention; right what they regain once put back."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    curves = curves[curves.budget == budget]
    means = curves.groupby([DOCUMENT, "entries"], as_index=False)[["by_effect", "by_attention"]].mean()
    for order in ("effect", "attention"):
        label, tint, _ = ORDERS[order]
        band = estimates(means.groupby("entries")[f"by_{order}"], ["entries"])
        left.plot(band.entries, band.value, color=tint, label=f"ranked {label}")
        left.fill_between(band.entries, band.low, band.high, color=tint, alpha=0.18, linewidth=0)
    grid = np.sort(curves.entries.unique())
    left.plot(grid, grid, color=plots.PAPER, linestyle="--", label="at random")
    left.set_xscale("log")
    _percent(left.xaxis)
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.set(
        xlabel="evicted entries, the first in each order (% of all evicted)",
        ylabel="harm that they carry (%)",
        title=f"Attention finds {_range(found, lost_entries.FOUND, budget)} of the costly entries",
    )
    left.legend(loc="upper left")
    count = len(_policies(curves))
    _note(
        left,
        f"{budget:g} entries a head; mean over {count} policies;\nbands: 95 % over {_documents(curves)}",
        0.98,
        0.04,
        ha="right",
    )
    names = _policies(curves)
    frames = {
        order: _at(found, lost_entries.REGAINED, budget, order=order).set_index("policy")
        for order in ("effect", "attention")
    }
    cost = _at(found, lost_entries.COST, budget).set_index("policy")
    right.barh(
        range(len(names)),
        cost.loc[names, "value"],
        color="#e6e9ed",
        height=0.72,
        label="what the policy costs",
        zorder=1,
    )
    for order, frame in frames.items():
        label, tint, marker = ORDERS[order]
        shift = -0.16 if order == "effect" else 0.16
        rows = frame.loc[names]
        ys = [y + shift for y in range(len(names))]
        plots.points(right, rows, ys, rows=True, color=tint, fmt=marker, capsize=2, label=f"put back {label}", zorder=3)
    _rows(right, names)
    right.axvline(0, color=plots.EDGE, linewidth=1)
    right.set(xlabel="loss of the response regained (nats)", title="As many entries put back, measured")
    right.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.16), fontsize=9)
    return figure


def heads(parts: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """Left the harm by layer; right how much more of it retrieval heads hold than their entries' share."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE, width_ratios=[1.25, 1])
    layers = parts[(parts.budget == budget) & (parts.group == "layer")]
    layers = layers.assign(layer=layers.part.astype(int))
    names = _policies(layers)
    shares = layers.pivot_table(index="policy", columns="layer", values="harm").loc[names]
    plots.heatmap(
        100 * shares,
        xlabel=f"layer ({budget:g} entries a head; means over {_documents(layers)})",
        ylabel="",
        unit="share of the harm (%)",
        ax=left,
    )
    left.set_yticks(np.arange(len(names)) + 0.5, [look(name)[0] for name in names])
    first = shares.mean().sort_values(ascending=False)
    top = ", ".join(str(layer) for layer in sorted(first.index[:3]))
    left.set_title(f"Layers {top} hold {first.iloc[:3].sum():.0%} of the harm")
    left.tick_params(axis="x", rotation=0)
    lifts = _at(found, lost_entries.LIFT, budget, group="heads", part="retrieval")
    if lifts.empty:
        right.set_axis_off()
        _note(right, "DuoAttention's head scores come with kvlab\nfor no model of this shape", 0.5, 0.5, ha="center")
        return figure
    frame = lifts.set_index("policy")
    for y, name in enumerate(names):
        _dot(right, frame.loc[name], y, name)
    right.axvline(1, color=plots.INK, linewidth=1, linestyle="--")
    _rows(right, names)
    value = frame.loc[lost_entries.ALL, "value"]
    right.set(
        xlabel=f"share of the harm / share of the evicted entries,\nof the {lost_entries.RETRIEVAL:.0%} best heads",
        title=f"Retrieval heads hold {value:.1f} times their share",
    )
    _note(right, f"{budget:g} entries a head; bars: 95 % over {_documents(layers)}", 0.98, 0.03, ha="right")
    return figure


def tokens(parts: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """How much more of the harm each kind of token, and each distance, holds than its share of the evicted entries."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    kinds = [kind for kind in token_kinds.KINDS if kind != token_kinds.RESPONSE]
    distances = [lost_entries.FIRST, *reversed(lost_entries.bins())]
    for ax, group, labels, what in (
        (left, "kind", kinds, "{} cost {:.1f} times their share"),
        (right, "distance", distances, "{}: {:.1f} times the share"),
    ):
        frame = _at(found, lost_entries.LIFT, budget, group=group)
        shown = [label for label in labels if label in set(frame.part)]
        means = frame[frame.policy == lost_entries.ALL].set_index("part").loc[shown]
        order = means.value.sort_values(ascending=False).index.tolist() if group == "kind" else shown
        share = _share(parts, group, budget)
        for y, label in enumerate(order):
            rows = frame[(frame.part == label) & (frame.policy != lost_entries.ALL)]
            for name, value in zip(rows.policy, rows.value, strict=True):
                _, tint, marker = look(name)
                ax.plot(value, y + 0.24, marker=marker, color=tint, markersize=4, linestyle="", alpha=0.85)
            row = means.loc[label]
            ax.plot([row.low, row.high], [y, y], color=plots.INK, linewidth=2.4, alpha=0.5)
            ax.plot(row.value, y, "o", color=plots.INK, markersize=7)
        ax.axvline(1, color=plots.INK, linewidth=1, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        named_rows(ax, [f"{label}\n{share[label]:.1%} of entries" for label in order], [plots.INK] * len(order))
        top = means.value.idxmax()
        ax.set(
            xlabel="share of the harm / share of the evicted entries",
            title=what.format(PLURALS.get(top, top), means.value.max()),
        )
    left.set_xlabel(left.get_xlabel())
    right.set_ylabel("distance from the prompt's end (tokens)")
    names = _policies(parts)
    handles = [Line2D([], [], marker="o", color=plots.INK, label="mean, 95 % interval", linewidth=2)]
    handles += [Line2D([], [], marker=look(n)[2], color=look(n)[1], linestyle="", label=look(n)[0]) for n in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    _note(left, f"{budget:g} entries a head; {_documents(parts)}", 0.98, 0.02, ha="right")
    return figure


PLURALS = {
    token_kinds.NAME: "Names",
    token_kinds.NUMBER: "Numbers",
    token_kinds.WORD: "Other words",
    token_kinds.PUNCTUATION: "Commas and the like",
    token_kinds.SENTENCE_END: "Sentence ends",
    token_kinds.REQUEST: "Template and request",
}


def missed(keepers: pandas.DataFrame, found: Findings, budget: float, policy: str = "snapkv") -> Figure:
    """Left who keeps the entries whose loss costs each policy most; right the same of one policy, against chance."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE, width_ratios=[1.15, 1])
    rows = keepers[keepers.budget == budget]
    names = _policies(rows)
    policy = policy if policy in names else names[0]
    matrix = rows.pivot_table(index="policy", columns="keeper", values="kept").loc[names, names]
    labels = [look(name)[0] for name in names]
    plots.heatmap(
        100 * matrix,
        xlabel="policy that keeps them",
        ylabel="policy that they cost",
        unit="harm that is kept (%)",
        limits=(0, 100),
        ax=left,
    )
    left.set_xticks(np.arange(len(names)) + 0.5, labels, rotation=40, ha="right")
    left.set_yticks(np.arange(len(names)) + 0.5, labels)
    for (y, x), value in np.ndenumerate(matrix.to_numpy()):
        left.text(
            x + 0.5,
            y + 0.5,
            f"{100 * value:.0f}",
            ha="center",
            va="center",
            fontsize=8.5,
            color="white" if value < 0.6 else plots.INK,
        )
    left.set_title("Who keeps what costs another policy?")
    frame = _at(found, lost_entries.KEPT, budget, policy=policy).set_index("keeper")
    others = [name for name in names if name != policy]
    others.sort(key=lambda name: -frame.loc[name, "value"])
    chance = rows[rows.policy == policy].groupby("keeper").chance.mean()
    for y, name in enumerate(others):
        _dot(right, frame.loc[name], y, name)
        right.plot(chance[name], y, "|", color=plots.INK, markersize=13, markeredgewidth=1.6)
    _rows(right, others)
    right.xaxis.set_major_formatter(PercentFormatter(1))
    right.set_xlim(left=0)
    best, value = others[0], frame.loc[others[0], "value"]
    right.set(
        xlabel=f"harm to {look(policy)[0]} that the policy keeps (%)",
        title=f"{look(best)[0]} keeps {value:.0%} of what costs {look(policy)[0]}",
    )
    right.plot(
        [], [], "|", color=plots.INK, markersize=11, markeredgewidth=1.6, label="its share of all entries evicted there"
    )
    right.legend(loc="lower right", fontsize=9)
    _note(right, f"{budget:g} entries a head; bars: 95 % over {_documents(rows)}", 0.98, 0.16, ha="right")
    return figure


def look(policy: str) -> tuple[str, str, str]:
    """Name, colour and marker of a policy."""
    return LOOKS.get(policy, (policy, *OTHER))


def _at(found: Findings, effect: str, budget: float, **keys: Any) -> pandas.DataFrame:
    frame = found.frame(effect)
    for key, value in {"budget": budget, **keys}.items():
        frame = frame[frame[key] == value]
    return frame


def _policies(table: pandas.DataFrame) -> list[str]:
    return [str(name) for name in table["policy"].unique()]


def _documents(table: pandas.DataFrame) -> str:
    return f"{table[DOCUMENT].nunique()} documents"


def _share(parts: pandas.DataFrame, group: str, budget: float) -> pandas.Series:
    rows = parts[(parts.budget == budget) & (parts.group == group)]
    cases = len(rows.groupby([DOCUMENT, "policy"]))
    return rows.groupby("part").entries.sum() / cases


def _range(found: Findings, effect: str, budget: float) -> str:
    """The least and the largest mean over documents, of all policies: "0.2 to 0.9 %"."""
    values = 100 * _at(found, effect, budget)["value"]
    return f"{values.min():.2g} to {values.max():.2g} %"


def _dot(ax: Axes, row: pandas.Series, y: float, policy: str, filled: bool = True) -> None:
    _, tint, marker = look(policy)
    ax.plot([row.low, row.high], [y, y], color=tint, linewidth=2.2, alpha=0.55, solid_capstyle="round")
    ax.plot(row.value, y, marker, color=tint, markersize=7, markerfacecolor=tint if filled else "white", zorder=3)


def _rows(ax: Axes, policies: Sequence[str]) -> None:
    named_rows(ax, [look(name)[0] for name in policies], [plots.INK] * len(policies))


def _percent(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))


def _note(ax: Axes, text: str, x: float = 0.98, y: float = 0.03, **options: Any) -> None:
    ax.text(x, y, text, transform=ax.transAxes, fontsize=9, color=plots.EDGE, **options)
