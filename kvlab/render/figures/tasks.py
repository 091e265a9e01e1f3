"""Figures of scores on tasks at small budgets, with the papers' tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from kvlab import papers
from kvlab.analyses.tasks import gains as analysis
from kvlab.render import theme
from kvlab.render.figures import many_policies, plots
from kvlab.render.figures.many_policies import AXIS, FAINT, INK, at

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

NEEDLE_BUDGET = 128
NLL = "NLL of the needle's digits, nats"
COMPARED = {"dapq": "DapQ", "snapkv": "SnapKV", "pyramidkv": "PyramidKV", "h2o": "H2O", "compilerkv": "CompilerKV"}
COLOURS = theme.colours(COMPARED)
POOLINGS = {
    "dapq": "DapQ",
    "snapkv": "SnapKV",
    "dapq_pooled": "DapQ, pooled",
    "snapkv_unpooled": "SnapKV, unpooled",
}
"""Who is asked for RULER's identifiers, with both poolings."""
AS_PRINTED = "as the paper prints it"
CLOSE: dict[str, Any] = {"fontsize": 9, "columnspacing": 1}
SHARES = {256: 0.20, 128: 0.10, 64: 0.05}
"""These budgets as shares of a prompt of about 1,280 tokens: ZSMerge's table 2 has the same shares."""
WAYS = {"zsmerge_question": "2 slots, scores from the question", "zsmerge": "recommended settings"}
"""ZSMerge's settings, and their names in the legend."""


def _full_cache(findings: Findings) -> tuple[float, str]:
    """The full cache's NLL of the needle, as a line of reference."""
    row = findings.row(analysis.WITHOUT_BUDGET, measure="nll", task="needle", policy="full")
    return row.value, "full cache"


# ----------------------------------------------------------------------------------------------------------- needles


def needles(findings: Findings) -> Figure:
    """The needle under every policy: its NLL, the share of digits that are right, and the papers' accuracies.

    findings: of `gains.findings`.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 5.6), width_ratios=[5, 5, 4])
    levels = at(findings.frame(analysis.AT_BUDGET), task="needle", budget=NEEDLE_BUDGET)
    nll = at(levels, measure="nll").sort_values("value")
    hits = at(levels, measure="hits").set_index("policy").loc[nll["policy"]].reset_index()
    title = "Here: how unlikely the right answer is"
    many_policies.dots(nll, xlabel=NLL, title=title, reference=_full_cache(findings), ax=left)
    many_policies.dots(hits, xlabel="share of digits right", title="Here: digits that come out right", ax=middle)
    many_policies.dots(_printed_needles(), xlabel="needles found", title="The papers: accuracy", ours=False, ax=right)
    return figure


def _printed_needles() -> pandas.DataFrame:
    """The values that RocketKV and DapQ print, the best first: policy, value (share of needles found)."""
    import pandas as pd

    rocketkv = papers.figure("rocketkv", "longbench").query("model == 'Llama3.1-8B' and budget == 256")
    dapq = papers.figure("dapq", "table9").query("model == 'Llama3.1-8B-Instruct' and budget == 64")
    both = [
        rocketkv.assign(policy=rocketkv["method"] + " (RocketKV)", value=rocketkv["needle"] / 100),
        dapq.assign(policy=dapq["method"].str.lower() + " (DapQ)", value=dapq["accuracy"] / 100),
    ]
    accuracies = pd.concat(both).dropna(subset="value").sort_values("value", ascending=False)
    return accuracies.filter(["policy", "value"])


def tiny_needles(findings: Findings) -> Figure:
    """The needle at each tiny budget: the share of digits that are right, policy by policy, a panel for each budget.

    findings: of `gains.findings`, with the task `tiny_needle`.
    """
    levels = at(findings.frame(analysis.AT_BUDGET), task="tiny_needle", measure="hits")
    full = findings.row(analysis.WITHOUT_BUDGET, measure="hits", task="tiny_needle", policy="full")
    budgets = sorted(levels["budget"].unique(), reverse=True)
    figure, panels = plt.subplots(1, len(budgets), figsize=(6 * len(budgets), 3.8), squeeze=False)
    for ax, budget in zip(panels[0], budgets, strict=True):
        part = at(levels, budget=budget).sort_values("value", ascending=False)
        reference = (full.value, "full cache")
        many_policies.dots(
            part, xlabel="share of digits right", title=f"{budget:g} tokens read", reference=reference, ax=ax
        )
    return figure


# ------------------------------------------------------------------------------------------------- against the budget


def against_budget(findings: Findings) -> Figure:
    """Losses here over the budget, above the scores that DapQ's tables 3 and 5 print.

    findings: of `gains.findings`.
    """
    figure, grid = plt.subplots(2, 2, figsize=(plots.WIDTH, 7.6))
    losses = at(findings.frame(analysis.AT_BUDGET), measure="loss")
    for ax, task, title in zip(grid[0], ("qa", "ruler"), ("Here: questions", "Here: multi-key needle"), strict=True):
        many_policies.whiskers(at(losses, task=task), names=COMPARED, colours=COLOURS, ax=ax)
        ax.axhline(0, color=AXIS, linewidth=1)
        ax.set_xlabel("budget, entries for each layer and KV head", fontsize=10)
        ax.set_ylabel("NLL above the full cache's, nats")
        ax.set_title(title)
    _printed_scores(grid[1, 0], "table3", "average", (64, 256), "DapQ, table 3: LongBench")
    _printed_scores(grid[1, 1], "table5", "niah_multikey_1", (64, 512), "DapQ, table 5: multi-key")
    for ax in grid.flat:
        ax.set_xscale("log", base=2)
        low, high = ax.get_xlim()
        plots.doublings(ax, [budget for budget in (64, 128, 256, 512) if low <= budget <= high])
    measured = {label: curve for ax in grid[0] for curve, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    shown = {name: measured[name] for name in COMPARED.values() if name in measured}
    printed = Line2D([], [], color=plots.PAPER, linestyle="--", marker="D", label=AS_PRINTED)
    figure.legend([*shown.values(), printed], [*shown, AS_PRINTED], loc="outside upper left", ncols=6, **CLOSE)
    better = "measured here, lower is better; the paper's scores, higher is better"
    plots.note(
        figure, findings.table.loc[findings.table["task"].isin(["qa", "ruler"])], f"bars: {plots.INTERVALS}", better
    )
    return figure


def single_3(findings: Findings) -> Figure:
    """Losses on RULER's identifiers over the budget, next to the scores that DapQ's table 5 prints.

    findings: of `gains.findings`, with the task `single_3`.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2))
    losses = at(findings.frame(analysis.AT_BUDGET), measure="loss", task="single_3")
    colours = dict(zip(POOLINGS, plots.COLOURS, strict=False))
    many_policies.whiskers(losses, names=POOLINGS, colours=colours, ax=left)
    left.set(xlabel="budget, entries for each layer and KV head", ylabel="NLL above the full cache's, nats")
    left.set_title("Here: an identifier among other text")
    left.legend()
    _printed_scores(right, "table5", "niah_single_3", (256, 2048), "DapQ, table 5: RULER, S-NIAH-3")
    right.legend()
    for ax, budgets in ((left, sorted(losses["budget"].unique())), (right, [256, 512, 1024, 2048])):
        ax.set_xscale("log", base=2)
        plots.doublings(ax, budgets)
    return figure


