"""The one place that words a finding: a claim's phrase for its verdict, with our number and the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvlab import papers
from kvlab.papers.claim import Phrases
from kvlab.render.phrases import number, with_interval

WORTH = "; the stand-in is weak"
"""The end of a sentence on a claim whose stand-in predicts answers poorly."""


def sentence(claim: papers.Claim, verdict: papers.Verdict, weak: bool = False) -> str:
    """Say a claim's result: `SnapKV loses less than H2O: 0.035 (0.023 to 0.047); the paper prints 0.04.`

    A claim without phrases gives its summary, with the verdict before it; so does a recomputed one that fails. One that
    was not measured gives the reason.

    Args:
        verdict: of the claim's tests (`papers.judge`).
        weak: whether it rests on a stand-in that predicts answers poorly, which the sentence says at its end.
    """
    summary = claim.summary.rstrip(".")
    if verdict.verdict == papers.UNMEASURED:
        return f"Not measured: {summary}. {_reason(verdict.why)}"
    if claim.kind == "recomputed" and verdict.verdict == papers.FAILS:
        # Its direction may be met: what fails then is that the number prints as the paper says.
        said = f"The paper's own numbers do not agree: {summary}; they give "
    elif claim.phrases is None:
        said = f"{verdict.verdict.capitalize()}: {summary}; here "
    else:
        said = f"{phrase(claim.phrases, verdict)}: "
    return f"{said}{_ours(claim, verdict)}{_papers(claim)}{WORTH if weak else ''}."


def phrase(phrases: Phrases, verdict: papers.Verdict) -> str:
    """The phrase for the verdict of a claim's tests, without its full stop: a weak stand-in changes no phrase."""
    if verdict.verdict == papers.UNDECIDED:
        return phrases.undecided.rstrip(".")
    return (phrases.missed if verdict.verdict == papers.FAILS else phrases.met).rstrip(".")


def of_figure(experiment: str, figure: str, metrics: Mapping[str, float]) -> list[str]:
    """The sentences of an experiment's claims whose `figure` is this one; claims that lack a metric are left out.

    Args:
        metrics: name -> value, of a run; the ends of intervals are NAME/low and NAME/high.
    """
    return of_claims(
        (claim, papers.judge(claim, metrics))
        for claim in papers.claims(experiment=experiment)
        if claim.figure == figure and claim.metrics <= metrics.keys()
    )


def of_claims(judged: Iterable[tuple[papers.Claim, papers.Verdict]]) -> list[str]:
    """A sentence for each claim, in their order; last those that are not measured, once for each reason."""
    said, unmeasured = [], {}
    for claim, verdict in judged:
        if verdict.verdict == papers.UNMEASURED:
            unmeasured.setdefault(verdict.why, []).append(sentence(claim, verdict))
        else:
            said.append(sentence(claim, verdict))
    for why, alike in unmeasured.items():
        said.append(alike[0] if len(alike) == 1 else f"{len(alike)} claims are not measured. {_reason(why)}")
    return said


def _reason(why: str) -> str:
    return f"{why[:1].upper()}{why[1:].rstrip('.')}."


def ours(verdict: papers.Verdict) -> str:
    """`0.035 (0.023 to 0.047)`: our number, with its interval where it has one."""
    if verdict.value is None or verdict.low is None or verdict.high is None:
        return number(verdict.value)
    return with_interval(verdict.value, verdict.low, verdict.high)


def _ours(claim: papers.Claim, verdict: papers.Verdict) -> str:
    """`0.035 (0.023 to 0.047), share of attention`; without a unit where the claim's is that of the paper's number."""
    shown = ours(verdict)
    return f"{shown}, {claim.unit}" if claim.unit and not claim.unit_is_papers else shown


def _papers(claim: papers.Claim) -> str:
    """The paper's printed value, if ours has the same unit."""
    if claim.paper_value is None or not claim.comparable:
        return ""
    return f"; the paper prints {claim.paper_value:.6g}".replace("-", "−")
