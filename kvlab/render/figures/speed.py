"""Figures of speed and memory against the full cache, and of the papers' printed values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import matplotlib.pyplot as plt

from kvlab import papers
from kvlab.analyses.speed import footprint, ratios
from kvlab.analyses.speed.timings import FULL
from kvlab.render import theme
from kvlab.render.figures import plots
from kvlab.render.figures.many_policies import AXIS, INK, at

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

QUANTITIES = {
    "weights": "weights",
    "cache_20k": "cache,\n20k",
    "cache_32k": "cache,\n32k",
    "full_54k": "full,\n54k",
    "zsmerge": "zsmerge,\n18k",
}
"""Names of ZSMerge's printed memory figures below their bars."""


def _names(policies: Sequence[str]) -> dict[str, str]:
    return {FULL: "full cache (transformers)"} | {name: name for name in policies}


def _colours(policies: Sequence[str]) -> dict[str, str]:
    return theme.colours((FULL, *policies))


def _table_a1() -> pandas.DataFrame:
    """CompilerKV's table A1, in ratios."""
    return footprint.compilerkv_table_a1(papers.figure("compilerkv", "tableA1")).table


# ------------------------------------------------------------------------------------------------------------- speed


def speed(findings: Findings, policies: Sequence[str]) -> Figure:
    """Time of a step, and times the full cache's speed, by length of the prompt; the papers' own ratios in grey.

    findings: of `ratios.speed_findings`, of the full cache and these policies.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8))
    single = at(findings.table, batch=1)
    _curves(
        left,
        ratios.points(single.assign(ms=1e3 * single["seconds_per_step"]), "ms"),
        policies,
        ylabel="time of a step (ms)",
        title="Time of a decoding step",
    )
    left.set_ylim(bottom=0)
    _curves(
        right,
        ratios.points(single.query("policy != @FULL"), "speedup"),
        policies,
        ylabel="times the full cache's speed",
        title="Speed-up of decoding",
    )
    printed = _table_a1()
    right.plot(printed["input_tokens"], printed["speedup"], "--D", color=plots.PAPER, label="paper, compilerkv")
    figure_3 = footprint.zsmerge_speedups(papers.figure("zsmerge", "figure3"))
    right.plot(figure_3["tokens"], figure_3["speedup"], "--s", color=plots.PAPER, label="paper, zsmerge")
    best = max(papers.figure("rocketkv", "figure5")["speedup"])
    right.axhline(best, color=plots.PAPER, linestyle=":", label="paper, rocketkv's best")
    right.axhline(1, color=AXIS, linewidth=1)
    right.set_xscale("log")
    right.legend(fontsize=9)
    return figure


def _curves(ax: Axes, points: pandas.DataFrame, policies: Sequence[str], *, ylabel: str, title: str) -> None:
    """A curve over the prompt for each policy: policy, length, mean, and low and high where there are intervals."""
    band = "low" in points
    plots.lines(
        points,
        x="length",
        y="mean",
        hue="policy",
        low="low" if band else None,
        high="high" if band else None,
        names=_names(policies),
        colours=_colours(policies),
        xlabel="prompt (tokens)",
        ylabel=ylabel,
        title=title,
        ax=ax,
    )


def batches(findings: Findings, policies: Sequence[str]) -> Figure:
    """Times the full cache's speed by batch size, after the shortest prompt; ZSMerge's table 4 in grey.

    findings: of `ratios.speed_findings`; only policies measured at several batch sizes are drawn.
    """
    figure, ax = plt.subplots(figsize=(7.6, 4.6))
    shortest = findings.table.query("length == length.min() and policy != @FULL")
    batched = shortest.groupby("policy", sort=False).filter(lambda rounds: rounds["batch"].nunique() > 1)
    points = ratios.points(batched, "speedup", ("policy", "batch"))
    plots.lines(
        points,
        x="batch",
        y="mean",
        hue="policy",
        low="low",
        high="high",
        names=_names(policies),
        colours=_colours(policies),
        xlabel="batch size",
        ylabel="times the full cache's speed",
        title="Speed-up by batch size",
        ax=ax,
    )
    printed = footprint.zsmerge_batches(papers.figure("zsmerge", "table4"))
    prompts = sorted(printed["prompt"].unique())
    for method, style in {"h2o": ":s", "zsmerge": "--D"}.items():
        for prompt in prompts:
            part = at(printed, method=method, prompt=prompt)
            if part.empty:
                continue
            label = f"paper, {method}, prompts as marked" if prompt == prompts[0] else None
            ax.plot(part["batch"], part["speedup"], style, color=plots.PAPER, label=label)
            last = part["batch"].iloc[-1], part["speedup"].iloc[-1]
            ax.annotate(f"{prompt:,}", last, xytext=(6, -3), textcoords="offset points", fontsize=9, color=AXIS)
    ax.axhline(1, color=AXIS, linewidth=1)
    plots.doublings(ax, sorted({*findings.table["batch"], *printed["batch"]}))
    ax.margins(x=0.09)
    ax.legend(fontsize=9, loc="upper left")
    return figure


def first_token(first: Findings, answers: Findings, policies: Sequence[str]) -> Figure:
    """Additional time to the first token, and time saved over a whole answer, next to CompilerKV's table A1.

    first: of `ratios.first_token_findings`; answers: of `ratios.answer_findings`; policies: all that are compared.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4))
    _saved(left, first, ratios.FIRST_TOKEN, "overhead", policies)
    _saved(right, answers, ratios.ANSWER_SAVED, "latency_saved", policies)
    left.set_title("Additional time to the first token")
    right.set_title("Time saved over a whole answer")
    return figure


