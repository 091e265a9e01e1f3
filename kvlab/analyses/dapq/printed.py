"""DapQ's own tables, recomputed: is it ahead of every baseline, as its section 5.2 says?"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab import papers
from kvlab.analyses.findings import Findings

BENCHMARKS = {
    "longbench": ("table3", "average"),
    "ruler": ("table5", "average"),
    "helmet": ("table8", "average"),
    "needle": ("table9", "accuracy"),
}
RULER = ("table5", "table6", "table7")
OURS, FULL = "DapQ", "FullKV"

NOT_BEHIND = "printed/{benchmark}/dapq_not_behind"
BEHIND = "printed/{benchmark}/behind/{method}/{cell}"


def findings() -> Findings:
    """DapQ against the best of the baselines, in every cell (a model at a budget) where both are printed.

    Returns:
        Table with columns benchmark, cell, against, gap (DapQ less the best baseline, points); metrics `printed/
        needle/dapq_not_behind` (share of the cells in which no baseline is ahead) and likewise `longbench`, `ruler` and
        `helmet`, and `printed/needle/behind/H2O/Qwen3-8B/64`, by how many points it is behind where it is.
    """
    found, tables = Findings(pd.DataFrame()), []
    for benchmark, (table, column) in BENCHMARKS.items():
        names = RULER if benchmark == "ruler" else (table,)
        gaps: Any = _gaps(pd.concat([papers.figure("dapq", name) for name in names]), column)
        found.set(NOT_BEHIND, (gaps["gap"] >= 0).mean(), benchmark=benchmark)
        for row in gaps[gaps["gap"] < 0].to_dict("records"):
            found.set(BEHIND, -row["gap"], benchmark=benchmark, method=row["against"], cell=row["cell"])
        tables.append(gaps.assign(benchmark=benchmark))
    found.table = pd.concat(tables, ignore_index=True)
    return found


def _gaps(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Columns cell, against, gap."""
    known: Any = table[table["method"] != FULL]
    limited = known.dropna(subset=[column])
    rows = []
    for name, cell in limited.groupby(limited["model"].str.cat(limited["budget"].astype(int).astype(str), sep="/")):
        scores = cell.set_index("method")[column]
        others = scores.drop(OURS, errors="ignore")
        if OURS in scores and len(others):
            gap = round(float(scores[OURS] - others.max()), 6)
            rows.append({"cell": str(name), "against": others.idxmax(), "gap": gap})
    return pd.DataFrame(rows)
