"""Whether an experiment measures what its claims ask for."""

from __future__ import annotations

from kvlab import papers
from kvlab.analyses.findings import Findings


def unmeasured(experiment: str, *findings: Findings, paper: str | None = None) -> dict[str, set[str]]:
    """The metrics that an experiment's claims (of one paper) name and none of its findings has, by claim."""
    names = {name for part in findings for name in part.metrics}
    names |= {f"{name}/{end}" for part in findings for name in part.intervals for end in ("low", "high")}
    claims = papers.claims(experiment, paper=paper)
    assert claims, f"no claim of {experiment}"
    return {claim.id: claim.metrics - names for claim in claims if claim.metrics - names}
