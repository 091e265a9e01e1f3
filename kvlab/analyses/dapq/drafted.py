"""DapQ against LAQ++, the rival of its section 1: made-up tokens or a drafted answer at the response's positions?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvlab.analyses.dapq.pseudo import MEASURES, scored
from kvlab.analyses.dapq.recall import with_pseudo
from kvlab.analyses.findings import Findings
from kvlab.lib import progress_bars
from kvlab.methods import policy
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

POLICIES = ("dapq", "laq", "snapkv")

KEPT = "drafted/{measure}/{policy}/b{budget}"
LEAD = "drafted/lead/{measure}/b{budget}"


def against_drafts(lm: LM, traces: Sequence[Trace], budgets: Sequence[int] = (64, 128, 256)) -> Findings:
    """What DapQ, LAQ++ and SnapKV keep, at their own defaults; the draft sees as many entries as the budget has.

    Args:
        traces: with greedy responses, whose first token begins the draft.

    Returns:
        Table with columns document, policy, budget, measure, value. Metrics with intervals over documents:
        `drafted/recall/laq/b128`, and `drafted/lead/recall/b128`, DapQ less LAQ++, paired by document; larger is better
        (for mass lost the sign of the lead is turned).
    """
    rows = []
    for trace in progress_bars.each(traces, "drafted answers", "doc"):
        for budget in budgets:
            methods = [policy(name, budget=budget, **({"draft": budget} if name == "laq" else {})) for name in POLICIES]
            own = with_pseudo(lm, trace, methods)
            for method in methods:
                about = {"document": trace.document, "policy": method.name, "budget": budget}
                found = scored(own, method.prefill(own.prompt))
                rows += [about | {"measure": name, "value": value} for name, value in found.items()]
    findings = Findings(pd.DataFrame(rows))
    for measure in MEASURES:
        for budget in budgets:
            part = findings.table.query("measure == @measure and budget == @budget")
            wide, at = part.pivot(index="document", columns="policy", values="value"), {"measure": measure}
            for name in POLICIES:
                findings.add(KEPT, wide[name], policy=name, budget=budget, **at)
            sign = -1 if measure == "mass_lost" else 1
            findings.add_difference(LEAD, sign * wide["dapq"], sign * wide["laq"], budget=budget, **at)
    return findings
