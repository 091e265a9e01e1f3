"""RocketKV's own tables, recomputed: do the sentences of its section 4 follow from what it prints?

A cell is a model at a budget (for RULER also at a length). Only cells in which both sides are printed count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.analyses.rocketkv.budgets import RIVALS

NOT_BEHIND = "printed/{benchmark}/{method}_not_behind_{others}"
BEHIND = "printed/{benchmark}/behind/{method}/{cell}"
NEEDLE_LOSS = "printed/needle/largest_loss/{budget}"
SNAPKV_NEEDLES = "printed/needle/snapkv_loses_at_least/{budget}"
LAST_OF_ALL = "printed/longbench/{method}_last/{model}"
LOSS = "printed/ruler/loss/{model}/{length}/{budget}"
LOSS_GROWS = "printed/ruler/loss_grows"
LEAD = "printed/ruler/lead/{model}/{length}/{budget}"
WIDER = "printed/ruler/wider"
WIDER_IN_THE_MEAN = "printed/ruler/wider_in_the_mean"
SMALLER = ("Mistral-7B-v0.2", "LongChat-7B-v1.5")
"""The models on which section 4.2 says how much SnapKV loses on needles."""
TIGHT = 512
"""The largest budget of which the paper's conclusion says that RocketKV is ahead of all others."""


def findings() -> Findings:
    """Recompute the printed tables' findings, cell by cell.

    Returns:
        Table with columns benchmark, cell, method, against, gap. gap is the method's lead over the best of the others
        that are printed in that cell, in points. Metrics:
        - `printed/longbench/rocketkv_not_behind_rivals`: the share of cells in which RocketKV's average is not below
          that of DuoAttention, SnapKV, Quest and SparQ. The same is there for `ruler` and `needle`, and for `tight`,
          which is all three at budgets of 256 and 512.
        - `printed/tight/rocketkv_not_behind_hybrid`: the same against Hybrid.
        - `printed/figure8/hybrid_not_behind_halves`: Hybrid against Quest and SparQ on LongBench and needles;
          `printed/all` has RULER, too.
        - `printed/longbench/behind/sparq/LongChat-7B-v1.5/1024` and so on: by how many points RocketKV is behind, in
          each cell where it is.
        - `printed/needle/largest_loss/512`: the most that RocketKV loses on needles against the full cache, of three
          models.
        - `printed/ruler/lead/Llama3.1-8B/96000/256`: the lead over the best rival.
        - `printed/ruler/wider`: the share of models and budgets at which that lead is larger at the longest printed
          sequence than at the shortest. `wider_in_the_mean`: the share of models at which the mean over budgets is.
        - `printed/ruler/loss/Llama3.1-8B/16000/256`: the loss against the full cache.
        - `printed/ruler/loss_grows`: the share of steps from one printed length to the next at which that loss becomes
          larger. The steps are those of all models and budgets.
        - `printed/needle/snapkv_loses_at_least/1024`: the smaller of SnapKV's losses on Mistral-7B and LongChat, in
          points.
        - `printed/longbench/sparq_last/Mistral-7B-v0.2`: the share of budgets at which all others score more than
          SparQ.
    """
    longbench, ruler = papers.figure("rocketkv", "longbench"), papers.figure("rocketkv", "ruler")
    ruler = ruler.assign(model=ruler["model"].str.cat(ruler["length"].astype(str), sep=" "))
    benchmarks = {
        "longbench": _scores(longbench, "average"),
        "needle": _scores(longbench, "needle"),
        "ruler": _scores(ruler, "average"),
    }
    found, tables = Findings(pd.DataFrame()), []

    def compare(benchmark: str, scores: pd.DataFrame, method: str, others: Sequence[str], name: str) -> None:
        gaps: Any = _gaps(scores, method, others)
        found.set(NOT_BEHIND, (gaps["gap"] >= 0).mean(), benchmark=benchmark, method=method, others=name)
        tables.append(gaps.assign(benchmark=benchmark, method=method))
        for row in gaps[gaps["gap"] < 0].to_dict("records") if method == "rocketkv" else ():
            cell = row["cell"].replace(" ", "/")
            found.set(BEHIND, -row["gap"], benchmark=benchmark, method=row["against"], cell=cell)

    for benchmark, scores in benchmarks.items():
        compare(benchmark, scores, "rocketkv", RIVALS, "rivals")
    named = {name: scores.assign(model=name + " " + scores["model"]) for name, scores in benchmarks.items()}
    together = pd.concat(named.values())
    compare("figure8", pd.concat([named["longbench"], named["needle"]]), "hybrid", ("quest", "sparq"), "halves")
    compare("all", together, "hybrid", ("quest", "sparq"), "halves")
    for name, others in (("rivals", RIVALS), ("hybrid", ("hybrid",))):
        tight: Any = _gaps(together.query("budget <= @TIGHT"), "rocketkv", others)
        found.set(NOT_BEHIND, (tight["gap"] >= 0).mean(), benchmark="tight", method="rocketkv", others=name)
    found.table = pd.concat(tables, ignore_index=True)

    full: Any = longbench[longbench["method"] == "full"].set_index("model")["needle"]
    ours: Any = longbench[longbench["method"] == "rocketkv"]
    lost = ours.assign(lost=ours["model"].map(full) - ours["needle"]).groupby("budget", as_index=False)["lost"].max()
    for row in lost.to_dict("records"):
        found.set(NEEDLE_LOSS, row["lost"], budget=int(row["budget"]))
    snapkv: Any = longbench.query("method == 'snapkv' and model in @SMALLER")
    for budget, part in snapkv.assign(lost=snapkv["model"].map(full) - snapkv["needle"]).groupby("budget"):
        found.set(SNAPKV_NEEDLES, part["lost"].min(), budget=int(budget))
    for model, part in benchmarks["longbench"].groupby("model"):
        others: Any = part.drop(columns=["model", "budget", "sparq"])
        found.set(LAST_OF_ALL, (part["sparq"] < others.min(axis=1)).mean(), method="sparq", model=model)
    return found | _longer(benchmarks["ruler"]) | _losses(papers.figure("rocketkv", "ruler"))


