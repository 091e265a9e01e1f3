"""The judge: compare our numbers with a claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from kvlab.papers.claim import (
    CLUSTERED,
    DIRECTION,
    FAILS,
    FULL_ONLY,
    HOLDS,
    KINDS_DIFFER,
    NO_RUN,
    UNDECIDED,
    UNMEASURED,
    Claim,
    Verdict,
)
from kvlab.papers.uncertainty import Doubt, Lookup, Standing, ends, spread

GENRE = "genre"  # METRIC/genre/GENRE is the mean of a metric over the documents of one genre
BY_GENRE = ("genre_low", "genre_high")  # METRIC/genre_low and METRIC/genre_high: the interval of these means
CHANCE = ("finding", "question", "control", "timing")
"""The kinds of claims that rest on samples, so that an interval says how sure they are. The others are arithmetic."""


def judge(
    claim: Claim, metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]] | None = None
) -> Verdict:
    """The verdict on `claim` from measured numbers.

    metrics: name -> value; intervals: name -> (low, high), else taken from the metrics NAME/low and NAME/high. A number
    that is not finite counts as missing. The verdict is "undecided" where an interval contains the point at which the
    direction turns. It is also "undecided" where two sides were equal in all repetitions. Without an interval it rests
    on the value, and says so; a timing is undecided then. A recomputed claim either holds or fails. The verdict is "not
    measured" where the test `provided` is not met, or where numbers are missing. For a claim that only the full profile
    measures, the comparison says so. Of other numbers that a run left out, it gives the claim's reason (`lacking`).
    """
    ranges = {
        f"{name}/{end}": number
        for name, pair in (intervals or {}).items()
        for end, number in zip(("low", "high"), pair, strict=True)
    }
    known = {name: float(number) for name, number in {**metrics, **ranges}.items() if math.isfinite(number)}
    outcome = partial(
        Verdict,
        value=known.get(claim.metric),
        low=known.get(f"{claim.metric}/low"),
        high=known.get(f"{claim.metric}/high"),
        **{end: known.get(f"{claim.metric}/{end}") for end in BY_GENRE},
    )
    absent = sorted(claim.metrics - known.keys())
    if absent:
        return outcome(verdict=UNMEASURED, why=claim.untested or _absent(claim, absent, bool(known)))
    value_of = known.__getitem__
    if claim.provided is not None:
        given, why = claim.provided.check(claim.metric, value_of, claim.paper_value)
        if not given:
            return outcome(verdict=UNMEASURED, why=f"A required condition is not met: {why}.")
    if claim.kind == "recomputed":
        return _recomputed(claim, value_of, outcome)
    if claim.kind not in CHANCE:
        passed, _ = claim.direction.check(claim.metric, value_of, claim.paper_value)
        return _decided(claim, passed, value_of, outcome)
    alone = _alone(claim, value_of)
    if alone and claim.kind == "timing":
        return outcome(verdict=UNDECIDED, why=f"Undecided: {alone}, and one round of a timing says nothing.")
    genres = _genres(claim, known)
    standing, doubts = claim.direction.standing(claim.metric, value_of, claim.paper_value)
    if standing is Standing.OPEN:
        shown = "; ".join(str(doubt) for doubt in doubts[:3])
        more = f"; so do {len(doubts) - 3} more" if len(doubts) > 3 else ""
        power, remark = _power(claim, doubts)
        return outcome(
            verdict=UNDECIDED,
            power=power,
            why=f"Undecided: {shown}, where the direction turns{more}. {remark}{genres}",
        )
    remark = f" {alone[0].upper()}{alone[1:]}, so that the verdict rests on the value alone." if alone else ""
    return _decided(claim, standing is Standing.MET, value_of, outcome, remark + _clustered(claim, known) + genres)


def _decided(
    claim: Claim, right_way: bool, value_of: Lookup, outcome: Callable[..., Verdict], remark: str = ""
) -> Verdict:
    direction = claim.direction.check(claim.metric, value_of, claim.paper_value)[1]
    right_size, size = claim.size.check(claim.metric, value_of, claim.paper_value)
    if not right_way:
        return outcome(verdict=FAILS, why=f"Direction missed: {direction}.{remark}")
    if not right_size:
        missed = "missed" if claim.comparable else "not compared"
        why = f"Direction met: {direction}. Size {missed}: {size.rstrip('.')}.{remark}"
        return outcome(verdict=DIRECTION, why=why)
    if claim.direction_alone:
        why = f"Direction met: {direction}. Size not compared: {claim.stands_in.rstrip('.')}.{remark}"
        return outcome(verdict=DIRECTION, why=why)
    also = "" if size == direction else f" Size met: {size}."
    return outcome(verdict=HOLDS, why=f"Direction met: {direction}.{also}{remark}")


def _recomputed(claim: Claim, value_of: Lookup, outcome: Callable[..., Verdict]) -> Verdict:
    """Arithmetic agrees with what the paper says, or does not."""
    tests = [test.check(claim.metric, value_of, claim.paper_value) for test in (claim.direction, claim.size)]
    reasons = [why for passed, why in tests if not passed] or [why for _, why in tests]
    verdict = HOLDS if all(passed for passed, _ in tests) else FAILS
    return outcome(verdict=verdict, why=f"Recomputed: {'; '.join(dict.fromkeys(reasons))}.")


def _alone(claim: Claim, value_of: Lookup) -> str:
    """Which of the tested metrics have no interval, or one without width, in words; empty if all have one."""
    own = dict.fromkeys(claim.direction.tested(claim.metric))
    bare = [name for name in own if len(set(ends(name, value_of))) == 1]
    if not bare:
        return ""
    if not spread(bare[0], value_of):
        return f"{_listed(bare)} {'has' if len(bare) == 1 else 'have'} no interval"
    return f"the interval of {_listed(bare)} has no width, as of one repetition or of equal ones"


def _power(claim: Claim, doubts: list[Doubt]) -> tuple[Literal["", "seen", "not seen"], str]:
    """Whether an effect as large as the paper's would have been seen; else which would."""
    if all(doubt.flat for doubt in doubts):
        return "", "So there was no room for a difference, as where nothing is lost on either side."
    own = next((doubt for doubt in doubts if doubt.metric == claim.metric and doubt.fixed), None)
    if own is None or claim.paper_value is None or not claim.comparable:
        return "", f"From there, effects of more than {doubts[0].half:.3g} would have been seen."
    distance = abs(claim.paper_value - own.turn)
    seen = distance > own.half
    sentence = (
        f"An effect as large as the paper's would {'' if seen else 'not '}have been seen: "
        f"its {claim.paper_value:.4g} lies {distance:.3g} from there, "
        f"and the interval reaches {own.half:.3g} to either side."
    )
    return ("seen" if seen else "not seen"), sentence