def _saved(ax: Axes, findings: Findings, effect: str, column: str, policies: Sequence[str]) -> None:
    """A bar for each length that table A1 prints, and for each policy at the longest length measured."""
    length, colours = max(findings.table["length"]), _colours(policies)
    bars = [
        (f"compilerkv,\n{row['input_tokens'] // footprint.K}k", plots.PAPER, {"value": row[column]})
        for row in _table_a1().to_dict("records")
    ]
    bars += [
        (f"{row['policy']},\n{length:,}", colours[row["policy"]], row)
        for row in findings.frame(effect).to_dict("records")
    ]
    for y, (_, tint, row) in enumerate(bars):
        value = row["value"]
        low, high = row.get("low", value), row.get("high", value)
        ax.bar(y, value, 0.6, color=tint, zorder=2)
        if "low" in row:
            yerr = [[value - low], [high - value]]
            ax.errorbar(y, value, yerr=yerr, color=INK, capsize=3, linewidth=1.2, zorder=3)
        ax.annotate(
            f"{value:.1%}",
            (y, max(value, high, 0)),
            ha="center",
            va="bottom",
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=9,
        )
    ax.set_xticks(range(len(bars)), [label for label, _, _ in bars])
    ax.axhline(0, color=AXIS, linewidth=1)
    ax.margins(y=0.14)
    ax.set(ylabel="share of the full cache's time", xlabel="grey: paper; coloured: measured here")


# ------------------------------------------------------------------------------------------------------------ memory


ABOVE = {"xytext": (-2, 7), "ha": "center", "va": "bottom"}
BELOW = {"xytext": (7, -2), "ha": "left", "va": "top"}
ALIKE = 0.25
"""Savings this near to each other, in percentage points at every length, share one label."""


