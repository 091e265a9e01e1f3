"""What the figures on token budgets show, in sentences that follow from the numbers."""

from __future__ import annotations

from typing import Any

from kvlab import papers
from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.rocketkv import design
from kvlab.analyses.rocketkv import printed as tables
from kvlab.analyses.rocketkv.budgets import (
    AT_A_QUARTER,
    AT_TIGHTEST,
    FINDING,
    FIRST_LAYERS,
    GAIN,
    GAIN_AT_TIGHTEST,
    NAMES,
    NEXT_BEST,
    RIVALS,
    VALUE,
    WIDENING,
)
from kvlab.render import phrases

ERROR = "output_error"


def figure_1(findings: Findings) -> list[str]:
    """Is it finding the tokens that fails, or reading few of them?"""
    share, quarter = findings.row(FINDING, measure="mass_lost"), findings.found(AT_A_QUARTER, measure="mass_lost")
    oracle = findings.row(AT_TIGHTEST, measure="mass_lost", method="exact_topk")
    decided = phrases.side(
        share,
        above="so that at the smallest budget it is finding the tokens that fails, as the paper says",
        below="so that at the smallest budget it is reading so few tokens that loses most, other than the paper says",
        undecided="which leaves open whether finding the tokens or reading few of them loses more",
        at=0.5,
    )
    paper: Any = papers.figure("rocketkv", "figure1")
    smallest = paper[paper["budget"] == paper["budget"].min()].set_index("method")["qasper"]
    full = paper.set_index("method").loc["full", "qasper"]
    return [
        f"At the largest compression, {_tightest(findings):g}, Exact-TopK loses {phrases.number(oracle)} of the "
        f"attention; the best of the four practical methods loses more, and {phrases.percent(share)} of its loss is "
        f"not Exact-TopK's, {decided}.",
        f"In F1, at the smallest budget of figure 1 Exact-TopK has {smallest['exact_topk']:.1f} of the full cache's "
        f"{full:.1f}, and the best of the four {smallest[list(RIVALS)].max():.1f}.",
        ""
        if quarter is None
        else "With four times the budget "
        + phrases.side(
            quarter,
            above="the best of the four still loses more than Exact-TopK with one, as in figure 1.",
            below="the best of the four loses less than Exact-TopK with one, where in figure 1 it scores lower.",
            undecided="the best of the four is not told apart from Exact-TopK with one; in figure 1 it scores lower.",
        ),
        "Next: how near RocketKV comes to it, among all methods.",
    ]


def figure_4(findings: Findings) -> list[str]:
    """Who loses least at the smallest budget, and do Quest and SparQ miss everything?"""
    tightest = _tightest(findings)
    levels = findings.frame(AT_TIGHTEST)
    compared: Any = levels[(levels["measure"] == ERROR) & levels["method"].isin(("rocketkv", *RIVALS))]
    order = compared.sort_values("value")["method"]
    ranked = phrases.listed([NAMES[method] for method in order])
    fails = [
        f"{NAMES[method]}'s error, {phrases.number(row)}, is "
        + phrases.side(
            row,
            above="larger than that of an output of zeros",
            below="smaller than that of an output of zeros",
            undecided="not told apart from that of an output of zeros",
            at=1.0,
        )
        for method in ("quest", "sparq")
        for row in [findings.row(AT_TIGHTEST, measure=ERROR, method=method)]
    ]
    first = findings.found(FIRST_LAYERS, measure=ERROR)
    return [
        f"At a compression of {tightest:g}, the largest at which Quest can read one of its pages, the mean output "
        f"errors are in the order {ranked}.",
        f"{fails[0]}; {fails[1]}; section 4.2 has both miss nearly everything with 256 of 16,000 tokens and more.",
        ""
        if first is None
        else f"RocketKV's error in the first two layers less that in the others is {phrases.number(first)}: "
        + phrases.side(
            first,
            above="they lose more, so that leaving them whole, as prior work does, would pay, against appendix A.1.",
            below="they lose less, so that they need not be left whole, as appendix A.1 says of models with grouped "
            "queries.",
            undecided="whether they need to be left whole, which appendix A.1 denies, stays open.",
        ),
        "Next: how sure the differences are, document by document.",
    ]


def gains(findings: Findings) -> list[str]:
    """RocketKV against the best of the others, at the smallest budget and from the largest to it."""
    tightest = findings.row(GAIN_AT_TIGHTEST, measure=ERROR, better="rocketkv", other=NEXT_BEST)
    every: Any = findings.frame(GAIN).query("measure == @ERROR and better == 'rocketkv' and other == @NEXT_BEST")
    wins = int((every["low"] > 0).sum())
    widening = findings.found(WIDENING, measure=ERROR, better="rocketkv", other=NEXT_BEST)
    return [
        f"At the largest compression RocketKV's output error is {phrases.number(tightest)} below the best rival's: "
        + phrases.side(tightest, above="it is ahead", below="it is behind", undecided="the two are not told apart")
        + f"; it is clearly ahead at {wins} of {len(every)} compressions, where figure 4 has it ahead at all.",
        ""
        if widening is None
        else "From the least to the largest compression the lead "
        + phrases.side(
            widening,
            above="grows, as section 4.2 says",
            below="shrinks, where section 4.2 says that it grows",
            undecided="neither clearly grows nor shrinks, where section 4.2 says that it grows",
        )
        + f" ({phrases.number(widening)}).",
        "Next: what its second stage is worth alone, and whether the lead lasts on longer prompts.",
    ]


