"""What the figures of the notebook on speed and memory show, in sentences that follow from the numbers."""

from __future__ import annotations

from kvlab.analyses.findings import Findings, Row
from kvlab.analyses.speed import footprint, ratios
from kvlab.analyses.telling import by_side, listed, moved, number, percent, side

VARY = "Times belong to this machine and this run, and are no findings; a step in Python costs what a kernel would not."


def _shown(rows: list[Row]) -> str:
    return listed([f"{row.keys['policy']} by {percent(row)}" for row in rows])


def speed(findings: Findings) -> list[str]:
    """Which policies decode faster than the full cache after the longest prompt."""
    found = by_side(findings.of(ratios.GAIN, where="longest"))
    faster, slower, even = (_shown(found[where]) for where in ("above", "below", "undecided"))
    return [
        f"After the longest prompt a step is clearly faster than the full cache's with {faster}." if faster else "",
        f"It is clearly slower with {slower}." if slower else "",
        f"No difference is clear with {even}." if even else "",
        VARY,
    ]


def batches(findings: Findings) -> list[str]:
    """Whether a gain grows with the batch."""
    rows = [row for row in findings.rows if row.effect == ratios.BATCH_GAIN]
    if not rows:
        return ["Larger batches were not measured, or did not fit into memory."]
    told = [
        f"with {row.keys['policy']} it "
        + moved(row, above="grows by", below="falls by", undecided="changes by no clear", shown=percent)
        for row in rows
    ]
    return [f"From one sequence to the largest batch the gain on the full cache changes: {listed(told)}.", VARY]


def first_token(findings: Findings) -> list[str]:
    """What compression costs at the first token, and whether an answer earns it back."""
    told = []
    for row in findings.rows:
        if row.effect == ratios.FIRST_TOKEN:
            cost = side(row, above="later", below="earlier", undecided="at no clearly different time")
            told.append(f"The first token comes {cost} with {row.keys['policy']} ({percent(row)}).")
    saved = by_side(findings.of(ratios.ANSWER_SAVED))
    earned = _shown(saved["above"])
    told.append(
        f"A whole answer is clearly quicker with {earned}."
        if earned
        else "No policy makes a whole answer clearly quicker at these lengths."
    )
    return [*told, VARY]


def pseudo(findings: Findings) -> list[str]:
    """What pseudo-queries cost beside the tokens that they stand for, and in memory."""
    told, order = [], [ratios.PSEUDO_OVER_GENERATED, ratios.PSEUDO_SHARE, ratios.PEAK_OVER_SNAPKV]
    for row in sorted((row for row in findings.rows if row.effect in order), key=lambda row: order.index(row.effect)):
        name = row.keys.get("policy")
        if row.effect == ratios.PSEUDO_OVER_GENERATED:
            cost = side(
                row, above="more time than", below="less time than", undecided="no clearly other time than", at=1
            )
            told.append(f"The pseudo-queries of {name} take {cost} generating as many tokens, {percent(row)} of it.")
        if row.effect == ratios.PSEUDO_SHARE:
            told.append(f"They make the prompt {row.value:.1%} longer.")
        if row.effect == ratios.PEAK_OVER_SNAPKV:
            told.append(f"The peak of memory with {name} differs from SnapKV's by {percent(row)}.")
    if not told:
        return ["No policy with pseudo-queries was timed."]
    if all(row.effect != ratios.PEAK_OVER_SNAPKV for row in findings.rows):
        told.append("Peak memory is measured in the full profile only.")
    return [*told, VARY]


def memory(findings: Findings) -> list[str]:
    """What is stored, and what that is of all that must be held."""
    stored = {str(row.keys["policy"]): row.value for row in findings.rows if row.effect == ratios.STORED}
    saving = {str(row.keys["policy"]): row.value for row in findings.rows if row.effect == ratios.MEMORY_SAVING}
    least = min(stored, key=lambda name: stored[name])
    best = max(saving, key=lambda name: saving[name])
    return [
        f"After the longest prompt {least} stores {stored[least]:.0%} of the full cache's bytes; bytes are counted, "
        "and do not vary.",
        f"With the weights that saves at most {saving[best]:.1%} ({best}): of a short prompt the weights are nearly "
        "everything, and papers that print savings of a run's memory measure that share.",
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
    ]
