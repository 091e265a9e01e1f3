"""RocketKV, section 3.5 and table 1: what methods store and load, by the paper's formulas and on tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

METHODS = ("snapkv", "quest", "sparq", "rocketkv")

STORAGE = "storage/{method}/{budget}"
TRAFFIC = "traffic/{method}/{budget}"


def storage_by_paper(method: str, c: float) -> float:
    """Table 1: what is stored, as a share of the full cache, at a compression ratio of c."""
    return {"snapkv": 1 / c, "quest": 1 + 1 / c, "sparq": 2.0, "rocketkv": c**-0.5 + 2 * c**-0.75}[method]


def traffic_by_paper(method: str, c: float) -> float:
    """Table 1: what a decoding step loads, as a share of the full cache: 1 / c for every method."""
    return 1 / c


def storage_by_tensors(method: str, c: float) -> float:
    """Compute the storage that table 1 should state for a method, as a share of the full cache.

    Minima and maxima, or copies, of *keys* alone cost half as much as those of keys and values. RocketKV's pages hold
    c^(1/4) entries and two vectors each, which is one entry's key and value: 1/c^(3/4). SparQ copies keys only. Quest
    spends half of the budget on finding, so that it has t / 2 pages. It has fewer where that would make them smaller
    than 16 entries.
    """
    return {"snapkv": 1 / c, "quest": 1 + min(1 / (2 * c), 1 / 16), "sparq": 1.5, "rocketkv": c**-0.5 + c**-0.75}[
        method
    ]


def formulas(compressions: Sequence[float] = (4, 16, 64)) -> pd.DataFrame:
    """Table 1 in numbers, and what it should say by the sizes of the tensors: a row for each method and compression."""
    return pd.DataFrame(
        [
            {
                "method": method,
                "c": c,
                "storage, paper": storage_by_paper(method, c),
                "storage, tensors": storage_by_tensors(method, c),
                "traffic": traffic_by_paper(method, c),
            }
            for method in METHODS
            for c in compressions
        ]
    )


def table_1(trace: Trace, budgets: Sequence[int] = (256, 512, 1024, 2048)) -> Findings:
    """Compute table 1 as a function of c = S / t, next to the bytes of a replay; S is the prompt and the response.

    SnapKV keeps every generated token, so its prompt gets the budget less the response (the paper's appendix A.3).
    Where that is smaller than its window, there is no measurement.

    Args:
        trace: with a response.
        budgets: t, in entries for each layer and KV head.

    Returns:
        Table with one row for each method and budget. The columns are method, budget, c, storage_paper,
        storage_tensors, storage_measured, traffic_paper, traffic_measured. storage_tensors is by `storage_by_tensors`.
        Storage and traffic are shares of the full cache. Metrics `storage/rocketkv/512` and `traffic/rocketkv/512` are
        measured.

    Raises:
        KvlabError: a trace without a response, which loads nothing, or one without the last prompt queries.
    """
    if not trace.steps:
        raise KvlabError("table 1 is about decoding, and this trace has no response; capture it with new_tokens=64")
    full = replay(trace, policy("full")).summary
    rows = []
    jobs = [(method, budget) for method in METHODS for budget in budgets]
    for method, budget in progress_bars.each(jobs, "table 1", "replay"):
        c = trace.length / budget
        contender = _of_the_table(method, budget, trace)
        sizes = (
            {"stored_bytes": math.nan, "read_bytes": math.nan}
            if contender is None
            else replay(trace, contender).summary
        )
        storage, traffic = (sizes[name] / full[name] for name in ("stored_bytes", "read_bytes"))
        rows.append(
            {
                "method": method,
                "budget": budget,
                "c": c,
                "storage_paper": storage_by_paper(method, c),
                "storage_tensors": storage_by_tensors(method, c),
                "storage_measured": storage,
                "traffic_paper": traffic_by_paper(method, c),
                "traffic_measured": traffic,
            }
        )
    findings = Findings(pd.DataFrame(rows))
    for row in findings.table.dropna().to_dict("records"):
        at = {"method": row["method"], "budget": row["budget"]}
        findings.set(STORAGE, row["storage_measured"], **at)
        findings.set(TRAFFIC, row["traffic_measured"], **at)
    return findings


def _of_the_table(method: str, budget: int, trace: Trace) -> Policy | None:
    if method != "snapkv":
        return policy(method, budget=budget)
    snapkv = policy(method, budget=1.0)
    left = budget - trace.steps
    return snapkv.replace(budget=left) if left >= snapkv.minimum else None
