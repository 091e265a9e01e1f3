"""What the figures on RocketKV's design show, in sentences that follow from the numbers."""

from __future__ import annotations

from typing import Any

from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.rocketkv import design
from kvlab.analyses.rocketkv.budgets import AT_TIGHTEST, GAIN, GAIN_AT_TIGHTEST, VALUE
from kvlab.render import phrases

ERROR = "output_error"


def _gain(findings: Findings, better: str, other: str, under: str = "") -> Row:
    """The gain in output error at the largest compression."""
    return findings.row(under + GAIN_AT_TIGHTEST, measure=ERROR, better=better, other=other)


def figure_6(findings: Findings) -> list[str]:
    """One set for the group, then wide pooling."""
    shared, pooled = _gain(findings, "snapkv_gqa", "snapkv"), _gain(findings, "snapkv_pp", "snapkv_gqa")
    twice = findings.row(design.OVER_CHANCE_AT_TIGHTEST)
    tightest = findings.table["compression"].max()
    return [
        f"At a compression of {tightest:g} one set for the whole group changes SnapKV's output error by "
        f"{phrases.number(shared)} to the better, "
        + phrases.side(
            shared,
            above="which agrees with the paper's figure 6.",
            below="which is a loss, against the paper's figure 6.",
            undecided="which is not told apart from no change.",
        ),
        f"Heads store {phrases.percent(twice)} more of their entries twice than heads that choose blindly would"
        + phrases.side(
            twice, above=", so that there is something to share.", below=".", undecided=": none to speak of."
        ),
        "Wide max pooling on top "
        + phrases.side(pooled, above="helps", below="harms", undecided="neither clearly helps nor harms")
        + f" at this budget ({phrases.number(pooled)}); the paper means it for a coarser first stage, which comes "
        "next.",
    ]


def first_stage(findings: Findings) -> list[str]:
    """Wide pooling where the paper wants it."""
    gain = _gain(findings, "snapkv_pp", "snapkv_gqa", design.FIRST_STAGE)
    return [
        "Where it only leaves the root of the compression, wide max pooling "
        + phrases.side(
            gain,
            above="serves better than SnapKV's narrow average, as the paper says",
            below="serves worse than SnapKV's narrow average, where the paper says better",
            undecided="and SnapKV's narrow average are not told apart",
        )
        + f" (gain in output error {phrases.number(gain)}).",
        "Next: the width alone, where here both the width and the kind of pooling change.",
    ]


def figure_7(findings: Findings) -> list[str]:
    """The best kernel, and whether it grows."""
    best, growth = findings.row(design.BEST_KERNEL_SIZE, end="longest"), findings.row(design.BEST_KERNEL_GROWTH)
    longest = findings.table["length"].max()
    return [
        f"On prompts of {longest:g} tokens the mean error is smallest with a kernel of {phrases.number(best)} tokens, "
        + phrases.side(
            best,
            above="wider than SnapKV's 7",
            below="narrower than SnapKV's 7",
            undecided="which resampled documents do not tell apart from SnapKV's 7",
            at=7.0,
        )
        + f"; {phrases.beside(best, phrases.stated('rocketkv.figure7.optimum'))}.",
        f"From a quarter of the length on, the best kernel grows by {phrases.number(growth)} doublings, "
        + phrases.side(
            growth, above="as figure 7 has it", below="which is no growth", undecided="so growth is undecided"
        )
        + f"; figure 7's grows by {phrases.stated('rocketkv.figure7.grows'):.2f}.",
        "Kernels of some hundred tokens cover a large part of such prompts, and longer ones would tell more; next, "
        "what the design stores.",
    ]


def table_1(findings: Findings) -> list[str]:
    """Formula against tensors."""
    at = findings.table.query("compression == 16").set_index("method")
    ours, paper = at.loc["rocketkv", "storage_measured"], at.loc["rocketkv", "storage_paper"]
    sparq = at.loc["sparq", "storage_measured"]
    return [
        f"At a compression of 16 RocketKV stores {ours:.3f} of the full cache, {ours / paper:.2f} of what table 1's "
        "formula "
        f"says ({paper:.3f}), since minima and maxima are kept of the keys alone.",
        f"SparQ's second copy is of the keys, too, {sparq:.2f} of the full cache where table 1 has "
        f"{phrases.stated('rocketkv.table1.sparq_storage'):.0f}: the paper is too hard on both, itself and its rival.",
        "Next: how the compression is best split between the stages.",
    ]


def splits(findings: Findings) -> list[str]:
    """Is the even split best, and does the first stage keep what matters?"""
    alone = {other: _gain(findings, "split0.5", other) for other in ("split0", "split1")}
    survived = findings.row(AT_TIGHTEST, measure="survived", method="split0.5")
    means = findings.frame(VALUE).query("measure == @ERROR")
    tightest = means["compression"].max()
    best = means[means["compression"] == tightest].set_index("method")["value"].idxmin()
    return [
        f"At a compression of {tightest:g} the even split's output error is {phrases.number(alone['split0'])} below "
        "that of "
        f"selecting alone and {phrases.number(alone['split1'])} below that of evicting alone; "
        + (
            "so each stage adds to the other, as the paper says."
            if all(row.low is not None and row.low > 0 for row in alone.values())
            else "so that the two together do not clearly beat both, as the paper says they do."
        ),
        f"The first stage leaves {phrases.percent(survived)} of each step's true top tokens, "
        + phrases.side(
            survived,
            above="a majority, as section 3.2 says.",
            below="less than half, against section 3.2.",
            undecided="about half of them, where section 3.2 has a majority.",
            at=0.5,
        ),
        f"Of all splits that were tried, {_named(str(best))} has the smallest mean error there.",
        "Next: the same question inside the second stage, pages or dimensions.",
    ]


def _named(split: str) -> str:
    own = split.removeprefix("split")
    return "the published code's rule" if own == "published" else f"the exponent {own}"


def pages(findings: Findings) -> list[str]:
    """Pages, dimensions, or both."""
    rows = {e: findings.row(GAIN, measure=ERROR, better="pages0.5", other=f"pages{e}", compression=16) for e in "01"}
    means: Any = findings.frame(VALUE).query("measure == @ERROR").set_index("method")["value"]
    return [
        f"Sharing the search evenly gains {phrases.number(rows['0'])} in output error on dimensions alone and "
        f"{phrases.number(rows['1'])} on pages alone: it "
        + phrases.side(
            rows["0"], above="beats dimensions", below="loses to dimensions", undecided="ties with dimensions"
        )
        + " and "
        + phrases.side(rows["1"], above="beats pages.", below="loses to pages.", undecided="ties with pages."),
        f"The smallest mean error is at the exponent {str(means.idxmin()).removeprefix('pages')}, where section 3.4 "
        "takes 0.5.",
        "Next: whether tasks follow, in tasks_at_small_budgets.",
    ]
