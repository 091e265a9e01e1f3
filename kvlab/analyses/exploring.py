"""The numbers of the notebook for exploring by hand: attention lost by layer, and by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch

from kvlab.analyses.findings import Findings
from kvlab.replays.replay import Replay

if TYPE_CHECKING:
    from kvlab.traces.trace import Trace


MASS_LOST = "mass_lost/{policy}"


def lost_by_layer(results: Sequence[Replay]) -> Findings:
    """Attention mass lost, averaged over heads and steps.

    Returns:
        Table with columns layer, mass_lost, policy; metrics `mass_lost/snapkv` and so on, the means over layers.
    """
    table = pd.concat(
        [
            pd.DataFrame({"layer": r.trace.layers, "mass_lost": r.mass_lost.mean((1, 2)).tolist()}).assign(
                policy=r.policy.name
            )
            for r in results
        ],
        ignore_index=True,
    )
    findings = Findings(table)
    for name, part in table.groupby("policy"):
        findings.set(MASS_LOST, part["mass_lost"].to_numpy().mean(), policy=name)
    return findings


def story(findings: Findings, left: str, right: str) -> list[str]:
    """Describe the layers' differences between two policies; findings: of `lost_by_layer`."""
    table = findings.table.pivot_table(index="layer", columns="policy", values="mass_lost")
    less = table[left] - table[right]
    means = {name: findings.row(MASS_LOST, policy=name).value for name in (left, right)}
    layer, furthest = table[left].idxmax(), less.abs().idxmax()
    return [
        f"{left} loses {means[left]:.1%} of the response's attention and {right} {means[right]:.1%}; {right} loses "
        f"less in {(less.to_numpy() > 0).sum()} of {len(table)} layers.",
        f"{left} loses most in layer {layer} ({table[left][layer]:.0%}); the two differ most in layer {furthest} "
        f"({table[left][furthest]:.0%} and {table[right][furthest]:.0%}).",
        "This is one prompt, so no interval shows how sure the numbers are. No paper prints such numbers. Next, "
        "measure several texts: `kvlab.replay` takes a list of traces and gives intervals over them.",
    ]


def tokens_lost(trace: Trace, results: Sequence[Replay], tokens: Sequence[str], limit: int = 10) -> pd.DataFrame:
    """The prompt's tokens that lost the most attention, summed over layers, heads and steps and as a share of all.

    Args:
        tokens: the text of each position.
        limit: how many for each policy.

    Returns:
        Table with columns policy, position, token, share (of the response's whole attention).
    """
    rows = []
    for result in results:
        lost = torch.zeros(trace.length)
        for step in range(1, trace.steps + 1):
            lost[: trace.prompt_length + step] += result.lost(step).sum((0, 1)).cpu()
        best = (lost / (trace.n_layers * trace.heads * trace.steps)).topk(min(limit, trace.length))
        rows += [
            {"policy": result.policy.name, "position": position, "token": tokens[position], "share": round(share, 5)}
            for share, position in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
    return pd.DataFrame(rows)
