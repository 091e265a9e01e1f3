"""DapQ's figures from the findings of `kvlab.analyses.dapq`, with the paper's printed values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from kvlab import papers
from kvlab.analyses.dapq import control, drafted, position, pseudo, recall
from kvlab.render import theme
from kvlab.render.figures import plots

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from kvlab.analyses.findings import Findings

CONDITIONS = {"sc_sp": "SC & SP", "dc_sp": "DC & SP", "sc_dp": "SC & DP", "dc_dp": "DC & DP"}
RANDOM_CONDITIONS = {
    "dc_sp": "DC & SP",
    "sc_dp_m": "SC & DP\n[0, m]",
    "dc_dp_m": "DC & DP\n[0, m]",
    "sc_dp_100": "SC & DP\n[0, 100]",
    "dc_dp_100": "DC & DP\n[0, 100]",
}
POLICIES = {
    "dapq": "DapQ, random content",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "streamingllm": "StreamingLLM",
    "pyramidkv": "PyramidKV",
    "lacache": "LaCache",
    "h2o_prefill": "H2O at the prefill",
}
COLOURS = theme.colours(POLICIES)
ENTRIES = "entries for each layer and KV head"
CONTENTS = {"true": "the response", "last": "the prompt's end", "random": "random", "sentence": "the sentence"}
SNAPKV_WINDOW = 32  # tokens, by its authors' settings
MEASURES = {"similarity": "cosine with the true queries", "recall": "recall of the gold top-k"}


def table_1(findings: Findings, model: str) -> Figure:
    """Table 1 after and before RoPE: the paper's cosines next to those of `model`."""
    printed = papers.figure("dapq", "table1").set_index("condition")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for ax, (rope, when) in zip(axes, {"post": "after RoPE", "pre": "before RoPE"}.items(), strict=True):
        ours, intervals = plots.by_key(findings.frame(position.SIMILARITY).query("rope == @rope"), "condition")
        plots.paper_beside_ours(
            printed[rope].to_dict(),
            ours,
            intervals,
            ylabel="cosine with the true decoding queries" if rope == "post" else "",
            title=f"Table 1, {when}",
            labels=CONDITIONS,
            paper_label="paper (Llama-3-8B)",
            ours_label=model,
            ax=ax,
        )
    return figure


def figure_2a(findings: Findings) -> Figure:
    """Figure 2a: the cosines of all trials of all documents, a box for each condition."""
    post = findings.table.query("rope == 'post'")
    trials = post.groupby("condition").size().max()
    figure, ax = plt.subplots()
    plots.boxes(
        post,
        x="condition",
        y="similarity",
        order=list(RANDOM_CONDITIONS),
        labels=RANDOM_CONDITIONS,
        ylabel="post-RoPE cosine with the true queries",
        title=f"Figure 2a: {trials} trials for each condition, {post['document'].nunique()} documents",
        ax=ax,
    )
    return figure


def figure_2b(findings: Findings) -> Figure:
    """Figure 2b: the cosine against the assigned position, a curve for each context, SnapKV's place on it ringed."""
    contexts = findings.table.groupby("context", sort=False)["document"]
    single_document = [context for context, documents in contexts if len(set(documents)) == 1]
    names = {
        str(context): f"{context} tokens{', one document' * (context in single_document)}" for context, _ in contexts
    }
    figure, ax = plt.subplots()
    curves = position.averaged(findings.table)
    plots.lines(
        curves,
        x="start",
        y="similarity",
        hue="context",
        low="low",
        high="high",
        names=names,
        xlabel="position assigned to the first pseudo-query",
        ylabel="post-RoPE cosine with the true queries",
        title="Figure 2b: the true content, put elsewhere",
        ax=ax,
    )
    # So far before the response the window of SnapKV's paper ends, on a curve that is steep there.
    snapkv = curves[curves["offset"] == SNAPKV_WINDOW]
    if len(snapkv):
        label = f"{SNAPKV_WINDOW} tokens off, as SnapKV's window"
        ring = {"facecolors": "none", "edgecolors": plots.EDGE, "linewidths": 1.6, "zorder": 4}
        ax.scatter(snapkv["start"], snapkv["similarity"], s=130, label=label, **ring)
        ax.legend(**plots.BELOW)
    return figure


