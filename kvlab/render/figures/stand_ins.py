"""Figures of what predicts the answer: stand-ins' rank correlations with outcomes, and the cells behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import matplotlib.pyplot as plt
import pandas as pd
from scipy import stats

from kvlab.analyses.stand_ins.cells import RESPONSE
from kvlab.analyses.stand_ins.correlations import BY_BUDGET, PAIRS, WITHIN
from kvlab.papers.stand_ins import ACROSS, DOCUMENTS, LEAST_RHO, OUTCOMES
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import FAINT, INK, at, named_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

RHO = "rank correlation (1: better there, better here)"
NAMES = {
    "recall": "recall",
    "window_recall": "window recall",
    "step_recall": "step recall",
    "mass_lost": "attention mass lost",
    "output_error": "output error",
    "likelihood": "likelihood of the answer",
}
COLOUR = dict(zip(NAMES, plots.COLOURS, strict=False))
UNITS = {
    "recall": "recall after the prefill (share of the top tokens)",
    "mass_lost": "attention mass lost (share)",
    "output_error": "relative error of the attention output",
}
ANSWER = "NLL of the right answer\nabove the full cache's, nats a token"


def ranking(found: Findings) -> Figure:
    """A panel for each outcome: the stand-ins' correlations across policies, with intervals over documents."""
    across, count = found.frame(ACROSS), found.frame(DOCUMENTS)
    figure, grid = plt.subplots(2, 2, figsize=(11.4, 6.2), sharex=True)
    for ax, (outcome, title) in zip(grid.flat, OUTCOMES.items(), strict=True):
        part = _ordered(at(across, outcome=outcome))
        _dots(ax, part)
        documents = at(count, outcome=outcome)["value"].max() if len(part) else 0
        ax.set_title(f"{title}, n = {documents:.0f}", fontsize=10.5)
    for ax in grid[-1]:
        ax.set_xlabel(RHO)
    figure.suptitle(
        "Which stand-in ranks policies as the model's own answers do?", x=0.01, ha="left", fontweight="bold"
    )
    figure.supxlabel(_bands("at one budget on one prompt"), fontsize=9, color=FAINT)
    return figure


def _bands(how: str) -> str:
    return (
        f"Spearman, {how}; bars: 95 % intervals over n documents; dashed: {LEAST_RHO:g}, below which a stand-in is weak"
    )


def _ordered(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values("value", ascending=False, kind="stable", ignore_index=True)


def _dots(ax: Axes, part: pd.DataFrame) -> None:
    names = part["stand_in"].tolist()
    for y, row in enumerate(part.to_dict("records")):
        plots.points(ax, pd.DataFrame([row]), [y], rows=True, color=COLOUR[row["stand_in"]])
    named_rows(ax, [NAMES[name] for name in names], [COLOUR[name] for name in names], count=len(PAIRS["right"]))
    _lines(ax)


def _lines(ax: Axes) -> None:
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.axvline(LEAST_RHO, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    ax.set_xlim(-1.05, 1.05)


def within_and_across(found: Findings) -> Figure:
    """For each stand-in: within one policy over budgets and prompts, and across policies at one budget."""
    ax = plots.axes(size=(8.2, 4.0))
    across = _ordered(found.frame(ACROSS).query("outcome == 'answer'"))
    inside = found.frame(WITHIN).query("outcome == 'answer'").set_index("stand_in")
    names = across["stand_in"].tolist()
    for shift, frame, label, marker in (
        (-0.14, across, "across policies, at one budget on one prompt", "o"),
        (0.14, inside.loc[names].reset_index(), "within a policy, over budgets and prompts", "s"),
    ):
        tint = plots.COLOURS[0] if marker == "o" else plots.COLOURS[1]
        rows = [y + shift for y in range(len(frame))]
        plots.points(ax, frame, rows, rows=True, fmt=marker, color=tint, label=label)
    named_rows(ax, [NAMES[name] for name in names], [INK] * len(names), count=len(names))
    _lines(ax)
    ax.set_xlabel(RHO)
    ax.set_title(f"More entries help each policy: is that what a stand-in predicts?\n{OUTCOMES['answer']}", fontsize=11)
    ax.legend(**plots.BELOW | {"bbox_to_anchor": (0.4, -0.18), "ncols": 1})
    plots.figure_of(ax).supxlabel(_bands("two ways"), fontsize=9, color=FAINT)
    return plots.figure_of(ax)


def by_budget(found: Findings) -> Figure:
    """A line for each stand-in: the correlation across policies at each budget."""
    ax = plots.axes(size=(8.2, 4.2))
    frame = found.frame(BY_BUDGET).query("outcome == 'answer'").sort_values("budget")
    budgets = sorted(frame["budget"].unique())
    place = {budget: x for x, budget in enumerate(budgets)}
    shown = [name for name in NAMES if name in set(frame["stand_in"])]
    for number, name in enumerate(shown):
        part = at(frame, stand_in=name)
        xs = [place[budget] + 0.06 * (number - len(shown) / 2) for budget in part["budget"]]
        plots.points(ax, part, xs, color=COLOUR[name], fmt="o-", linewidth=1.2, label=NAMES[name])
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.axhline(LEAST_RHO, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    ax.set_xticks(range(len(budgets)), [f"{budget:g}" for budget in budgets])
    ax.set_ylim(-1.05, 1.05)
    ax.set_xlabel("budget, entries for each layer and KV head")
    ax.set_ylabel("rank correlation")
    ax.set_title(f"At which budgets does a stand-in predict?\n{OUTCOMES['answer']}", fontsize=11)
    ax.legend(**plots.BELOW | {"bbox_to_anchor": (0.5, -0.18), "ncols": 3})
    plots.figure_of(ax).supxlabel(_bands("across policies on one prompt"), fontsize=9, color=FAINT)
    return plots.figure_of(ax)


def policies(cells: pd.DataFrame, budget: float) -> Figure:
    """A panel for each of two stand-ins: every policy's mean at one budget against the NLL of the right answer.

    cells: from `cells.measure`.
    """
    stand_ins = ["mass_lost", "output_error"]
    part = at(cells.loc[cells["kind"] != RESPONSE], budget=budget)
    part = part.assign(above=part["nll"] - part["nll_full"])
    means = cast("pd.DataFrame", part.groupby("policy")[[*stand_ins, "above"]].mean())
    figure, row = plt.subplots(1, len(stand_ins), figsize=(5.1 * len(stand_ins), 4.6), sharey=True, squeeze=False)
    for ax, name in zip(row[0], stand_ins, strict=True):
        for policy, mean in means.iterrows():
            ax.plot(mean[name], mean["above"], "o", color=theme.look(str(policy)).colour, markersize=6)
            style = {"textcoords": "offset points", "xytext": (5, 2), "fontsize": 8.5}
            ax.annotate(str(policy), (mean[name], mean["above"]), color=theme.look(str(policy)).colour, **style)
        rho = cast("Any", stats.spearmanr(means[name].to_numpy(), means["above"].to_numpy())).statistic
        ax.set_xlabel(UNITS[name])
        ax.set_title(f"{NAMES[name]}: {'-' if rho < 0 else ''}{abs(rho):.2f} between the means", fontsize=10.5)
        ax.margins(x=0.16)
    row[0][0].set_ylabel(ANSWER, fontsize=9.5)
    figure.suptitle("Do policies that lose less answer better?", x=0.01, ha="left", fontweight="bold")
    sentence = (
        f"means over {part['prompt'].nunique()} prompts of {part['document'].nunique()} documents, {budget:g} entries"
    )
    figure.supxlabel(sentence, fontsize=9, color=FAINT)
    return figure