def figure_8(findings: Findings) -> list[str]:
    """Hybrid attention against its two halves."""
    told, everywhere = [], True
    for half, name in (("quest", "pages alone (Quest)"), ("sparq", "dimensions alone (SparQ)")):
        row = findings.row(GAIN_AT_TIGHTEST, measure=ERROR, better="hybrid", other=half)
        each = findings.frame(GAIN).query("measure == @ERROR and better == 'hybrid' and other == @half")
        behind = [f"{c:g}" for c in each.loc[each["high"] < 0, "compression"]]
        where = f", and behind at compressions of {phrases.listed(behind)}" if behind else ""
        everywhere = everywhere and not behind
        told.append(f"{phrases.number(row)} over {name}, {phrases.verdict(row)}{where}")
    both = [findings.row(GAIN_AT_TIGHTEST, measure=ERROR, better="hybrid", other=half) for half in ("quest", "sparq")]
    ahead = all(row.low is not None and row.low > 0 for row in both)
    return [
        f"Hybrid attention's gain in output error at the largest compression is {'; '.join(told)}.",
        "Two dimensions of sparsity find more than one does there, in all cases, as section 4.4.3 says."
        if ahead and everywhere
        else "Two dimensions of sparsity find more than one does there, not in all cases, where section 4.4.3 says all."
        if ahead
        else "So two dimensions of sparsity are not better than one in all cases, where section 4.4.3 says all; what "
        "SparQ has besides is the mean value in place of what it does not read.",
        "Next: whether RocketKV's lead becomes wider on longer sequences.",
    ]


def longer(findings: Findings) -> list[str]:
    """Does the lead become wider at longer sequences?"""
    ends = {end: findings.row(design.LONGER_LEAD, measure=ERROR, end=end) for end in ("shorter", "longer")}
    tokens: Any = findings.table.groupby("end")["length"].mean()
    wider = findings.row(design.LONGER_LEAD_GROWS, measure=ERROR)
    return [
        f"At one token budget RocketKV's lead over the best rival is {phrases.number(ends['shorter'])} on prompts of "
        f"{tokens['shorter']:.0f} tokens and {phrases.number(ends['longer'])} on prompts of {tokens['longer']:.0f}.",
        phrases.side(
            wider,
            above="It becomes wider with the prompt, as section 4.2 says of RULER.",
            below="It becomes narrower with the prompt, where the paper's becomes wider.",
            undecided="Whether it becomes wider with the prompt, as section 4.2 says of RULER, is left open.",
        ),
        "Whether that goes on to the paper's 16,000 to 96,000 tokens takes a model that reads them; next, what each "
        "point costs.",
    ]


def costs(findings: Findings) -> list[str]:
    """Equal budgets are not equal caches."""
    tightest = _tightest(findings)
    stored = {m: findings.row(VALUE, measure="stored", method=m, compression=tightest) for m in ("rocketkv", "sparq")}
    return [
        f"At the same budget, a {tightest:g}th of the sequence read at each step, RocketKV stores "
        f"{phrases.percent(_bare(stored['rocketkv']))} of the full cache and SparQ "
        f"{phrases.percent(_bare(stored['sparq']))}.",
        "So a comparison at equal budgets, as the paper's, compares traffic; who may not store the whole cache should "
        "compare at equal bytes, as all_together does; next, what the paper's own tables say.",
    ]


def printed(findings: Findings) -> list[str]:
    """What the paper's sentences say of its own tables."""
    rivals = {
        label: findings.row(tables.NOT_BEHIND, benchmark=name, method="rocketkv", others="rivals")
        for name, label in (("longbench", "LongBench"), ("ruler", "RULER"), ("needle", "needles"))
    }
    shares = phrases.listed([f"{phrases.percent(row)} on {label}" for label, row in rivals.items()])
    behind = findings.frame(tables.BEHIND).sort_values("value").tail(1)
    wider = findings.row(tables.WIDER)
    largest = ""
    if len(behind):
        worst = behind.iloc[0]
        largest = f"; the largest gap is to {NAMES[worst['method']]} in {worst['cell']}, {worst['value']:.1f} points"
    return [
        f"The share of the paper's own cells in which RocketKV is not behind any rival is {shares}, where section 4 "
        f"has it ahead of all{largest}.",
        f"On RULER its lead is larger at the longest sequences than at the shortest in {phrases.percent(wider)} of the "
        "cells of models and budgets, where the text says that the gaps become wider.",
        "Next: what each part of the design is worth, in rocketkv_design.",
    ]


def _tightest(findings: Findings) -> float:
    """The largest compression."""
    compressions: Any = findings.table["compression"]
    return float(compressions.max())


def _bare(row: Row) -> Row:
    """Without its interval, of bytes that hardly differ between documents."""
    return Row(row.effect, row.keys, row.value)
