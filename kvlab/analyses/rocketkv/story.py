"""What the figures on token budgets show, in sentences that follow from the numbers."""

from __future__ import annotations

from typing import Any

from kvlab.analyses import telling
from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.rocketkv import lengths
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

ERROR = "output_error"


def figure_1(findings: Findings) -> list[str]:
    """Is it finding the tokens that fails, or reading few of them?"""
    share, quarter = findings.row(FINDING, measure="mass_lost"), findings.found(AT_A_QUARTER, measure="mass_lost")
    oracle = findings.row(AT_TIGHTEST, measure="mass_lost", method="exact_topk")
    decided = telling.side(
        share,
        above="so that at the smallest budget it is finding the tokens that fails, as the paper says",
        below="so that at the smallest budget it is reading so few tokens that loses most, other than the paper says",
        undecided="which leaves open whether finding the tokens or reading few of them loses more",
        at=0.5,
    )
    told = [
        f"At the largest compression, {_tightest(findings):g}, Exact-TopK loses {telling.number(oracle)} of the "
        "attention.",
        f"The best of the four practical methods loses more, and {telling.percent(share)} of its loss is not "
        "Exact-TopK's, "
        f"{decided}.",
    ]
    if quarter is not None:
        words = telling.side(
            quarter,
            above="Exact-TopK still loses less than the best of the four with four times its budget, as in the paper.",
            below="With four times the budget the best of the four loses less than Exact-TopK, where in the paper's "
            "figure "
            "it scores lower: half of such a budget, spent on reading, is enough here.",
            undecided="With four times the budget the best of the four and Exact-TopK are not told apart.",
        )
        told.append(words)
    return told


def figure_4(findings: Findings) -> list[str]:
    """Who loses least at the smallest budget, and do Quest and SparQ miss everything?"""
    tightest = _tightest(findings)
    levels = findings.frame(AT_TIGHTEST)
    compared: Any = levels[(levels["measure"] == ERROR) & levels["method"].isin(("rocketkv", *RIVALS))]
    order = compared.sort_values("value")["method"]
    ranked = telling.listed([NAMES[method] for method in order])
    fails = [
        f"{NAMES[method]}'s error, {telling.number(row)}, is "
        + telling.side(
            row,
            above="larger than that of an output of zeros",
            below="smaller than that of an output of zeros: it does not miss everything here",
            undecided="not told apart from that of an output of zeros",
            at=1.0,
        )
        for method in ("quest", "sparq")
        for row in [findings.row(AT_TIGHTEST, measure=ERROR, method=method)]
    ]
    told = [
        f"At a compression of {tightest:g}, the largest at which Quest can read one of its pages, the output errors "
        "are "
        f"in the order {ranked}.",
        f"{fails[0]}; {fails[1]}.",
    ]
    first = findings.found(FIRST_LAYERS, measure=ERROR)
    if first is not None:
        told.append(
            f"RocketKV's error in the first two layers less that in the others is {telling.number(first)}: "
            + telling.side(
                first,
                above="they lose more, so that leaving them whole, as prior work does, would pay.",
                below="they lose less, so that they need not be left whole, as the paper says of models with grouped "
                "queries.",
                undecided="whether they need to be left whole stays open.",
            )
        )
    return told


def gains(findings: Findings) -> list[str]:
    """RocketKV against the best of the others, at the smallest budget and from the largest to it."""
    tightest = findings.row(GAIN_AT_TIGHTEST, measure=ERROR, better="rocketkv", other=NEXT_BEST)
    every: Any = findings.frame(GAIN).query("measure == @ERROR and better == 'rocketkv' and other == @NEXT_BEST")
    wins = int((every["low"] > 0).sum())
    widening = findings.found(WIDENING, measure=ERROR, better="rocketkv", other=NEXT_BEST)
    told = [
        f"At the largest compression RocketKV's output error is {telling.number(tightest)} below that of the best "
        "rival: "
        + telling.side(tightest, above="it is ahead.", below="it is behind.", undecided="the two are not told apart."),
        f"It is clearly ahead at {wins} of {len(every)} compressions, where the paper has it ahead of all others at "
        "all.",
    ]
    if widening is not None:
        told.append(
            "From the least to the largest compression the lead "
            + telling.side(widening, above="grows", below="shrinks", undecided="neither clearly grows nor shrinks")
            + f" ({telling.number(widening)}); the next question is whether it lasts on longer prompts."
        )
    return told