def _scores(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """model, budget and a column for each method; the full cache has no budget and is left out."""
    return (
        table.dropna(subset=["budget"]).pivot(index=["model", "budget"], columns="method", values=column).reset_index()
    )


def _gaps(scores: pd.DataFrame, method: str, others: Sequence[str]) -> pd.DataFrame:
    """Return columns cell, against (the best of the others), gap, for cells that print the method and the others.

    Only SnapKV may be missing, since the paper does not have it everywhere.
    """
    rivals: Any = scores[list(others)]
    both: Any = scores[method].notna() & rivals.drop(columns="snapkv", errors="ignore").notna().all(axis=1)
    part: Any = scores[both]
    rivals = rivals[both]
    cells = part["model"].str.cat(part["budget"].astype(int).astype(str), sep=" ")
    gap = (part[method] - rivals.max(axis=1)).round(6)
    return pd.DataFrame({"cell": cells, "against": rivals.idxmax(axis=1), "gap": gap})


def _losses(ruler: pd.DataFrame) -> Findings:
    """RocketKV's loss on RULER against the full cache, and whether it grows with the sequences."""
    at = ["model", "length"]
    full: Any = ruler[ruler["method"] == "full"]
    full = full.set_index(at)["average"].rename("full")
    ours: Any = ruler[ruler["method"] == "rocketkv"].join(full, on=at, how="inner").sort_values("length")
    ours = ours.assign(loss=(ours["full"] - ours["average"]).round(6), budget=ours["budget"].astype(int))
    found = Findings(ours)
    for row in ours.to_dict("records"):
        found.set(LOSS, row["loss"], model=row["model"], length=row["length"], budget=row["budget"])
    steps = ours.groupby(["model", "budget"])["loss"].diff().dropna()
    found.set(LOSS_GROWS, (steps > 0).mean())
    return found


def _longer(scores: pd.DataFrame) -> Findings:
    """RocketKV's lead on RULER by length, for each model and budget."""
    gaps = _gaps(scores, "rocketkv", RIVALS)
    parts = gaps["cell"].str.extract(r"^(?P<model>\S+) (?P<length>\d+) (?P<budget>\d+)$")
    cells = gaps.join(parts.astype({"length": int, "budget": int})).sort_values("length")
    found = Findings(gaps)
    for row in cells.to_dict("records"):
        found.set(LEAD, row["gap"], model=row["model"], length=row["length"], budget=row["budget"])
    leads: Any = cells.groupby(["model", "budget"])["gap"].agg(["first", "last", "size"]).query("size > 1")
    found.set(WIDER, (leads["last"] > leads["first"]).mean())
    means: Any = leads.groupby("model")[["first", "last"]].mean()
    found.set(WIDER_IN_THE_MEAN, (means["last"] > means["first"]).mean())
    return found
