"""DapQ against LAQ++, the rival of its section 1: made-up tokens or a drafted answer at the response's positions?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvlab.analyses.dapq.pseudo import MEASURES, scored
from kvlab.analyses.dapq.recall import with_pseudo
from kvlab.analyses.findings import Findings
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

POLICIES: dict[str, dict[str, int]] = {"dapq": {}, "laq": {}, "laq_raw": {"window": 0, "kernel": 1}, "snapkv": {}}
"""Each policy's parameters. `laq_raw` is the draft alone, with nothing pooled and nothing forced in, as DapQ has it."""
RIVALS = ("laq", "laq_raw")

KEPT = "drafted/{measure}/{policy}/b{budget}"
LEAD = "drafted/lead/{measure}/{policy}/b{budget}"


def contender(name: str, budget: int) -> Policy:
    """One of `POLICIES` at a budget, which a draft has too, as in LAQ++'s own runs."""
    draft = {"draft": budget} if name in RIVALS else {}
    return policy(name.removesuffix("_raw"), budget=budget, **draft, **POLICIES[name])


def against_drafts(lm: LM, traces: Sequence[Trace], budgets: Sequence[int] = (64, 128, 256)) -> Findings:
    """Compare the entries kept by DapQ, LAQ++, its draft and SnapKV; the draft sees as many entries as the budget has.

    Args:
        traces: with greedy responses, whose first token begins the draft.

    Returns:
        Table with columns document, policy, budget, measure, value. Metrics with intervals over documents are
        `drafted/recall/laq/b128` and `drafted/lead/recall/laq/b128`. A lead is DapQ less the other (LAQ++), paired by
        document. A larger lead is better: for mass lost its sign is turned.
    """
    rows = []
    for trace in progress_bars.each(traces, "drafted answers", "doc"):
        for budget in budgets:
            methods = {name: contender(name, budget) for name in POLICIES}
            own = with_pseudo(lm, trace, list(methods.values()))
            for name, method in methods.items():
                about = {"document": trace.document, "policy": name, "budget": budget}
                found = scored(own, method.prefill(own.prompt))
                rows += [about | {"measure": measure, "value": value} for measure, value in found.items()]
    findings = Findings(pd.DataFrame(rows))
    for measure in MEASURES:
        for budget in budgets:
            part = findings.table.query("measure == @measure and budget == @budget")
            wide: Any = part.pivot(index="document", columns="policy", values="value")
            for name in POLICIES:
                findings.add(KEPT, wide[name], measure=measure, policy=name, budget=budget)
            sign = -1 if measure == "mass_lost" else 1
            for name in RIVALS:
                sides = sign * wide["dapq"], sign * wide[name]
                findings.add_difference(LEAD, *sides, measure=measure, policy=name, budget=budget)
    return findings