def figure_8(findings: Findings) -> list[str]:
    """Hybrid attention against its two halves."""
    told, everywhere = [], True
    for half, name in (("quest", "pages alone (Quest)"), ("sparq", "dimensions alone (SparQ)")):
        row = findings.row(GAIN_AT_TIGHTEST, measure=ERROR, better="hybrid", other=half)
        each = findings.frame(GAIN).query("measure == @ERROR and better == 'hybrid' and other == @half")
        behind = [f"{c:g}" for c in each.loc[each["high"] < 0, "compression"]]
        sentence = (
            f"Against {name} hybrid attention's gain in output error at the largest compression is "
            f"{telling.number(row)}, " + telling.side(row, above="clearly more than none", below="clearly a loss")
        )
        where = f"; at compressions of {telling.listed(behind)} it is behind" if behind else ""
        everywhere = everywhere and not behind
        told.append(f"{sentence}{where}.")
    both = [findings.row(GAIN_AT_TIGHTEST, measure=ERROR, better="hybrid", other=half) for half in ("quest", "sparq")]
    ahead = all(row.low is not None and row.low > 0 for row in both)
    told.append(
        "Two dimensions of sparsity find more than one does there, as the paper says."
        if ahead and everywhere
        else "Two dimensions of sparsity find more than one does there, but not in all cases, as the paper says."
        if ahead
        else "So not in all cases are two dimensions of sparsity better than one, as the paper says; what SparQ has "
        "besides "
        "is the mean value in place of what it does not read."
    )
    return told


def longer(findings: Findings) -> list[str]:
    """Does the lead become wider at longer sequences?"""
    ends = {end: findings.row(lengths.LEAD, measure=ERROR, end=end) for end in ("shorter", "longer")}
    tokens: Any = findings.table.groupby("end")["length"].mean()
    wider = findings.row(lengths.WIDER, measure=ERROR)
    return [
        f"At one token budget RocketKV's lead over the best rival is {telling.number(ends['shorter'])} on prompts of "
        f"{tokens['shorter']:.0f} tokens and {telling.number(ends['longer'])} on prompts of {tokens['longer']:.0f}.",
        telling.side(
            wider,
            above="It becomes wider with the prompt, as the paper says of RULER.",
            below="It becomes narrower with the prompt, where the paper's becomes wider.",
            undecided="Whether it becomes wider with the prompt is not told apart from noise.",
        ),
        "Whether that goes on to the paper's 16,000 to 96,000 tokens takes a model that reads them.",
    ]


def costs(findings: Findings) -> list[str]:
    """Equal budgets are not equal caches."""
    tightest = _tightest(findings)
    stored = {m: findings.row(VALUE, measure="stored", method=m, compression=tightest) for m in ("rocketkv", "sparq")}
    return [
        f"At the same budget, a {tightest:g}th of the sequence read at each step, RocketKV stores "
        f"{telling.percent(_bare(stored['rocketkv']))} of the full cache and SparQ "
        f"{telling.percent(_bare(stored['sparq']))}.",
        "So a comparison at equal budgets compares traffic; who may not store the whole cache should compare at equal "
        "bytes.",
    ]


def printed(findings: Findings) -> list[str]:
    """What the paper's sentences say of its own tables."""
    rivals = {
        label: findings.row(tables.NOT_BEHIND, benchmark=name, method="rocketkv", others="rivals")
        for name, label in (("longbench", "LongBench"), ("ruler", "RULER"), ("needle", "needles"))
    }
    shares = telling.listed([f"{telling.percent(row)} on {label}" for label, row in rivals.items()])
    behind = findings.frame(tables.BEHIND).sort_values("value").tail(1)
    wider = findings.row(tables.WIDER)
    told = [f"In the paper's own tables RocketKV is not behind any rival in {shares} of the cells."]
    if len(behind):
        worst = behind.iloc[0]
        told.append(f"The largest gap is to {NAMES[worst['method']]} in {worst['cell']}, {worst['value']:.1f} points.")
    told.append(
        f"On RULER its lead is larger at the longest sequences than at the shortest at {telling.percent(wider)} of the "
        "budgets that are printed for both, where the text says that the gaps become wider."
    )
    return told


def _tightest(findings: Findings) -> float:
    """The largest compression."""
    compressions: Any = findings.table["compression"]
    return float(compressions.max())


def _bare(row: Row) -> Row:
    """Without its interval, of bytes that hardly differ between documents."""
    return Row(row.effect, row.keys, row.value)
