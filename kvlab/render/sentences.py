"""The one place that words a finding: a claim's phrase for its verdict, with our number and the paper's."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab import papers
from kvlab.render.phrases import number


def sentence(claim: papers.Claim, verdict: papers.Verdict) -> str:
    """What our numbers say to a claim: `SnapKV loses less than H2O: 0.035 (0.023 to 0.047); the paper prints 0.04.`

    A claim without phrases gives its summary, with the verdict before it. One that was not measured gives the reason.
    """
    summary = claim.summary.rstrip(".")
    if verdict.verdict == papers.UNMEASURED:
        return f"Not measured: {summary}. {verdict.why[:1].upper()}{verdict.why[1:].rstrip('.')}."
    if claim.phrases is None:
        said = f"{verdict.verdict.capitalize()}: {summary}; here "
    elif verdict.verdict == papers.UNDECIDED:
        said = f"{claim.phrases.undecided.rstrip('.')}: "
    else:
        missed = verdict.verdict == papers.FAILS
        said = f"{(claim.phrases.missed if missed else claim.phrases.met).rstrip('.')}: "
    return f"{said}{_ours(claim, verdict)}{_papers(claim)}."


def of_figure(experiment: str, figure: str, metrics: Mapping[str, float]) -> list[str]:
    """The sentences of an experiment's claims whose `figure` is this one, in the claims' order.

    Claims with a metric that is not there are left out.

    Args:
        metrics: name -> value, of a run; the ends of intervals are NAME/low and NAME/high.
    """
    return [
        sentence(claim, papers.judge(claim, metrics))
        for claim in papers.claims(experiment=experiment)
        if claim.figure == figure and claim.metrics <= metrics.keys()
    ]


def _ours(claim: papers.Claim, verdict: papers.Verdict) -> str:
    """`0.035 (0.023 to 0.047), share of attention`; without a unit where the claim's is that of the paper's number."""
    shown = number(verdict.value)
    if verdict.low is not None and verdict.high is not None:
        shown += f" ({number(verdict.low)} to {number(verdict.high)})"
    return f"{shown}, {claim.unit}" if claim.unit and not claim.unit_is_papers else shown


def _papers(claim: papers.Claim) -> str:
    """What the paper prints, if ours has the same unit."""
    if claim.paper_value is None or not claim.comparable:
        return ""
    return f"; the paper prints {claim.paper_value:.6g}".replace("-", "−")
