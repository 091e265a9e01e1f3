"""What the figures of the notebook on speed and memory show, in sentences that follow from the numbers."""

from __future__ import annotations

from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.speed import footprint, ratios
from kvlab.render.phrases import by_side, grouped, listed, moved, number, percent, sentence, side, stated

VARY = "Times belong to this machine and this run, and are no findings; a step in Python costs what a kernel would not."


def _shown(rows: list[Row]) -> str:
    return listed([f"{row.keys['policy']} by {percent(row)}" for row in rows])


def speed(findings: Findings) -> list[str]:
    """Which policies decode faster than the full cache after the longest prompt."""
    times = (
        1 + stated("rocketkv.figure5.speedup"),
        1 + stated("zsmerge.figure3.speedup"),
        1 + stated("compilerkv.tableA1.speed"),
    )
    told = grouped(
        [(row, f"{row.keys['policy']} ({percent(row)})") for row in findings.of(ratios.GAIN, where="longest")],
        above="clearly faster than the full cache's with",
        below="clearly slower with",
        undecided="not clearly different with",
    )
    return [
        f"After the longest prompt a step is {told}.",
        f"At their own lengths RocketKV's figure 5 has up to {times[0]:.1f} times the full cache's speed, ZSMerge's "
        f"figure 3 {times[1]:.2f} and CompilerKV's table A1 {times[2]:.2f}.",
        VARY,
        "Next: whether the gain grows with the batch.",
    ]


def batches(findings: Findings) -> list[str]:
    """Whether a gain grows with the batch."""
    rows = [row for row in findings.rows if row.effect == ratios.BATCH_GAIN]
    if not rows:
        return ["Larger batches were not measured, or did not fit into memory."]
    told = [
        f"with {row.keys['policy']} it "
        + moved(row, above="grows by", below="falls by", undecided="changes by no clear amount,", shown=percent)
        for row in rows
    ]
    return [
        f"From one sequence to the largest batch the gain on the full cache changes: {listed(told)}.",
        f"In ZSMerge's table 4 it grows by {100 * stated('zsmerge.table4.batch'):.0f} % as the batch is doubled.",
        VARY,
        "Next: the first token, and a whole answer.",
    ]


def first_token(findings: Findings) -> list[str]:
    """What compression costs at the first token, and whether an answer earns it back."""
    rows = [row for row in findings.rows if row.effect == ratios.FIRST_TOKEN]
    told = grouped(
        [(row, f"{row.keys['policy']} ({percent(row)})") for row in rows],
        above="later with",
        below="earlier with",
        undecided="at no clearly different time with",
    )
    earned = _shown(by_side(findings.of(ratios.ANSWER_SAVED))["above"])
    quicker = (
        f"a whole answer is clearly quicker with {earned}"
        if earned
        else "no policy makes a whole answer clearly quicker at these lengths"
    )
    later, saved = 100 * stated("compilerkv.tableA1.first_token"), 100 * stated("compilerkv.tableA1.latency")
    return [
        sentence([f"the first token comes {told}" if rows else "", quicker]),
        f"CompilerKV's table A1 has the first token {later:.1f} % later and a whole answer {saved:.1f} % quicker.",
        VARY,
        "Next: what pseudo-queries cost, beside the tokens that they stand for.",
    ]


def pseudo(findings: Findings) -> list[str]:
    """What pseudo-queries cost beside the tokens that they stand for, and in memory."""
    costs, shares, peaks = [], [], []
    for row in findings.rows:
        name = row.keys.get("policy")
        if row.effect == ratios.PSEUDO_OVER_GENERATED:
            cost = side(
                row,
                above="more time than generating as many tokens, against section 3.3",
                below="less time than generating as many tokens, as section 3.3 says",
                undecided="no clearly other time than generating as many tokens, where section 3.3 says less",
                at=1,
            )
            costs.append(f"the pseudo-queries of {name} take {cost} ({percent(row)} of it)")
        if row.effect == ratios.PSEUDO_SHARE:
            shares.append(f"those of {name} make the prompt {row.value:.1%} longer")
        if row.effect == ratios.PEAK_OVER_SNAPKV:
            more = side(row, above="above", below="below", undecided="not told apart from")
            peaks.append(
                f"its peak of memory is {more} SnapKV's ({percent(row)}), where section 1 promises no overhead"
            )
    if not (costs or shares or peaks):
        return ["No policy with pseudo-queries was timed."]
    return [
        sentence(costs),
        sentence([*shares, *(peaks or ["peak memory is measured in the full profile only"])]),
        VARY,
        "Next: what is held.",
    ]


def memory(findings: Findings) -> list[str]:
    """What is stored, and what that is of all that must be held."""
    stored = {str(row.keys["policy"]): row.value for row in findings.rows if row.effect == ratios.STORED}
    saving = {str(row.keys["policy"]): row.value for row in findings.rows if row.effect == ratios.MEMORY_SAVING}
    least = min(stored, key=lambda name: stored[name])
    best = max(saving, key=lambda name: saving[name])
    return [
        f"After the longest prompt {least} stores {stored[least]:.0%} of the full cache's bytes; bytes are counted, "
        "and do not vary.",
        f"With the weights that saves at most {saving[best]:.1%} ({best}); RocketKV's figure 5b prints up to "
        f"{100 * stated('rocketkv.figure5.memory'):.1f} % and CompilerKV's table A1 "
        f"{100 * stated('compilerkv.tableA1.memory'):.1f} %, at lengths where the weights are a smaller part.",
        "Next: whether what the papers print agrees with arithmetic.",
    ]


def printed(table_a1: Findings) -> list[str]:
    """CompilerKV's table A1 beside its text.

    Args:
        table_a1: of `footprint.compilerkv_table_a1`.
    """
    least = table_a1.row(footprint.SMALLEST_SAVING).value
    growth = table_a1.row(footprint.GROWTH_OVER_CACHE)
    return [
        f"CompilerKV's table A1 saves {least:.0%} of memory at the shortest context, where the text says 14 to 16 %.",
        f"Its full cache grows {number(growth, 2)} times as fast as the bytes of the entries: what lies beyond them "
        "are activations and the allocator, which no eviction touches.",
        "Next: what all policies do at equal bytes, in all_together.",
    ]