def control_cells(findings: Findings, measure: str = "similarity") -> Figure:
    """The same contents at the response's positions and one window before: `control.similarity` or `control.recall`."""
    cells = findings.frame(control.VALUE).query("measure == @measure and place != 'start'")
    effects = findings.frame(control.POSITION).query("measure == @measure")
    names = {"right": "where the response will be (L)", "back": "one window before (L - 32)"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), width_ratios=[1.6, 1])
    plots.bars(
        cells,
        x="content",
        hue="place",
        names=names,
        labels={content: CONTENTS[content] for content in cells["content"].unique()},
        xlabel="",
        ylabel=MEASURES[measure],
        title="The same tokens in two places",
        ax=left,
    )
    left.legend(**plots.BELOW)
    positions = range(len(effects))
    plots.points(right, effects, positions)
    content = findings.row(control.CONTENT, measure=measure, place="right")
    right.axhline(content.value, color=plots.COLOURS[1], linestyle="--", label="worth of the true content at L")
    right.axhline(0, color=plots.EDGE, linewidth=1)
    right.set_xticks(positions, [CONTENTS[name] for name in effects["content"]])
    right.set_ylabel(f"{MEASURES[measure]}: L less L - 32")
    right.set_title("Worth of the position")
    right.legend(**plots.BELOW)
    return figure


def head_map(heads: pandas.DataFrame) -> Figure:
    """The worth of position and content in each head.

    Args:
        heads: from `control.by_head`.
    """
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.16 * heads["layer"].nunique() + 2.4))
    most = float(heads[["position", "content"]].abs().to_numpy().max())
    titles = {"position": "position: L less L - 32", "content": "content: true less random"}
    for ax, (column, title) in zip(axes, titles.items(), strict=True):
        plots.heatmap(
            heads.pivot(index="layer", columns="head", values=column),
            xlabel="query head",
            ylabel="layer",
            unit="cosine with the true queries",
            title=title,
            diverging=True,
            limits=(-most, most),
            ax=ax,
        )
    return figure


def same_pooling(findings: Findings, window: int) -> Figure:
    """DapQ's lead in recall of the retained sets, with the same pooling on both sides."""
    leads = findings.frame(recall.LEAD).query("policy in @recall.SAME and window == @window")
    figure, ax = plt.subplots(figsize=(7.4, 4.2))
    plots.estimates(
        leads,
        x="budget",
        hue="policy",
        names={"snapkv_raw": "raw against raw", "snapkv_pooled": "pooled against pooled, both windows kept"},
        xlabel=ENTRIES,
        ylabel="DapQ less SnapKV, paired by document",
        title="Recall of the retained sets, same pooling on both sides",
        ax=ax,
    )
    ax.axhline(0, color=plots.EDGE, linewidth=1)
    plots.doublings(ax, sorted(leads["budget"].unique()))
    return figure


def mutual(findings: Findings) -> Figure:
    """Draw the gain of a softmax over the prompt alone against that of the pass itself, by number of pseudo-queries."""
    gains = findings.frame(pseudo.MUTUAL)
    figure, ax = plt.subplots(figsize=(7.4, 4.2))
    plots.estimates(
        gains,
        x="length",
        hue="measure",
        names={"recall": "recall", "mass_lost": "attention mass"},
        xlabel="pseudo-queries",
        ylabel="over the prompt alone less over all",
        title="Cost of mutual attention",
        ax=ax,
    )
    ax.axhline(0, color=plots.EDGE, linewidth=1)
    plots.doublings(ax, sorted(gains["length"].unique()))
    return figure


def against_drafts(findings: Findings) -> Figure:
    """DapQ, LAQ++ and SnapKV compared: recall and the mass lost, by budget."""
    kept, names = findings.frame(drafted.KEPT), {"dapq": "DapQ", "laq": "LAQ++", "laq_raw": "its draft alone"}
    names["snapkv"] = "SnapKV"
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4))
    labels = {"recall": "recall of the gold top-k", "mass_lost": "attention mass lost"}
    for ax, (measure, label) in zip(axes, labels.items(), strict=True):
        part = kept.loc[kept["measure"] == measure]
        title = "Pseudo-queries against a drafted answer" if measure == "recall" else "Attention mass lost by eviction"
        plots.estimates(
            part,
            x="budget",
            hue="policy",
            names=names,
            colours=theme.colours(names),
            xlabel=ENTRIES,
            ylabel=label,
            title=title,
            ax=ax,
        )
        plots.doublings(ax, sorted(part["budget"].unique()))
    return figure


