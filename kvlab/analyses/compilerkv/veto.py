"""CompilerKV, section 4.3: do reliable heads have a veto?"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.compilerkv.quality import replayed
from kvlab.analyses.compilerkv.variants import Inspected, NoHeadTable
from kvlab.analyses.findings import Findings
from kvlab.core import ranking
from kvlab.instruments import measures
from kvlab.traces.trace import Trace

PROTECTED = "veto/{method}"
DIFFERENCE = "veto/difference"


def protected(traces: Sequence[Trace], tables: str | None, share: float, strongest: int = 16) -> Findings:
    """Section 4.3's veto: are the tokens kept that a layer's most reliable head attends to most?

    Of each layer's head with the largest weight (all of equal ones), the `strongest` prompt tokens by its own attention
    over the utility window. Sets are filled up to the budget, so that learnt and equal weights store as much.

    Returns:
        Table with columns document, method, layer, protected (share of those tokens that are kept); metrics
        `veto/compilerkv`, `veto/equal_weights` and `veto/difference`.
    """
    learnt = Inspected(budget=share, tables=tables, pad="budget")
    equal = NoHeadTable(budget=share, tables=tables, pad="budget")
    rows = []
    for trace in traces:
        weights = learnt.weights(trace.prompt)
        reliable = (weights == weights.amax(-1, keepdim=True)).cpu()
        best = ranking.top_positions(trace.prompt.window_sums(learnt.utility_window), strongest).cpu()
        for name, method in {"compilerkv": learnt, "equal_weights": equal}.items():
            replay = replayed(trace, method)
            for row, layer in enumerate(trace.layers):
                of_heads = replay.kept(layer).repeat_interleave(trace.heads // trace.kv_heads, 0)
                share_kept = measures.recall(of_heads, best[row])[reliable[row]].mean()
                rows.append(
                    {"document": trace.document, "method": name, "layer": layer, "protected": float(share_kept)}
                )
    findings = Findings(pd.DataFrame(rows))
    values = dict(findings.table.pivot_table(index="document", columns="method", values="protected").items())
    for name, shares in values.items():
        findings.add(PROTECTED, shares, method=name)
    findings.add_difference(DIFFERENCE, values["compilerkv"], values["equal_weights"])
    return findings


def in_words(veto: Findings) -> str:
    """The share of tokens that is kept with learnt weights, with equal ones, and the difference."""
    rows = pd.concat([veto.frame(PROTECTED), veto.frame(DIFFERENCE).assign(method="difference")])
    return "\n".join(
        f"{row['method']:14}{row['value']:7.3f}   {row['low']:.3f} to {row['high']:.3f}"
        for row in rows.to_dict("records")
    )