def _clustered(claim: Claim, known: Mapping[str, float]) -> str:
    """That the direction is open by the intervals over genres; empty where it is not, or where there are none."""
    ends = {
        f"{name}/{end}": known[f"{name}/{by_genre}"]
        for name in claim.direction.needs(claim.metric)
        for end, by_genre in zip(("low", "high"), BY_GENRE, strict=True)
        if f"{name}/{by_genre}" in known
    }
    clustered = {**known, **ends}
    standing, doubts = claim.direction.standing(claim.metric, clustered.__getitem__, claim.paper_value)
    return f" {CLUSTERED}: {doubts[0]}." if ends and standing is Standing.OPEN else ""


def _genres(claim: Claim, known: Mapping[str, float]) -> str:
    """The remark where kinds of text differ by more than the effect itself; empty where they do not."""
    for name, turn in claim.direction.turns(claim.metric):
        start = f"{name}/{GENRE}/"
        means = {metric.removeprefix(start): value for metric, value in known.items() if metric.startswith(start)}
        apart = max(means.values()) - min(means.values()) if means else 0.0
        if apart > abs(known[name] - turn):
            shown = ", ".join(f"{genre} {mean:.4g}" for genre, mean in means.items())
            return f" {KINDS_DIFFER} in {name} by {apart:.3g}, more than the effect itself ({shown})."
    return ""


def _absent(claim: Claim, names: list[str], ran: bool) -> str:
    """Why a claim lacks the metrics `names`; `ran` says that its experiment gave others."""
    if claim.profile == "full":
        return f"{FULL_ONLY}: the quick profile leaves out {_listed(names)}, which no run has measured"
    known = claim.why_lacking(names) if ran else None
    return f"{known} (no {_listed(names)})" if known else f"{NO_RUN} {_listed(names)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
