"""Figures of the evicted entries that cost a response: five papers' systems in colour, baselines in grey."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvlab.analyses.findings import DOCUMENT, estimates
from kvlab.analyses.why_it_fails import lost_entries, token_kinds
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.attribution import ORDERS
from kvlab.render.figures.many_policies import at, named_rows

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

NAMES = {
    "morphkv": "MorphKV",
    "compilerkv": "CompilerKV",
    "rocketkv": "RocketKV",
    "zsmerge_unmerged": "ZSMerge, unmerged",
    "dapq": "DapQ",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "streamingllm": "StreamingLLM",
}
WIDE = 11, 4.6
BESIDE_A_MAP = 12.6, 5.0
UNDER: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "fontsize": 9}
MARK = 0.01
"""The share of the entries at which the curves' title reads them."""


def concentration(curves: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """Left the share of the harm that the costliest entries carry; right how many carry 50 and 90 % of it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    curves = at(curves, budget=budget)
    for _, part in curves.groupby(DOCUMENT, sort=False):
        single = part.groupby("entries").by_effect.mean()
        left.plot(single.index, single, color=theme.RULE, linewidth=1.2, zorder=1)
    left.plot([], [], color=theme.RULE, label="single documents")
    means = curves.groupby(["policy", "entries"], sort=False).by_effect.mean()
    for name in _policies(curves):
        label, tint, marker = look(name)
        left.plot(means[name].index, means[name], color=tint, marker=marker, markevery=8, label=label, linewidth=1.6)
    methods = _methods(_policies(curves))
    at_mark = 100 * means.xs(_nearest(curves.entries, MARK), level="entries")[methods]
    left.axvline(MARK, color=plots.EDGE, linewidth=1, linestyle=":")
    _shares(left, "evicted entries, the costliest first (% of all evicted)", "harm that they carry (%)")
    left.set_title(f"{100 * MARK:g} % of the entries carry {_from_to(at_mark)} % of the harm")
    left.legend(fontsize=8.5, loc="upper left")
    _note(left, f"{budget:g} entries a head; means over {_documents(curves)}")
    names = _policies(curves)
    frames = [_at(found, effect, budget).set_index("policy") for effect in (lost_entries.HALF, lost_entries.MOST)]
    for frame, label, fill in zip(frames, ("50 %", "90 %"), (plots.EDGE, "white"), strict=True):
        for y, name in enumerate(names):
            _dot(right, frame.loc[name], y, name, filled=fill != "white")
        right.plot([], [], "o", color=plots.EDGE, markerfacecolor=fill, label=f"{label} of the harm")
    right.set_xscale("log")
    _percent(right.xaxis)
    _rows(right, names)
    half, most = (_from_to(100 * frame.value[methods]) for frame in frames)
    right.set(xlabel="entries that carry it (% of all evicted)", title=f"Half lies in {half} %, 90 % in {most} %")
    right.legend(**UNDER, ncols=2, title=f"bars: 95 %, {_documents(curves)}", title_fontsize=9)
    return figure


def attention(curves: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """Left the harm that the first entries carry by effect and by attention; right what they regain once put back."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    curves = at(curves, budget=budget)
    names = _policies(curves)
    orders = {"by_effect": "mean", "by_attention": "mean"}
    methods = _methods(names)
    means = curves[curves["policy"].isin(methods)].groupby([DOCUMENT, "entries"]).agg(orders).reset_index()
    extent = f"{budget:g} entries a head; mean of {len(methods)} policies;\nbands: 95 %, {_documents(curves)}"
    for order in ("effect", "attention"):
        label, tint, _ = ORDERS[order]
        band = estimates(means.groupby("entries")[f"by_{order}"], ["entries"])
        left.plot(band.entries, band.value, color=tint, label=f"ranked {label}")
        # A share has no more than 0 to 1, whatever an interval of few documents says.
        left.fill_between(band.entries, band.low.clip(0, 1), band.high.clip(0, 1), color=tint, alpha=0.18, linewidth=0)
    grid = np.sort(curves.entries.unique())
    left.plot(grid, grid, color=plots.PAPER, linestyle="--", label="at random")
    _shares(left, "evicted entries, the first in each order (% of all evicted)", "harm that they carry (%)")
    share = 100 * _at(found, lost_entries.FOUND, budget).set_index("policy").value[methods]
    left.set_title(f"Attention finds {_from_to(share)} % of the costly entries")
    left.legend(loc="upper left", title=extent, title_fontsize=9, alignment="left")
    cost = _at(found, lost_entries.COST, budget).set_index("policy").value
    right.barh(range(len(names)), cost[names], color=theme.GRID, height=0.72, label="what the policy costs", zorder=1)
    regained = []
    for order, shift in (("effect", -0.16), ("attention", 0.16)):
        label, tint, marker = ORDERS[order]
        rows = _at(found, lost_entries.REGAINED, budget, order=order).set_index("policy").loc[names]
        ys = [y + shift for y in range(len(names))]
        plots.points(right, rows, ys, rows=True, color=tint, fmt=marker, capsize=2, label=f"put back {label}", zorder=3)
        regained.append(round(100 * rows.value[methods].sum() / cost[methods].sum()))
    _rows(right, names)
    right.axvline(0, color=plots.EDGE, linewidth=1)
    right.set(
        xlabel=f"loss regained (nats; bars: 95 %, {_documents(curves)})",
        title=f"Put back they regain {regained[0]} %, by attention {regained[1]} %",
    )
    right.legend(**UNDER, ncols=3)
    return figure


def heads(parts: pandas.DataFrame, budget: float) -> Figure:
    """Left the harm by layer; right how much of it lies in DuoAttention's retrieval heads."""
    figure, (left, right) = plt.subplots(1, 2, figsize=BESIDE_A_MAP)
    rows = at(parts, budget=budget)
    layers = at(rows, group="layer")
    layers = layers.assign(layer=layers["part"].astype(int))
    names = _policies(layers)
    shares = layers.pivot_table(index="policy", columns="layer", values="harm").loc[names]
    plots.heatmap(100 * shares, xlabel="layer", ylabel="", unit="share of the harm (%)", ax=left)
    left.set_yticks(np.arange(len(names)) + 0.5, [look(name)[0] for name in names])
    left.tick_params(axis="x", rotation=0)
    first = shares.loc[_methods(names)].mean().sort_values(ascending=False)[:3]
    *some, last = sorted(first.index)
    left.set_title(f"Layers {', '.join(map(str, some))} and {last} hold {100 * first.sum():.0f} % of the harm")
    left.set_xlabel(f"layer ({budget:g} entries a head; means over {_documents(rows)})")
    retrieval = at(rows, group="heads", part="retrieval")
    if retrieval.empty:
        right.set_axis_off()
        right.text(0.5, 0.5, "kvlab has no head scores\nof DuoAttention for this model", ha="center", color=plots.EDGE)
        return figure
    frame = 100 * estimates(retrieval.groupby("policy", sort=False).harm, ["policy"]).set_index("policy")
    for y, name in enumerate(names):
        _dot(right, frame.loc[name], y, name)
    base = 100 * retrieval.entries.mean()
    right.axvline(base, color=plots.INK, linewidth=1, linestyle="--", label="their share of the evicted entries")
    _rows(right, names)
    right.set_xlim(0, 100)
    right.set(
        xlabel=f"share of the harm (%; bars: 95 %, {_documents(rows)})",
        title=f"Retrieval heads hold {frame.value[_methods(names)].mean():.0f} % of the harm",
    )
    right.legend(**UNDER)
    return figure


def tokens(parts: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """How much more of the harm each kind of token, and each distance, holds than its share of the evicted entries."""
    figure, (left, right) = plt.subplots(1, 2, figsize=WIDE)
    names = _policies(parts)
    for ax, group, labels in (
        (left, "kind", [kind for kind in token_kinds.KINDS if kind != token_kinds.RESPONSE]),
        (right, "distance", [lost_entries.FIRST, *reversed(lost_entries.bins())]),
    ):
        frame = _at(found, lost_entries.LIFT, budget, group=group)
        means = frame[frame.policy == lost_entries.ALL].set_index("part")
        shown = means.reindex(labels).dropna(subset="value")
        if group == "kind":
            shown = shown.sort_values("value", ascending=False)
        for y, (label, row) in enumerate(shown.iterrows()):
            single = frame[(frame.part == label) & (frame.policy != lost_entries.ALL)]
            for name, value in zip(single.policy, single.value, strict=True):
                _, tint, marker = look(name)
                ax.plot(value, y + 0.26, marker=marker, color=tint, markersize=4, linestyle="", alpha=0.85)
            ax.plot([row.low, row.high], [y, y], color=plots.INK, linewidth=2.4, alpha=0.5)
            ax.plot(row.value, y, "o", color=plots.INK, markersize=7)
        ax.axvline(1, color=plots.INK, linewidth=1, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xlim(max(ax.get_xlim()[0], 1 / 16), min(ax.get_xlim()[1], 16))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        share = _share(parts, group, budget)
        named_rows(
            ax, [f"{label}\n{100 * share[label]:.1f} % of entries" for label in shown.index], [plots.INK] * len(shown)
        )
        ax.set(xlabel="share of the harm / share of the evicted entries", title=_costs(shown, group))
    right.set_ylabel("tokens before the prompt's end")
    first = f"mean and 95 % ({budget:g} entries a head, {_documents(parts)})"
    handles = [Line2D([], [], marker="o", color=plots.INK, label=first, linewidth=2)]
    handles += [Line2D([], [], marker=look(n)[2], color=look(n)[1], linestyle="", label=look(n)[0]) for n in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _costs(lifts: pandas.DataFrame, group: str) -> str:
    """Which parts cost more or less than their share of the entries, as the intervals have it: a title."""
    ordered = lifts.sort_values("value", ascending=False)
    above, below = ordered.loc[ordered["low"] > 1], ordered.iloc[::-1].loc[lambda rows: rows["high"] < 1]
    for side, parts in (("Above", above), ("Below", below)):
        if len(parts):
            more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
            return f"{side} their share: {parts.index[0]}{more}"
    return {"kind": "No kind of token stands out", "distance": "No distance stands out"}[group]


def missed(keepers: pandas.DataFrame, found: Findings, budget: float) -> Figure:
    """Left who keeps the entries whose loss costs each policy most; right the same of one policy, against chance."""
    figure, (left, right) = plt.subplots(1, 2, figsize=BESIDE_A_MAP)
    rows = at(keepers, budget=budget)
    names = _policies(rows)
    policy = "snapkv" if "snapkv" in names else names[0]
    matrix = 100 * rows.pivot_table(index="policy", columns="keeper", values="kept").loc[names, names]
    labels = [look(name)[0] for name in names]
    top = 10 * np.ceil(matrix.to_numpy().max() / 10)
    unit = "harm in the costly entries that is kept (%)"
    plots.heatmap(matrix, xlabel="who keeps them", ylabel="whom they cost", unit=unit, limits=(0, top), ax=left)
    left.set_xticks(np.arange(len(names)) + 0.5, labels, rotation=40, ha="right")
    left.set_yticks(np.arange(len(names)) + 0.5, labels)
    for (y, x), value in np.ndenumerate(matrix.to_numpy()):
        tint = "white" if value < 0.6 * top else plots.INK
        left.text(x + 0.5, y + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=9, color=tint)
    of_others = matrix.where(~np.eye(len(names), dtype=bool)).loc[_methods(names)].mean()
    left.set_title(f"{look(str(of_others.idxmax()))[0]} keeps {of_others.max():.0f} % of what costs the others")
    name = look(policy)[0]
    frame = 100 * _at(found, lost_entries.KEPT, budget, policy=policy).set_index("keeper")[["value", "low", "high"]]
    others = sorted((other for other in names if other != policy), key=lambda other: -frame.value[other])
    chance = 100 * at(rows, policy=policy).groupby("keeper").chance.mean()
    for y, other in enumerate(others):
        _dot(right, frame.loc[other], y, other)
        right.plot(chance[other], y, "|", color=plots.INK, markersize=13, markeredgewidth=1.6)
    right.plot([], [], "|", color=plots.INK, markersize=11, label=f"share that it keeps of all that {name} evicts")
    _rows(right, others)
    right.set_xlim(left=0)
    right.set(
        xlabel=f"kept of what costs {name} (%)",
        title=f"{look(others[0])[0]} keeps {frame.value[others[0]]:.0f} % of what costs {name}",
    )
    right.legend(**UNDER)
    _note(right, f"{budget:g} entries a head; bars: 95 %, {_documents(rows)}")
    return figure


def look(policy: str) -> tuple[str, str, str]:
    """Name, colour and marker of a policy."""
    drawn = theme.look(policy)
    return NAMES.get(policy, policy), drawn.colour, drawn.marker


def _at(found: Findings, effect: str, budget: float, **keys: Any) -> pandas.DataFrame:
    return at(found.frame(effect), budget=budget, **keys)


def _methods(names: Iterable[str]) -> list[str]:
    """These policies without the reference, for means and titles; all if there is nothing else."""
    return [name for name in names if name != lost_entries.REFERENCE] or list(names)


def _policies(table: pandas.DataFrame) -> list[str]:
    return [str(name) for name in table["policy"].unique()]


def _documents(table: pandas.DataFrame) -> str:
    return f"{table[DOCUMENT].nunique()} documents"


def _share(parts: pandas.DataFrame, group: str, budget: float) -> pandas.Series:
    rows = at(parts, budget=budget, group=group)
    cases = len(rows.groupby([DOCUMENT, "policy"]))
    return rows.groupby("part").entries.sum() / cases


def _from_to(values: pandas.Series) -> str:
    """The least and the largest mean over documents, of all policies: "0.2 to 0.9"."""
    low, high = f"{values.min():.2g}", f"{values.max():.2g}"
    return low if low == high else f"{low} to {high}"


def _nearest(values: pandas.Series, to: float) -> float:
    return min(values.unique(), key=lambda value: abs(value - to))


def _shares(ax: Axes, xlabel: str, ylabel: str) -> None:
    """Shares of the entries on a logarithmic axis, shares of the harm on the other."""
    ax.set_xscale("log")
    _percent(ax.xaxis)
    ax.set_ylim(0, 1.04)
    _percent(ax.yaxis)
    ax.set(xlabel=xlabel, ylabel=ylabel)


def _dot(ax: Axes, row: pandas.Series, y: float, policy: str, filled: bool = True) -> None:
    _, tint, marker = look(policy)
    ax.plot([row.low, row.high], [y, y], color=tint, linewidth=2.2, alpha=0.55, solid_capstyle="round")
    ax.plot(row.value, y, marker, color=tint, markersize=7, markerfacecolor=tint if filled else "white", zorder=3)


def _rows(ax: Axes, policies: Sequence[str]) -> None:
    named_rows(ax, [look(name)[0] for name in policies], [plots.INK] * len(policies))


def _percent(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))


def _note(ax: Axes, text: str) -> None:
    ax.text(0.98, 0.03, text, transform=ax.transAxes, fontsize=9, color=plots.EDGE, ha="right")