def memory(findings: Findings, policies: Sequence[str]) -> Figure:
    """MiB stored after the last step, from the shortest prompt to the longest; memory saved of weights and cache.

    findings: of `ratios.memory_findings`, of the full cache and these policies. The papers' peak memory is grey.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.5), width_ratios=(1, 1.15))
    single = at(findings.table, batch=1)
    _stored(left, single, policies)
    _memory_saved(right, single.query("policy != @FULL"), policies)
    return figure


def _stored(ax: Axes, single: pandas.DataFrame, policies: Sequence[str]) -> None:
    """A row for each policy, the largest at the top: open at the shortest prompt, filled at the longest."""
    mib = single.assign(mib=single["stored_bytes"] / 2**20).pivot(index="policy", columns="length", values="mib")
    mib = mib.reindex([policy for policy in (FULL, *policies) if policy in mib.index]).sort_values(
        mib.columns[-1], ascending=False, kind="stable"
    )
    shortest, longest = mib.columns[0], mib.columns[-1]
    for y, (policy, row) in enumerate(mib.iterrows()):
        look, ends = theme.look(str(policy)), (row[shortest], row[longest])
        ax.plot(ends, (y, y), color=look.colour, linewidth=2)
        for size, filled in zip(ends, ("white", look.colour), strict=True):
            ax.plot(size, y, look.marker, color=look.colour, markerfacecolor=filled, markersize=6)
        ax.annotate(f"{row[longest]:.1f}", (row[longest], y), xytext=(7, 0), textcoords="offset points", va="center")
    names = _names(policies) | {FULL: "full cache"}
    ax.set_yticks(range(len(mib)), [names[str(policy)] for policy in mib.index])
    ax.set(xlabel="stored, MiB", title="Bytes stored by the cache", ylim=(len(mib) - 0.5, -0.5))
    ax.set_xlim(0, 1.14 * float(mib.to_numpy().max()))
    plots.note(cast("Figure", ax.figure), single, f"open: a prompt of {shortest:,} tokens; filled: {longest:,}")


def _memory_saved(ax: Axes, saved: pandas.DataFrame, policies: Sequence[str]) -> None:
    """A curve over the prompt for all policies that save alike, next to what two papers print."""
    rows = saved.assign(percent=100 * saved["saving"]).sort_values("length")
    percent = {policy: part["percent"].to_numpy() for policy, part in rows.groupby("policy")}
    lengths = sorted(set(rows["length"]))
    left, spots = [policy for policy in policies if policy in percent], itertools.cycle((ABOVE, BELOW))
    while left:
        first = percent[left[0]]
        alike = [policy for policy in left if abs(percent[policy] - first).max() <= ALIKE]
        left = [policy for policy in left if policy not in alike]
        look, name = theme.look(alike[0]), ", ".join(alike)
        ax.plot(lengths, first, color=look.colour, marker=look.marker, label=name)
        end = lengths[-1], first[-1]
        ax.annotate(
            name.replace(", ", ",\n"), end, **next(spots), textcoords="offset points", color=look.colour, fontsize=9
        )
    table_a1 = _table_a1()
    printed_at, saved_there = table_a1["input_tokens"], 100 * table_a1["memory_saved"]
    ax.plot(printed_at, saved_there, "--D", color=plots.PAPER, label="compilerkv's paper")
    best = 100 * max(papers.figure("rocketkv", "figure5")["memory_saving"])
    ax.axhline(best, color=plots.PAPER, linestyle=":", label="rocketkv's paper, best")
    for line, end in (
        (ax.lines[-2], (printed_at.iloc[-1], saved_there.iloc[-1])),
        (ax.lines[-1], (printed_at.iloc[-1], best)),
    ):
        ax.annotate(str(line.get_label()), end, xytext=(0, 6), textcoords="offset points", ha="right", fontsize=9)
    ax.set(xscale="log", xlabel="prompt, tokens", ylabel="memory saved, %", title="Saved of weights and cache")
    ax.set_ylim(0, 1.15 * best)


def printed(memory: Findings, saving: Findings, workloads: Findings) -> Figure:
    """Printed memory and speed against arithmetic.

    memory, saving, workloads: of `footprint.zsmerge_memory`, `.rocketkv_saving` and `.zsmerge_workloads`.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    _zsmerge_memory(left, memory.table)
    _rocketkv_saving(middle, saving.table)
    _bandwidth(right, workloads.table)
    return figure


def _zsmerge_memory(ax: Axes, table: pandas.DataFrame) -> None:
    rows = table.query("quantity != 'token_mb'").set_index("quantity")
    columns = rows.to_dict()
    plots.paper_beside_ours(
        columns["printed"],
        columns["float32"],
        labels=QUANTITIES,
        value_format="{:.0f}",
        ylabel="GiB",
        ours_label="32-bit floats",
        title="ZSMerge: LLaMA2-7B's memory",
        ax=ax,
    )
    legend = ax.get_legend()
    assert legend is not None
    (half,) = ax.plot(
        range(len(rows)),
        rows["float16"],
        "_",
        color=plots.COLOURS[1],
        markersize=26,
        markeredgewidth=2.5,
        zorder=5,
    )
    handles = [*legend.get_patches(), half]
    ax.legend(handles, ["paper", "32-bit floats", "16-bit floats"], loc="upper left", fontsize=9)


def _rocketkv_saving(ax: Axes, table: pandas.DataFrame) -> None:
    plots.lines(
        table.assign(budget="budget " + table["budget"].astype(str)),
        x="length",
        y="saving",
        hue="budget",
        xlabel="sequence (tokens)",
        ylabel="share of memory saved",
        names={f"budget {budget}": f"budget {budget}, by arithmetic" for budget in table["budget"].unique()},
        title="RocketKV: Llama-3.1-8B's memory",
        ax=ax,
    )
    for row, style in zip(papers.figure("rocketkv", "figure5").to_dict("records"), ("--", ":"), strict=True):
        label = f"paper's best, budget {row['budget']}"
        ax.axhline(row["memory_saving"], color=plots.PAPER, linestyle=style, label=label)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.legend(fontsize=9)


def _bandwidth(ax: Axes, table: pandas.DataFrame) -> None:
    """Printed speed against the speed at which reading the weights takes the whole bandwidth."""
    fitted = table.dropna(subset=["tokens_per_second"])
    for tint, method in zip(plots.COLOURS, sorted(fitted["method"].unique()), strict=False):
        part = at(fitted, method=method)
        ax.scatter(part["bound"], part["tokens_per_second"], color=tint, label=f"paper, {method}", zorder=3, s=30)
    ends = [min(fitted["tokens_per_second"]), max(fitted["bound"])]
    ax.plot(ends, ends, color=AXIS, linewidth=1.2, label="all bandwidth for the weights")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="bound (tokens/s)",
        ylabel="printed (tokens/s)",
        title="ZSMerge: table 4 against its GPU",
    )
    ax.legend(fontsize=9)
