"""What ZSMerge's figures show here, in sentences that follow from their numbers."""

from __future__ import annotations

from typing import Any

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.telling import beside, listed, number, percent, side
from kvlab.analyses.zsmerge import decoding, merging, printed, sensitivity, theorem

MATTERS = "matters more than merging itself"


def figure_4(findings: Findings) -> list[str]:
    """Under figure 4; findings: of `merging.figure_4`."""
    rows = [row for row in findings.rows if row.effect == merging.REDUCTION]
    clear = [row for row in rows if row.low is not None and row.low > 0]
    sentences = [f"Merging is clearly ahead of eviction at {len(clear)} of {len(rows)} ratios."]
    paper = papers.figure("zsmerge", "figure4").set_index("ratio")["reduction"]
    for row in rows:
        ratio = float(str(row.keys["ratio"]))
        if ratio in paper.index and ratio in (0.05, 0.2, 0.5):
            sentences.append(
                f"At {100 * ratio:.0f} % of the cache it removes {percent(row)} of eviction's error; "
                f"{beside(row, float(paper.loc[ratio]))}."
            )
    grows = findings.found(merging.GROWTH, first=0.05, last=0.50)
    if grows is not None:
        sentences.append(
            "From 5 to 50 % of the cache the share "
            + side(
                grows,
                above="grows, as the paper's own numbers do and its caption denies.",
                below="falls, as the caption says and the paper's own numbers do not.",
                undecided="neither clearly grows nor falls.",
            )
        )
    sentences.append(_definitions(findings))
    sentences.append(_similarity(findings))
    sentences.append("Next: does it last where a response is long enough that every token is merged one by one?")
    return sentences


def _definitions(findings: Findings) -> str:
    """Whether another reading of "relative error" would explain the difference from the paper."""
    at = 0.2
    effects = {"heads": merging.REDUCTION, "squares": merging.REDUCTION_SQUARED, "layers": merging.REDUCTION_LAYER}
    rows = {name: findings.found(effect, ratio=at) for name, effect in effects.items()}
    if any(row is None for row in rows.values()):
        return ""
    paper = float(papers.figure("zsmerge", "figure4").set_index("ratio").loc[at, "reduction"])
    nearest = min(rows, key=lambda name: abs(rows[name].value - paper))  # type: ignore[union-attr]
    told = {"heads": "head by head", "squares": "squared", "layers": "over whole layers"}
    shown = listed([f"{percent(row)} {told[name]}" for name, row in rows.items() if row is not None])
    explains = abs(rows[nearest].value - paper) < 0.1 * paper  # type: ignore[union-attr]
    so = "which is the paper's number" if explains else "and so the definition does not explain the difference"
    return f"At {100 * at:.0f} % the reduction is {shown}; nearest to the paper's is that {told[nearest]}, {so}."


def _similarity(findings: Findings) -> str:
    row = findings.found(merging.SAVED_BY_CHOICE, choice="similarity", ratio=0.2)
    if row is None:
        return ""
    reduced = findings.row(merging.REDUCTION_OF_CHOICE, choice="similarity", ratio=0.2)
    verdict = side(
        row,
        above="serves clearly better than the authors' contiguous runs",
        below="serves clearly worse than the authors' contiguous runs",
        undecided="is not told apart from the authors' contiguous runs",
    )
    return f"Filling the slots by similarity, as the algorithm says, {verdict}: it removes {percent(reduced)}."


def by_layer(findings: Findings) -> list[str]:
    """Under the map of layers; findings: of `merging.figure_4`."""
    gains: Any = merging.reduction_by_layer(findings)
    worse = gains.lt(0).mean()
    tightest = gains.columns.min()
    best = gains.mean(axis="columns")
    return [
        f"Averaged over ratios merging gains most in layer {best.idxmax()} ({100 * best.max():.0f} % of "
        f"eviction's error) and "
        f"least in layer {best.idxmin()} ({100 * best.min():.0f} %).",
        f"At {100 * tightest:.0f} % of the cache it is worse than eviction in "
        f"{100 * worse[tightest]:.0f} % of the layers, over all "
        f"ratios in {100 * worse.mean():.0f} %.",
        "The paper draws no layers; whether these are layers of broad attention is the next question.",
    ]


