"""What the figures of CompilerKV's notebooks show, in sentences that follow from the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvlab.analyses.compilerkv import ablation, held_out, marginal, printed, quality, tables, theorem, veto
from kvlab.analyses.compilerkv.signal import LEVEL, P
from kvlab.analyses.findings import Findings, Row
from kvlab.render.phrases import by_side, listed, moved, number, percent, plural, sentence, side, stated, verdict


def _rivals(rows: Sequence[Row]) -> str:
    return listed([quality.LABELS[str(row.keys["rival"])] for row in rows])


def table_1(findings: Findings, paper: pd.Series) -> list[str]:
    """Filled sets against the competitors; the gated ones; the twin.

    Args:
        findings: of `quality.table_1`.
        paper: of `printed.gains`.
    """
    keys = [{"measure": "kept", "rival": rival} for rival in quality.RIVALS]
    filled = by_side(findings.row(quality.GAIN_FILLED, **key) for key in keys)
    parts = [
        f"{words} {_rivals(filled[where])}"
        for where, words in (
            ("above", "clearly more of the response's attention than"),
            ("below", "clearly less than"),
            ("undecided", "no clearly different share from"),
        )
        if filled[where]
    ]
    leads = {name: gain for name, gain in paper.items() if name in quality.LABELS.values()}
    first = (
        f"With all {len(keys)} methods storing the same, CompilerKV's utility keeps {listed(parts)}; the paper's "
        f"LongBench averages put it ahead of all {len(leads)}, by {100 * min(leads.values()):.1f} to "
        f"{100 * max(leads.values()):.1f} %."
    )
    filled_on_snapkv, gate, twin = (
        findings.row(effect, measure="kept", rival="snapkv")
        for effect in (quality.GAIN_FILLED, quality.GAIN, quality.GAIN_TWIN)
    )
    worth = side(
        twin,
        above="so that the utility itself is worth something",
        below="so that the utility itself is the worse one",
        undecided="so that the two utilities cannot be told apart",
    )
    second = (
        f"On SnapKV it gains {percent(filled_on_snapkv)} with filled sets, {percent(gate)} as its gate decides, which "
        f"leaves entries empty, and {percent(twin)} with SnapKV's own pooling and window, {worth}."
    )
    return [
        first,
        second,
        "Next: whether its lead grows as budgets shrink; whether a task's score follows the attention kept is asked in "
        "tasks_at_small_budgets.",
    ]


def figure_2(findings: Findings) -> list[str]:
    """How curves fall towards small budgets, and how far the gate fills them."""
    keys = [{"rival": rival} for rival in quality.RIVALS]
    flatter = by_side(findings.row(quality.FLATTER_FILLED, **key) for key in keys)
    drop = findings.row(quality.DROP, method="filled")
    parts = [
        f"{words} {_rivals(flatter[where])}"
        for where, words in (("above", "falls clearly less than"), ("below", "falls clearly more than"))
        if flatter[where]
    ]
    told = listed(parts) if parts else "falls neither clearly more nor clearly less than any rival"
    sentences = [
        f"From 256 to 64 entries CompilerKV's filled sets lose {number(drop)} of the response's attention; its curve "
        f"{told}, where figure 2 draws it flatter than every rival's and prints no numbers."
    ]
    clamped = findings.frame(quality.CLAMPED)
    if len(clamped):
        least = clamped.sort_values("budget").iloc[0]
        sentences.append(
            f"At {int(least['budget'])} entries the candidates fill the budget in {least['value']:.0%} of prompts and "
            "layers, "
            + (
                "as the paper says of tight budgets."
                if least["value"] >= 0.995
                else "where the paper says that they always do: the rest of the budget stays empty."
            )
        )
    return [*sentences, "Next: what each of its parts is worth."]


def table_2(findings: Findings, signal: Findings, cells: Findings) -> list[str]:
    """What removing a part costs, and whether the log behind the tables says anything.

    Args:
        findings: of `ablation.table_2`.
        signal: of `signal.of_tables`.
        cells: of `thresholds.cells`.
    """
    raw = findings.row(ablation.LOSS, measure="kept", part="raw_attention")
    worth = side(
        raw,
        above="so that the stabilised utility helps, as in the paper",
        below="so that raw attention keeps more, against the paper",
        undecided="so that neither is clearly better",
    )
    clauses = []
    if "risk/cells" in cells.metrics:
        met = int(cells.metrics["risk/cells"])
        one = (
            ", so that a threshold for the prompt's risk is one threshold, and the comparison with a static one is not "
            "measured"
        )
        clauses.append(
            f"the prompts here fall into {met} visited {plural(met, 'cell')} of risk{one if met < 2 else ''}"
        )
    if ablation.EQUAL_STORAGE.format(measure="kept") in findings.metrics:
        row = findings.row(ablation.EQUAL_STORAGE, measure="kept")
        clauses.append(
            f"at equal storage the gate changes what is kept of the attention by {number(row)} ({verdict(row)})"
        )
    return [
        f"Without the stabilised utility {percent(raw)} of the kept attention is lost, {worth}, whose table 2 loses "
        f"{100 * stated('compilerkv.table2.stabilised_utility'):.1f} % of LongBench's average.",
        heads_signal(signal),
        sentence(clauses),
        "Next: what a threshold can do, and which it would have to be.",
    ]


def heads_signal(signal: Findings) -> str:
    """Whether weights may be read at all."""
    name = P.format(question="heads")
    if name not in signal.metrics:
        return "These tables have no log, so that nothing can be said of their head weights."
    p = signal.metrics[name]
    if p >= LEVEL:
        return (
            f"The log of the head weights holds no signal (p = {p:.2f}): which head has which weight is chance, and "
            "what rests on it is not measured."
        )
    return f"The log of the head weights holds a signal (p = {p:.3f})."


def printed_tables(points: Findings) -> list[str]:
    """Appendix B.1 against table 2."""
    least = points.row(printed.LEAST_POINTS, part="static_threshold").value
    mean = points.row(printed.POINTS, part="static_threshold").value
    return [
        "If top-K always decides under tight budgets (appendix B.1), adaptive and static thresholds keep the same "
        f"tokens, and replacing one by the other costs nothing; table 2 prints a loss of {mean:.2f} points in the "
        f"mean, and of at least {least:.2f}.",
        "One of the two statements cannot be true; which one, the published code cannot tell, since its runs use no "
        "thresholds.",
        "Next: whether table 1's leads are seen in the attention that is kept.",
    ]


def admitted(table: pd.DataFrame) -> list[str]:
    """How thresholds lie beside those that would matter."""
    needed = table["needed"].to_numpy()
    strict = (table["threshold"].to_numpy() > needed).mean()
    return [
        f"To let exactly the budget pass, a threshold must lie near {np.median(needed):.4f} of the layer's largest "
        "score (median): the first token draws so much that a threshold of 0.1 leaves "
        f"{table['at_tenth'].to_numpy().mean():.0f} tokens.",
        f"In {strict:.0%} of prompts and layers the table's threshold is stricter than that, and part of the budget "
        "stays empty, where appendix B.1 has the budget always decide."
        if strict
        else "In none is the table's threshold stricter than that: the budget always decides, as appendix B.1 says.",
        "Next: which step from its utility to SnapKV's gains and which loses.",
    ]


def steps(findings: Findings, percent_of_prompt: int) -> list[str]:
    """Which step from CompilerKV to SnapKV gains and which loses."""
    one = findings.row(ablation.ONE_SET_COSTS, percent=percent_of_prompt)
    norms = findings.row(ablation.NORMS_SPARE, percent=percent_of_prompt)
    mean = findings.row(ablation.MODEL_MEAN_SPARES, percent=percent_of_prompt)
    last = findings.row(ablation.AGAINST_SNAPKV, percent=percent_of_prompt)
    words = "spare attention", "cost attention", "make no clear difference"
    single = "spares attention", "costs attention", "makes no clear difference"
    return [
        f"At {percent_of_prompt} % of the prompt value norms {side(norms, *words)} ({number(norms)}), and the mean "
        f"over the model instead of the layer's own {side(mean, *single)} ({number(mean)}); section 4.2 counts on "
        "both.",
        "One set for all heads of a layer, where a set for each KV head is stored at the same price, "
        f"{moved(one, above='costs', below='spares', undecided='changes by')}; against the whole of SnapKV, "
        "CompilerKV's utility "
        f"{side(last, above='loses more', below='loses less', undecided='loses about as much')} ({number(last)}): "
        + side(
            last,
            above="pooling and a set for each head are worth more than its utility.",
            below="what it gains lies in keeping no window.",
            undecided="what it wins without a window it loses by its one set.",
        ),
        "Next: whether its most reliable heads have the veto that section 4.3 gives them.",
    ]


def protected(findings: Findings, signal: Findings) -> list[str]:
    """Section 4.3's veto."""
    if veto.DIFFERENCE not in findings.metrics:
        return ["Without tables all heads weigh alike, and none has a veto."]
    row = findings.row(veto.DIFFERENCE)
    effect = side(
        row,
        above="more than with equal weights, as section 4.3 says",
        below="less than with equal weights, against section 4.3",
        undecided="no clear difference from equal weights, where section 4.3 promises more",
    )
    ours = findings.row(veto.PROTECTED, method="compilerkv")
    return [
        f"Of the tokens that a layer's most reliable head attends to most, {percent(ours)} are kept: {effect} "
        f"({number(row)}).",
        heads_signal(signal),
        "Next: what of theorem 4.1 can fail on real attention.",
    ]