def figure_3(findings: Findings, window: int, budget: int) -> Figure:
    """Figure 3: window recall along the window, at `budget` entries, and along the budget, at a window of `window`."""
    # PyramidKV ranks as SnapKV does, and H2O at the prefill as H2O; LaCache ranks nothing.
    names = {**POLICIES, "snapkv": "SnapKV (and PyramidKV)"}
    for name in ("pyramidkv", "h2o_prefill", "lacache"):
        del names[name]
    recalls = findings.frame(recall.RECALL).query("measure == 'window_recall' and policy in @names.keys()")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), sharey=True)
    plots.estimates(
        recalls.loc[recalls["budget"] == budget],
        x="window",
        hue="policy",
        names=names,
        colours=COLOURS,
        xlabel="pseudo-queries or prompt tokens in the window",
        ylabel="window recall of the gold top-k",
        title=f"Figure 3: along the window, {budget} entries",
        ax=left,
    )
    plots.estimates(
        recalls.loc[recalls["window"] == window],
        x="budget",
        hue="policy",
        names=names,
        colours=COLOURS,
        xlabel=ENTRIES,
        ylabel="",
        title=f"Along the budget, a window of {window}",
        ax=right,
    )
    plots.doublings(left, sorted(recalls.loc[recalls["budget"] == budget, "window"].unique()))
    plots.doublings(right, sorted(recalls.loc[recalls["window"] == window, "budget"].unique()))
    left.set_ylim(0, 1)
    left.legend().remove()
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def retained_sets(findings: Findings, window: int) -> Figure:
    """Recall of the sets that the policies keep, by budget, and DapQ's lead over SnapKV by both kinds of recall."""
    recalls = findings.frame(recall.RECALL).query("measure == 'recall' and window == @window")
    leads = findings.frame(recall.LEAD).query("policy == 'snapkv' and window == @window")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4))
    plots.estimates(
        recalls,
        x="budget",
        hue="policy",
        names=POLICIES,
        colours=COLOURS,
        xlabel=ENTRIES,
        ylabel="recall of the retained set",
        title="The sets that are kept",
        ax=left,
    )
    left.set_ylim(0, 1)
    left.legend(fontsize=9, ncols=2, loc="upper left")
    plots.estimates(
        leads.sort_values("measure", ascending=False),
        x="budget",
        hue="measure",
        names={"window_recall": "raw window scores", "recall": "retained sets"},
        xlabel=ENTRIES,
        ylabel="DapQ less SnapKV, paired by document",
        title="DapQ's lead over SnapKV",
        ax=right,
    )
    right.axhline(0, color=plots.EDGE, linewidth=1)
    for ax in (left, right):
        plots.doublings(ax, sorted(recalls["budget"].unique()))
    return figure


def figure_6a(findings: Findings) -> Figure:
    """Figure 6a: recall by content and budget, and how much it varies over the contents next to the paper's number."""
    recalls = findings.frame(pseudo.CONTENT).query("measure == 'recall'")
    variation, intervals = plots.by_key(findings.frame(pseudo.VARIATION).query("measure == 'recall'"), "budget", 100)
    printed = papers.figure("dapq", "section6_1").set_index("quantity").at["coefficient_of_variation", "value"]
    order, budgets = list(recalls["content"].unique()), list(variation)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4), width_ratios=[2.4, 1])
    for number, budget in enumerate(budgets):
        part = recalls.loc[recalls["budget"] == budget]
        xs = [order.index(content) + 0.16 * (number - (len(budgets) - 1) / 2) for content in part["content"]]
        plots.points(left, part, xs, color=plots.COLOURS[number], label=f"{budget} entries")
    # On its right is the content at the wrong position.
    left.axvline(len(order) - 1.5, color=theme.RULE, linewidth=1)
    left.set_xticks(range(len(order)), [content.replace(" at 0", "\nat 0-31") for content in order])
    left.set_ylim(0, 1)
    left.set_ylabel("recall of the gold top-k")
    left.set_title("Figure 6a: 32 pseudo-queries of different content")
    left.legend(ncols=len(budgets), loc="upper center")
    plots.paper_beside_ours(
        dict.fromkeys(budgets, 100 * printed),
        variation,
        intervals,
        ylabel="coefficient of variation over contents (%)",
        title="Spread over the contents",
        labels={budget: f"{budget} entries" for budget in budgets},
        paper_label="paper (scores)",
        ours_label="here (recall)",
        value_format="{:.1f}",
        ax=right,
    )
    return figure


def figure_6b(findings: Findings, budget: int) -> Figure:
    """Figure 6b: recall of the gold sets of shorter and longer responses, and the mass lost, by the number of
    pseudo-queries."""
    recalls = pseudo.by_length(findings, "recall").sort_values("response", ascending=False, kind="stable")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4))
    plots.estimates(
        recalls,
        x="length",
        hue="response",
        names={response: f"response of {response} tokens" for response in recalls["response"].unique()},
        xlabel="pseudo-queries",
        ylabel="recall of the gold top-k",
        title=f"Figure 6b: length, {budget} entries",
        ax=left,
    )
    plots.estimates(
        pseudo.by_length(findings, "mass_lost", aligned=True),
        x="length",
        xlabel="pseudo-queries",
        ylabel="attention mass lost, documents aligned",
        title="Attention mass lost by eviction",
        ax=right,
    )
    for ax in (left, right):
        plots.doublings(ax, sorted(recalls["length"].unique()))
    return figure