def _printed_scores(ax: Axes, table: str, column: str, span: tuple[int, int], title: str) -> None:
    scores = papers.figure("dapq", table).query("model == 'Llama3-8B-Instruct'").dropna(subset=column)
    for full in at(scores, method="FullKV")[column].head(1):
        ax.axhline(full, color=FAINT, linestyle=":", linewidth=1)
        ax.annotate("full cache", (span[0], full), xytext=(0, 3), textcoords="offset points", fontsize=9, color=FAINT)
    scores = scores.loc[scores["budget"].between(*span)].sort_values("budget")
    for policy, name in COMPARED.items():
        part = at(scores, method=name)
        if len(part):
            ax.plot(part["budget"], part[column], color=plots.PAPER, linestyle="--", zorder=2)
            ax.plot(part["budget"], part[column], "D", color=COLOURS[policy], markersize=6, label=name, zorder=3)
    ax.set(xlabel="budget, entries", ylabel="score, %")
    ax.set_title(title)


# ------------------------------------------------------------------------------------------------- ZSMerge, gains


def zsmerge_table_2(findings: Findings) -> Figure:
    """ZSMerge's gain over H2O at 20, 10 and 5 % of the cache, here and in the paper's table 2.

    findings: of `gains.findings`.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9))
    gains = at(findings.frame(analysis.GAIN), task="qa", other="h2o")
    xs = {share: x for x, share in enumerate(SHARES.values())}
    for number, (policy, label) in enumerate(WAYS.items()):
        part = at(gains, better=policy).query("budget in @SHARES")
        x = [xs[SHARES[budget]] + 0.36 * (number - 0.5) for budget in part["budget"]]
        left.bar(x, part["value"], color=plots.COLOURS[number], width=0.34, label=label, zorder=2)
        left.errorbar(x, part["value"], yerr=plots.spread(part), fmt="none", color=INK, capsize=3)
    left.margins(y=0.25)
    left.axhline(0, color=AXIS, linewidth=1)
    left.set(ylabel="gain in NLL on H2O, nats")
    left.set_title("Here: above 0, ZSMerge is better")
    printed = _printed_gains()
    for number, model in enumerate(printed["model"].unique()):
        part = at(printed, model=model)
        x = [xs[share] + 0.36 * (number - 0.5) for share in part["budget"]]
        hatch = "//" if number else None
        right.bar(x, part["gain"], width=0.34, color=plots.PAPER, hatch=hatch, edgecolor="white", label=model, zorder=2)
    right.set(ylabel="gain in ROUGE-L on H2O, points")
    right.set_title("Paper, table 2")
    for ax in (left, right):
        ax.set_xticks(list(xs.values()), [f"{share:.0%}" for share in xs])
        ax.set_xlabel("cache, share of the prompt")
        ax.legend()
    return figure


def _printed_gains() -> pandas.DataFrame:
    """ZSMerge's table 2: model, budget (a share of the cache), gain (ROUGE-L of ZSMerge less that of H2O)."""
    printed = papers.figure("zsmerge", "table2").query("budget < 1")
    wide = printed.pivot(index=["model", "budget"], columns="method", values="rougeL")
    return wide.assign(gain=wide["zsmerge"] - wide["h2o"]).reset_index().filter(["model", "budget", "gain"])


def gains(findings: Findings) -> Figure:
    """All gains that the papers claim and that were measured, one row each.

    findings: of `gains.findings`.
    """
    title = "Above 0: the paper's own method is better"
    ax = many_policies.forest(
        analysis.claimed(findings), xlabel="gain in NLL of the right answer, nats a token", title=title
    )
    return plots.figure_of(ax)


def question(findings: Findings) -> Figure:
    """The needle's NLL if the cache is compressed after the question has been read, and before.

    findings: of `gains.findings`.
    """
    ax = many_policies.dots(
        analysis.question_read_or_not(findings.table),
        xlabel=NLL,
        title="Compressed before the question came",
        reference=_full_cache(findings),
    )
    return plots.figure_of(ax)