def theorem_4_1(findings: Findings) -> list[str]:
    """What of the theorem can fail, and does."""
    broken = findings.row(theorem.VIOLATED)
    ratio = findings.row(theorem.LARGEST_RATIO).value
    return [
        "That the l1 distance is twice the discarded mass is an identity, and the l2 bound cannot be broken (here it "
        f"is reached to {ratio:.0%}).",
        f"The step from mass to utility (A2), on which theorem 4.1 rests, can fail, and does for {percent(broken)} of "
        "the heads: a mean over the whole model bounds no single head.",
        "Next: whether the tables can be learnt at all, in compilerkv_tables.",
    ]


# ------------------------------------------------------------------------------------------------- the learnt tables


def signals(findings: Findings) -> list[str]:
    """What a log of joint trials can teach at all."""
    names = {"heads": "the heads' weights", "thresholds": "the layers' thresholds", "risk": "the prompt's risk"}
    asked = {
        key: findings.metrics[P.format(question=key)] for key in names if P.format(question=key) in findings.metrics
    }
    seen = [f"{names[key]} (p = {p:.3f})" for key, p in asked.items() if p < LEVEL]
    unseen = [f"{names[key]} (p = {p:.2f})" for key, p in asked.items() if p >= LEVEL]
    return [
        f"The log of joint trials holds a signal on {listed(seen)}." if seen else "",
        f"It holds none on {listed(unseen)}: what rests on these is not measured, for any table taught by chance "
        "would do as well."
        if unseen
        else "",
        "The paper learnt from about 50,000 prompts, and whether so many would teach it, this log cannot say; next, "
        "whether the weights have the structure of figure A2.",
    ]


