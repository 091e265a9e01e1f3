"""RocketKV, section 4.2: does its lead over the other methods become wider at longer sequences?"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.analyses.rocketkv.budgets import LOSSES, RIVALS, best_rival, budget_at, compressions, contenders
from kvlab.analyses.rocketkv.design import truncated
from kvlab.lib import progress_bars
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

LEAD = "lead/{measure}/{end}"
WIDER = "lead/{measure}/longer_less_shorter"


def leads(traces: Sequence[Trace], heads: str | None = None, steps: int = 32, times: int = 4) -> Findings:
    """RocketKV's lead over the best rival at one token budget, on whole prompts and on the first part of them.

    Args:
        traces: with the queries of all prompt tokens; prompts are cut, and the text itself follows as the response.
        heads: DuoAttention's head scores of the model.
        steps: tokens of that response.
        times: how many times as long the longer prompts are.

    Returns:
        Table with columns document, end ("shorter", "longer"), length, method, budget, mass_lost, output_error.
        Metrics, with intervals over documents: `lead/output_error/longer` and `.../shorter` (the loss of the rival that
        is best on average at that length, less RocketKV's) and `lead/output_error/longer_less_shorter`, paired.
    """
    rows = []
    for trace in progress_bars.each(traces, "lengths", "doc"):
        whole = trace.prompt_length - steps
        cut = {"longer": truncated(trace, whole, steps), "shorter": truncated(trace, whole // times, steps)}
        budget = budget_at(cut["longer"], compressions([cut["longer"]])[-1])
        for end, part in cut.items():
            for method, contender in contenders(part, budget, heads).items():
                if method not in ("rocketkv", *RIVALS):
                    continue
                result = replay(part, contender)
                numbers = {name: float(getattr(result, name).mean()) for name in LOSSES}
                about = {"document": trace.document, "end": end, "length": part.prompt_length, "method": method}
                rows.append(about | {"budget": budget} | numbers)
    findings = Findings(pd.DataFrame(rows))
    for measure in LOSSES:
        by_end = {}
        for end, part in findings.table.groupby("end"):
            losses = part.pivot(index="document", columns="method", values=measure).dropna(axis="columns")
            by_end[end] = losses.loc[:, best_rival(-losses.mean())] - losses.loc[:, "rocketkv"]
            findings.add(LEAD, by_end[end], measure=measure, end=end)
        findings.add_difference(WIDER, by_end["longer"], by_end["shorter"], measure=measure)
    return findings