def while_decoding(findings: Findings, theorem_1: Findings) -> list[str]:
    """Under the long responses; findings: of `decoding.merging_while_decoding`, theorem_1: of `theorem.theorem_1`."""
    merge = findings.row(decoding.REDUCTION, definition="error", variant="merge")
    sentences = [
        f"Along a response that outgrows the cache merging one by one removes {percent(merge)} of eviction's error: "
        + side(merge, above="it is clearly ahead.", below="it is clearly behind.", undecided="no clear difference.")
    ]
    last = findings.found(decoding.REDUCTION_OF_PART, part=decoding.PARTS)
    if last is not None:
        ahead = side(
            last,
            above="it is still clearly ahead",
            below="it is clearly behind",
            undecided="it is no longer told apart from eviction",
        )
        sentences.append(f"In the last quarter {ahead} ({percent(last)}).")
    told = {"displaces": "letting the newcomer displace another", "plain": "scoring by eq. 2", "alpha0": "no bias"}
    for choice, words in told.items():
        row = findings.row(decoding.AHEAD, choice=choice)
        better = side(row, above="clearly lower", below="clearly higher", undecided="not clearly other")
        sentences.append(f"With {words} the error is {better} ({number(row, 2)} saved).")
    fullest = theorem_1.found(theorem.FULLEST, moment=theorem.WHILE_DECODING)
    if fullest is not None:
        even = theorem_1.row(theorem.EVEN, moment=theorem.WHILE_DECODING)
        crowded = side(
            fullest,
            above="eq. 6 sends most tokens into one slot",
            below="eq. 6 spreads tokens evenly",
            undecided="eq. 6 spreads tokens about evenly",
            at=min(1.0, 1.5 * even.value),
        )
        sentences.append(
            f"The fullest slot of a KV head holds {percent(fullest)} of what was merged, {percent(even)} would be its "
            f"even share: {crowded}."
        )
    return sentences


def printed_tables(over_snapkv: Findings, infinite: Findings, summaries: Findings) -> list[str]:
    """Under the paper's own tables; arguments: of `printed.over_snapkv`, `.infinite_bench` and `.summaries`."""
    counts = {
        what: over_snapkv.row(printed.OVER, table="table3", method="snapkv", what=what).value
        for what in ("wins", "losses", "ties")
    }
    low, high = (
        summaries.row(printed.OVER, table="table2", method="h2o", what=what).value for what in ("least", "most")
    )
    stated = papers.figure("zsmerge", "headline").iloc[0]
    shares = [infinite.row(printed.SHARE_OF_FULL, source=source).value for source in ("recomputed", "printed")]
    surpasses = "is" if counts["wins"] > counts["losses"] + counts["ties"] else "is not"
    return [
        f"In table 3 ZSMerge is above SnapKV in {counts['wins']:.0f} cells, below in {counts['losses']:.0f} and level "
        f'in {counts["ties"]:.0f}, which {surpasses} what "consistently surpassing" says.',
        f"Its gains over H2O on XSum reach from {100 * low:.1f} % to {100 * high:.0f} %; section 5 "
        f"states {100 * stated['low']:.0f} % to "
        f"{100 * stated['high']:.0f} %.",
        f"The tasks of table 6 give {100 * shares[0]:.1f} % of the full cache's average, the printed "
        f"averages {100 * shares[1]:.1f} %.",
    ]


def figure_5(findings: Findings) -> list[str]:
    """Under figure 5; findings: of `sensitivity.figure_5`."""
    sentences = []
    for row in findings.rows:
        if row.effect == sensitivity.SPREAD_OVER_MERGING and row.keys["parameter"] in ("decay", "window"):
            verdict = side(
                row, above=MATTERS, below="matters less than merging itself", undecided="may matter as much", at=1.0
            )
            sentences.append(
                f"Within the range that the paper calls stable the {row.keys['parameter']} {verdict}: "
                f"the error varies by {number(row, 2)} times what merging gains."
            )
    for row in findings.rows:
        if row.effect == sensitivity.BEST and row.keys["parameter"] in ("proximity", "residual"):
            recommended = sensitivity.RECOMMENDED[str(row.keys["parameter"])]
            sentences.append(
                f"The best {row.keys['parameter']} is {number(row, 2)}, the paper recommends {recommended:g}."
            )
    none = findings.found(sensitivity.WORSE, parameter="residual", setting=0.0)
    if none is not None:
        costs = side(none, above="clearly costs", below="clearly saves", undecided="does not clearly change")
        sentences.append(f"Giving up the residual slots {costs} error ({number(none, 2)}).")
    sentences.append("Next: the same sweeps by tasks, since output error and ROUGE may put optima elsewhere.")
    return sentences


def choices(findings: Findings) -> list[str]:
    """Under the open choices; findings: of `sensitivity.open_choices`."""
    told = {
        "similarity": "How the slots are first filled",
        "displaces": "Whether the newcomer competes",
        "plain": "Whose attention the scores gather",
    }
    sentences = []
    for choice, words in told.items():
        row = findings.row(sensitivity.CHOICE_OVER_MERGING, choice=choice)
        worse = findings.row(sensitivity.WORSE_BY_CHOICE, choice=choice)
        verdict = side(
            row, above=MATTERS, below="matters less than merging itself", undecided="may matter as much", at=1.0
        )
        way = side(worse, above="for the worse", below="for the better", undecided="in no clear direction")
        sentences.append(f"{words} {verdict} ({number(row, 2)} times its gain, {way}).")
    return sentences