def figure_a2(findings: Findings, signal: Findings) -> list[str]:
    """The head table.

    Args:
        findings: of `tables.structure` and `learning.reliability`.
        signal: of `signal.signal`.
    """
    middle = tables.MIDDLE_LESS_REST in findings.metrics
    halves = "heads/split_half" in findings.metrics
    lower = middle and side(
        findings.row(tables.MIDDLE_LESS_REST),
        above="higher, where figure A2 draws low ones there",
        below="lower, as figure A2 draws them",
        undecided="not told apart, where figure A2 draws low ones there",
    )
    return [
        f"Weights of the middle layers less those of the rest are {number(findings.row(tables.MIDDLE_LESS_REST))}: "
        f"{lower}."
        if middle
        else "",
        "Two halves of the contexts agree on a head's weight with a correlation of "
        f"{number(findings.row('heads/split_half'))}, where the paper sees a clear structure."
        if halves
        else "",
        heads_signal(signal),
        "Next: whether the thresholds follow the prompt's risk as figure A3 draws them.",
    ]


def figure_a3(findings: Findings) -> list[str]:
    """The threshold table."""
    visited = findings.row(tables.VISITED).value
    slope = tables.ENTROPY_SLOPE in findings.metrics
    return [
        f"Contexts fell into {visited:.0%} of the cells of risk.",
        f"Over entropy thresholds change by {number(findings.row(tables.ENTROPY_SLOPE))} a nat, "
        + side(
            findings.row(tables.ENTROPY_SLOPE),
            above="a rise where figure A3 draws a fall.",
            below="a fall, as figure A3 draws it.",
            undecided="neither a rise nor a fall, where figure A3 draws a fall.",
        )
        if slope
        else "With contexts in one bin of entropy there is no slope to see, where figure A3 draws a fall.",
        "Next: what conservatism does to a table; what the penalty of equation 14 does to this slope is drawn below.",
    ]


