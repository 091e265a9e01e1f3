"""Scores of several questions over one context, turn by turn: whether they decline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from kvlab.core.storage import AS_IS
from kvlab.evaluation import Answer, by_turn, summary
from kvlab.evaluation.planning import FULL
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import FAINT, at

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPRESSED_AT = {"prompt": "the first question read", "context": "no question read"}
KNOWN = {("prompt", "requests"): "each question read"}
"""The questions that were read before a cache is compressed, by its moment; KNOWN has exceptions by moment and mode."""
OFFSET = 0.06
DASHES = ("-", "--", ":", "-.")
"""Of a policy's storages, which share its colour."""
WITH_WHISKERS = len(plots.COLOURS)
"""Up to this many curves have their intervals; of more, only the means are drawn."""


def scores(answers: Sequence[Answer]) -> Figure | None:
    """Draw the mean score over the turn with 95 % intervals over contexts; None where there are no turns.

    Each budget has a row of panels. Each mode and moment of compression has a column. The full cache is grey.
    """
    columns: dict[tuple[str, str], pandas.DataFrame] = {}
    for compress_at in sorted({answer.compress_at for answer in answers}, reverse=True):
        for mode, part in by_turn([answer for answer in answers if answer.compress_at == compress_at]).items():
            columns[compress_at, mode] = _named(summary(part, "turn"))
    if not columns:
        return None
    with plt.rc_context():
        plots.style()
        return _drawn(columns)


def with_counterparts(answers: Sequence[Answer], compared: Sequence[Answer]) -> list[Answer]:
    """These answers, and those of `compared` that differ from them in the moment of compression alone."""
    keys, known = {answer.key for answer in answers}, {_without_compress_at(answer) for answer in answers}
    return [*answers, *(a for a in compared if a.key not in keys and _without_compress_at(a) in known)]


def _without_compress_at(answer: Answer) -> tuple[str, str]:
    return answer.signature.replace(f"|compress at {answer.compress_at}|", "|"), answer.example


def _drawn(columns: Mapping[tuple[str, str], pandas.DataFrame]) -> Figure:
    frames = list(columns.values())
    budgets: list[float | None] = sorted({b for frame in frames for b in frame["budget"].dropna()})
    names = list(dict.fromkeys(name for frame in frames for name in frame["name"] if name != FULL))
    if not budgets or any(frame.loc[frame["name"] != FULL, "budget"].isna().any() for frame in frames):
        budgets.append(None)
    figure, grid = plt.subplots(
        len(budgets), len(columns), figsize=(0.8 + 3.5 * len(columns), 0.7 + 2.9 * len(budgets)), squeeze=False,
        sharex=True, sharey=True,
    )  # fmt: skip
    for axes, budget in zip(grid, budgets, strict=True):
        for ax, ((compress_at, mode), frame) in zip(axes, columns.items(), strict=True):
            of_budget = frame["budget"].isna() if budget is None else frame["budget"] == budget
            _panel(ax, at(frame, name=FULL), frame.loc[of_budget & (frame["name"] != FULL)], names)
            read = KNOWN.get((compress_at, mode), COMPRESSED_AT[compress_at])
            ax.set_title(f"{mode}: {read}".removeprefix(": "), fontsize="medium")
        axes[0].set_ylabel("score" if budget is None else f"score, budget {budget:g}")
        axes[0].yaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_ylim(-0.04, 1.04)
    for ax in grid[-1]:
        ax.set_xlabel("question")
        ax.set_xticks(sorted({turn for frame in frames for turn in frame["turn"]}))
    lines = {line.get_label(): line for ax in grid.flat for line in ax.get_legend_handles_labels()[0]}
    labels = [label for label in ("full cache", *names) if label in lines]
    figure.legend([lines[label] for label in labels], labels, loc="outside lower center", ncols=min(6, len(labels)))
    return figure


def _named(frame: pandas.DataFrame) -> pandas.DataFrame:
    """With the policy and its storage in the column `name`, and the score in `value`."""
    plain = frame["storage"] == AS_IS.name
    names = frame["policy"].where(plain, frame["policy"] + ", " + frame["storage"])
    return frame.assign(name=names, value=frame["score"])


def _panel(ax: Axes, full: pandas.DataFrame, part: pandas.DataFrame, names: Sequence[str]) -> None:
    full = full.sort_values("turn")
    ax.fill_between(full["turn"], full["low"], full["high"], color=FAINT, alpha=0.15, linewidth=0)
    ax.plot(full["turn"], full["value"], color=FAINT, linestyle=":", label="full cache")
    tints = theme.colours(names)
    of_tint = defaultdict(lambda: cycle(DASHES))
    dashes = {name: next(of_tint[tints[name]]) for name in names}
    for number, name in enumerate(names):
        of_policy = at(part, name=name).sort_values("turn")
        if of_policy.empty:
            continue
        ax.errorbar(
            of_policy["turn"] + OFFSET * (number - (len(names) - 1) / 2) * (len(names) <= WITH_WHISKERS),
            of_policy["value"],
            yerr=plots.spread(of_policy) if len(names) <= WITH_WHISKERS else None,
            marker=theme.look(name).marker,
            color=tints[name],
            linestyle=dashes[name],
            label=name,
            elinewidth=1.2,
            capsize=2.5,
        )
