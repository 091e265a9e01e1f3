"""DapQ's own tables, recomputed: is it ahead of every baseline, as its section 5.2 says?"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab import papers
from kvlab.analyses.findings import Findings

BENCHMARKS = {
    "longbench": ("table3", "average"),
    "hotpotqa": ("table3", "hotpotqa"),
    "2wikimqa": ("table3", "2wikimqa"),
    "longbench_v2": ("table4", "overall"),
    "ruler": ("table5", "average"),
    "helmet": ("table8", "average"),
    "needle": ("table9", "accuracy"),
}
RULER = ("table5", "table6", "table7")
OURS, FULL = "DapQ", "FullKV"

NOT_BEHIND = "printed/{benchmark}/dapq_not_behind"
BEHIND = "printed/{benchmark}/behind/{method}/{cell}"
TIES = "printed/{benchmark}/ties"
HARD = "printed/longbench_v2/hard_over_snapkv"
ABOVE_FULL = "printed/longbench_v2/above_full"
LEAST_OVER = "printed/ruler/least_over/{method}"
LACACHE = "Lacache"


def findings() -> Findings:
    """Compare DapQ with the best of the baselines, in every cell (a model at a budget) where both are printed.

    Returns:
        Table with columns benchmark, cell, against, gap. gap is DapQ less the best baseline, in points. Metrics,
        likewise for the other BENCHMARKS:
        - `printed/needle/dapq_not_behind`: the share of the cells in which no baseline is ahead.
        - `printed/needle/ties`: the number of cells that are equal.
        - `printed/needle/behind/H2O/Qwen3-8B/64`: by how many points DapQ is behind, in each cell where it is.
        Metrics of table 4:
        - `printed/longbench_v2/hard_over_snapkv`: points, of Llama-3-8B with 64 entries.
        - `printed/longbench_v2/above_full`: the number of cells of compressed caches above the full one.
        Of tables 5 to 7 there is `printed/ruler/least_over/Lacache`, in points.
    """
    found, tables = Findings(pd.DataFrame()), []
    for benchmark, (table, column) in BENCHMARKS.items():
        names = RULER if benchmark == "ruler" else (table,)
        gaps: Any = _gaps(pd.concat([papers.figure("dapq", name) for name in names]), column)
        found.set(NOT_BEHIND, (gaps["gap"] >= 0).mean(), benchmark=benchmark)
        found.set(TIES, (gaps["gap"] == 0).sum(), benchmark=benchmark)
        for row in gaps[gaps["gap"] < 0].to_dict("records"):
            found.set(BEHIND, -row["gap"], benchmark=benchmark, method=row["against"], cell=row["cell"])
        tables.append(gaps.assign(benchmark=benchmark))
    found.table = pd.concat(tables, ignore_index=True)
    _longbench_v2(found)
    ruler: Any = pd.concat([papers.figure("dapq", name) for name in RULER])
    alone: Any = _gaps(ruler[ruler["method"].isin([OURS, LACACHE])], "average")
    found.set(LEAST_OVER, alone["gap"].min(), method=LACACHE)
    return found


def _longbench_v2(found: Findings) -> None:
    """The numbers of table 4 in addition to its gaps."""
    table: Any = papers.figure("dapq", "table4")
    hard = table.query("model == 'Llama3-8B-Instruct' and budget == 64").set_index("method")["hard"]
    found.set(HARD, hard[OURS] - hard["SnapKV"])
    full = table[table["method"] == FULL].set_index("model")["overall"]
    compressed = table[table["method"] != FULL]
    found.set(ABOVE_FULL, (compressed["overall"] > compressed["model"].map(full)).sum())


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