def alpha(findings: Findings) -> list[str]:
    """What conservatism does to an even log and to one that prefers the neutral action."""
    rows = findings.table.pivot_table(index=["log", "alpha"], values=["changed", "neutral"])
    even, small = (rows.loc[log] for log in ("even_log", "neutral_log"))
    return [
        f"Where all actions were tried alike, the largest alpha changes {even['changed'].iloc[-1]:.0%} of the table: "
        "it shrinks values and leaves their order.",
        f"Where the log prefers the neutral action, {small['neutral'].iloc[0]:.0%} of the states are neutral without "
        f"it and {small['neutral'].iloc[-1]:.0%} with the largest: alpha is then a preference for what was done, not "
        "a test of evidence.",
        "Section 3.2 has alpha control how conservative a table is; next, whether learnt tables serve text that they "
        "were not learnt from.",
    ]


def held_out_gains(findings: Findings, signal: Findings) -> list[str]:
    """What learnt tables are worth in likelihood."""
    heads = findings.row(held_out.GAIN, measure="nll", comparison="heads_over_neutral")
    gains = [f"the learnt weights save {number(heads)} nats a token against equal ones ({verdict(heads)})"]
    both = findings.found(held_out.GAIN, measure="nll", comparison="equal/over_neutral")
    if both is not None:
        gains.append(f"both tables together {number(both)} against none of them at equal storage ({verdict(both)})")
    return [
        f"On held-out text {listed(gains)}.",
        f"Table 2 loses {100 * stated('compilerkv.table2.head_table'):.1f} % of LongBench's average without the table "
        "of heads.",
        heads_signal(signal),
        "Next: the same learnt one head at a time, as section 4.3 credits them.",
    ]


def alone_gains(findings: Findings, signal: Findings) -> list[str]:
    """What tables from marginal contributions are worth.

    Args:
        findings: of `alone.held_out`.
        signal: of `alone.signal`.
    """
    name = P.format(question="alone_heads")
    p = signal.metrics.get(name)
    rows = findings.frame(marginal.GAIN)
    budget = max(rows["budget"].tolist())
    changed = findings.row(marginal.CHANGED, budget=budget).value
    heads, risk = (findings.row(marginal.GAIN, comparison=kind, budget=budget) for kind in ("heads", "risk"))
    without = 100 * stated("compilerkv.table2.head_table"), 100 * stated("compilerkv.table2.risk_gating")
    return [
        f"One head at a time, the log {'holds a' if p < LEVEL else 'holds no'} signal on the heads' weights (p = "
        f"{p:.3f})."
        if p is not None
        else "",
        f"At {budget} entries {changed:.0%} of the heads get another weight than 1, and on prompts held out these "
        f"keep {number(heads)} more of the attention than equal weights ({verdict(heads)}); thresholds that follow the "
        f"risk gain {number(risk)} on static ones at equal storage ({verdict(risk)}).",
        f"Table 2 loses {without[0]:.1f} % of LongBench's average without the table of heads and {without[1]:.1f} % "
        "with static thresholds.",
        "Next: what the penalty on the budget's deviation decides.",
    ]


def penalties(findings: Findings) -> list[str]:
    """Equation 14 decides the thresholds."""
    told = []
    for log, rows in findings.table.groupby("log", sort=False):
        rows = rows.sort_values("penalty")
        first, last, slopes = rows.iloc[0], rows.iloc[-1], rows["slope"].to_numpy()
        turns = (slopes < 0).any() and (slopes > 0).any()
        told.append(
            f"in the {log} log the mean threshold is {first['threshold']:.4f} with a penalty of {first['penalty']:g} "
            f"and {last['threshold']:.4f} with {last['penalty']:g}"
            + (", and its slope over entropy changes its sign on the way" if turns else "")
        )
    return [
        sentence(told),
        "A threshold only turns tokens away, so that how strict it is follows from the penalty, which the text at "
        "hand does not give: figure A3 cannot be tested without it.",
        "Next: whether the tables pay on tasks, in tasks_at_small_budgets.",
    ]
