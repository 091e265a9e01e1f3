"""MorphKV's figures of long responses (rivals, groups, wider windows, early facts) and of its headlines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt

from kvlab import papers
from kvlab.analyses.morphkv import facts, groups, headlines, responses, sizes, windows
from kvlab.render.figures import plots
from kvlab.render.figures.morphkv import COLOURS, MEASURES, NAMES, as_stated, by_step

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

CONSTANT = ("morphkv", "h2o", "keyformer", "scissorhands", "streamingllm", "random_response")
"""The methods of figure 3 whose cache keeps its size while it decodes, and a reference."""
VARIANTS = {
    groups.OWN: "a set for each query head",
    "llama_code": "code for Llama (logits, renormalised)",
    "other_code": "code for others (max, renormalised)",
}
TEXTS = {facts.NARROW: "MorphKV, narrow window", facts.WIDE: "MorphKV, wide window", "h2o": "H2O"}


def figure_3(along: Findings) -> Figure:
    """The loss of methods of constant size along a long response, and how many of their kept entries are early ones.

    along: of `responses.along_a_response`.
    """
    figure, (lost, early) = plt.subplots(1, 2, figsize=(13, 4.4), width_ratios=[1.4, 1])
    table = along.table.loc[along.table["policy"].isin(CONSTANT)]
    by_step(lost, table, "mass_lost", "attention mass lost", "methods of constant size")
    shares = along.frame(responses.EARLY).set_index("policy").loc[list(CONSTANT)]
    _points(early, 100 * shares, [COLOURS[name] for name in CONSTANT], [NAMES[name] for name in CONSTANT])
    early.axvline(25, color=plots.PAPER, linestyle="--", linewidth=1.2, label="as many as of every quarter")
    early.set(xlabel="entries from the first quarter (%)", title="stored at the end of the response")
    early.legend()
    return figure


def section_3_3(found: Findings) -> Figure:
    """Gains over the paper's aggregation, by mass and by output; found: of `groups.section_3_3`."""
    figure, axes = plt.subplots(1, len(groups.COMPARED), figsize=(12, 3.2), sharey=True)
    gains = found.frame(groups.GAIN).set_index("variant")
    for ax, measure in zip(axes, groups.COMPARED, strict=True):
        part = gains.loc[gains["measure"] == measure, ["value", "low", "high"]].loc[list(VARIANTS)]
        _points(ax, 100 * part, [plots.COLOURS[0]] * len(part), list(VARIANTS.values()))
        ax.axvline(0, color=plots.INK, linewidth=1)
        ax.set(xlabel="gain over the paper's sum over the group (%)", title=MEASURES[measure])
    return figure


def table_6_long(found: Findings) -> Figure:
    """The gain of a wider window along a response, by three measures, and step by step.

    found: of `windows.wider_window`.
    """
    figure, axes = plt.subplots(1, 3, figsize=(14.5, 4), width_ratios=[1, 1, 0.9])
    known = found.table.drop_duplicates(["window", "capacity"])
    capacity = known["capacity"].iloc[0]
    for ax, measure in zip(axes, ("mass_lost", "output_error"), strict=False):
        plots.lines(
            windows.along(found, measure, "max", capacity),
            x="step",
            y="value",
            hue="window",
            names={window: f"R = {window}" for window in known["window"]},
            marker=None,
            xlabel="decoding step",
            ylabel=MEASURES[measure],
            title=f"short prompt, max fusion, C + R = {capacity}",
            ax=ax,
        )
    gains = found.frame(windows.WIDER_GAIN).set_index("measure").loc[list(MEASURES)]
    _points(axes[-1], 100 * gains, [plots.COLOURS[0]] * len(gains), list(MEASURES.values()))
    axes[-1].axvline(0, color=plots.INK, linewidth=1)
    axes[-1].set(xlabel="gain of the wider window (%)", title="over documents")
    return figure


def early_facts(found: Findings) -> Figure:
    """How much less likely the right code is, and how much of it is still stored; found: of `facts.early_facts`."""
    figure, (nats, stored) = plt.subplots(1, 2, figsize=(12, 3.2), sharey=True)
    for ax, effect, scale in ((nats, facts.WORSE, 1), (stored, facts.STORED, 100)):
        rows = found.frame(effect).set_index("policy").loc[list(TEXTS)]
        _points(ax, scale * rows, [plots.COLOURS[5], plots.COLOURS[0], COLOURS["h2o"]], list(TEXTS.values()))
    nats.axvline(0, color=plots.INK, linewidth=1)
    nats.set(xlabel="nats a token lost of the code", title="asked late")
    stored.set(xlabel="of the code's entries still stored (%)", title="when the question begins", xlim=(-3, 103))
    return figure


def stated_and_recomputed(memory: Findings, gains: Findings) -> Figure:
    """Stated numbers next to what the paper's own figures give: memory saved, and figure 2b.

    memory: of `headlines.memory`; gains: of `headlines.figure_2b`.
    """
    figure, (saved, qwen) = plt.subplots(1, 2, figsize=(11.5, 4.2))
    bars = memory.frame(headlines.SAVING_FROM_BARS)
    bars = bars[bars["benchmark"] == sizes.HEADLINE]
    plots.paper_beside_ours(
        as_stated("memory_saving"),
        dict(zip(bars["method"], 100 * bars["value"], strict=True)),
        labels=NAMES,
        ours_label="from the bars of figure 8",
        paper_label="stated",
        ylabel="memory that MorphKV saves (%)",
        title="LongGenBench: stated and recomputed",
        value_format="{:.1f}",
        ax=saved,
    )
    headline: Any = 100 * papers.figure("morphkv", "headline").set_index("statement")["value"]
    ours = {
        "gain": 100 * gains.row(headlines.QWEN_GAIN).value,
        "saving": 100 * gains.row(headlines.QWEN_SAVING, length="shortest").value,
    }
    plots.paper_beside_ours(
        {"gain": headline["longgenbench_qwen_gain"], "saving": headline["longgenbench_qwen_saving"]},
        ours,
        labels={"gain": "accuracy gained", "saving": "memory saved, at least"},
        ours_label="from table 2 and the settings",
        paper_label="stated",
        ylabel="over SnapKV (%)",
        title="figure 2b: Qwen on LongGenBench",
        value_format="{:.1f}",
        ax=qwen,
    )
    return figure


def _points(ax: Axes, rows: pandas.DataFrame, colours: list[str], labels: list[str]) -> None:
    """A row for each: its value with its interval."""
    for y, colour in enumerate(colours):
        plots.points(ax, rows.iloc[[y]], [y], rows=True, color=colour)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
