"""DapQ against LAQ++: both are what a replay of a trace captured for them gives, and the lead is paired."""

from __future__ import annotations

import numpy as np
import pytest

import kvlab
from kvlab.analyses.dapq import drafted


def test_leads_over_a_drafted_answer_are_made_of_replays(lm, traces):
    findings = drafted.against_drafts(lm, traces, budgets=[48])
    policies = {"dapq": kvlab.policy("dapq", budget=48), "laq": kvlab.policy("laq", budget=48, draft=48)}
    policies["laq_raw"] = kvlab.policy("laq", budget=48, draft=48, window=0, kernel=1)
    values: dict[tuple[str, str], list[float]] = {}
    for trace in traces:
        ids = trace.ids[: trace.prompt_length]
        own = kvlab.capture(lm, ids, trace.steps, policies=list(policies.values()))
        assert own.ids.tolist() == trace.ids.tolist()
        for name, policy in policies.items():
            summary = kvlab.replay(own, policy).summary
            for measure in ("recall", "mass_lost"):
                values.setdefault((measure, name), []).append(summary[measure])
    for measure, sign in (("recall", 1), ("mass_lost", -1)):
        dapq, *rivals = (np.array(values[measure, name]) for name in policies)
        for name, rival in zip(drafted.RIVALS, rivals, strict=True):
            assert findings.metrics[f"drafted/{measure}/{name}/b48"] == pytest.approx(rival.mean(), abs=1e-4)
            lead = findings.metrics[f"drafted/lead/{measure}/{name}/b48"]
            assert lead == pytest.approx(sign * (dapq - rival).mean(), abs=1e-4) and lead != 0
