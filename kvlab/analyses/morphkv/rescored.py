"""MorphKV's table 3 from its authors' published answers: LongBench's scores, and methods prompt by prompt.

The scores are data (`papers/figures/morphkv_rescored.csv`); the answers are not part of kvlab. With them at hand

    python -m kvlab.analyses.morphkv.rescored FOLDER > kvlab/papers/figures/morphkv_rescored.csv

writes the scores again (some ten minutes). `kvlab score` does the same for any answers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.scores import answer_sets

MODELS = {
    "llama3.1-8b-instruct": "Llama",
    "mistral": "Mistral",
    "phi4": "Phi4",
    "phi4-unsloth": "Phi4-unsloth",
}
"""How the authors' files name their models -> the name in the paper's tables."""

TASKS = {
    "2wmqa": "2wikimqa",
    "drdr": "dureader",
    "hpqa": "hotpotqa",
    "mnews": "multi_news",
    "mfqaen": "multifieldqa_en",
    "mfqazh": "multifieldqa_zh",
    "musq": "musique",
    "nqa": "narrativeqa",
    "pcnt": "passage_count",
    "prr": "passage_retrieval_en",
    "qsp": "qasper",
    "qms": "qmsum",
    "sams": "samsum",
    "tqa": "triviaqa",
    "vcs": "vcsum",
}
"""Columns of table 3 -> LongBench's tasks."""

BASE, METHOD = "snapkv", "morphkv_2048"
"""The two settings of table 3."""

FROM_ANSWERS = "table3/{which}_from_predictions"
CELLS_OFF = "table3/{which}_from_predictions/cells_off"
SHORT_CELLS = "table3/cells_of_fewer_prompts"
OF_CELLS = "table3/pairs/{what}"
OF_RUN = "table3/pairs_run/{what}"
LEAST_OF_TASK = "table3/over_snapkv/{task}/least"
MOST_OF_TASK = "table3/over_snapkv/{task}/most"
MEAN_OF_RUN = "table3/over_snapkv/mean_of_run/{model}"
MOST_OF_MEANS = "table3/over_snapkv/mean_of_run/most"
BEYOND_FULL = "table3/phi4_beyond_full/{source}/least"

BEYOND = ("2wmqa", "pcnt", "tqa")
"""The tasks for which section 5.3.1 says that Phi-4 with MorphKV exceeds full attention."""


def scored(folder: Path) -> pd.DataFrame:
    """The scores of the authors' answers, in percent, and each MorphKV setting next to SnapKV prompt by prompt.

    Args:
        folder: with files MODEL__SETTING.jsonl.gz.

    Returns:
        Columns model, setting, task, n, score; and, of MorphKV, pairs (prompts that SnapKV's file answers, too),
        over_snapkv (points), low, high (95 %, bootstrap over prompts). The rows of the task `mean` are over all tasks
        of both files, and count them.
    """
    sets = answer_sets.read_sets(folder)
    points = {name: answer_sets.score_set(answers) for name, answers in sets.items()}
    rows: list[dict[str, Any]] = []
    for name, answers in sets.items():
        model, _, setting = name.partition("__")
        base = f"{model}__{BASE}"
        compared = {}
        if setting != BASE and base in sets:
            pairs = answer_sets.matched(answers, sets[base])
            compared = {row.task: row for row in answer_sets.paired(pairs, points[name], points[base])}
        for row in answer_sets.summary(points[name]):
            found = {"model": MODELS.get(model, model), "setting": setting, "task": row.task, "n": row.n}
            found["score"] = round(row.score, 4)
            if pair := compared.get(row.task):
                ends = {"over_snapkv": pair.difference, "low": pair.low, "high": pair.high}
                found |= {"pairs": pair.n, **{key: round(value, 4) for key, value in ends.items()}}
            rows.append(found)
    columns = ["model", "setting", "task", "n", "score", "pairs", "over_snapkv", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype({"pairs": "Int64"})


def table_3() -> Findings:
    """Compare table 3 with the scores of the authors' answers.

    A cell is a task that the table prints for a model. MorphKV's score less SnapKV's, prompt by prompt, has an
    interval. A cell is clearly ahead, or behind, where this interval lies on one side of 0. Else it is open.

    Returns:
        Table with columns model, task, printed (whether table 3 has it), n, pairs, snapkv, morphkv, over_snapkv, low,
        high. Metrics:
        - `table3/printed_from_predictions` and `table3/morphkv_from_predictions`: the largest difference of a printed
          score from its answers', in points. `/cells_off` after each is the number of cells that differ by more than a
          last digit.
        - `table3/cells_of_fewer_prompts`.
        - `table3/pairs/cells`, `.../ahead`, `.../behind`, `.../open`, `.../share_ahead`, `.../share_not_behind`: of
          printed cells with all prompts.
        - `table3/pairs_run/...`: the same of all cells that were run.
        - `table3/over_snapkv/gov_report/least` and `table3/over_snapkv/trec/most`: points, over models.
        - `table3/over_snapkv/mean_of_run/Llama` and so on: points, over all tasks; the largest of them is `.../most`.
        - `table3/phi4_beyond_full/printed/least` and `.../answers/least`: points.
    """
    all_scores = papers.figure("morphkv", "rescored")
    by_cell = all_scores.query("setting in [@BASE, @METHOD]").set_index(["setting", "model", "task"])
    base, own = by_cell.loc[BASE], by_cell.loc[METHOD]
    table = own.rename(columns={"score": "morphkv"}).join(base["score"].rename("snapkv"))
    means = table.xs(answer_sets.MEAN, level="task")
    table = table.drop(answer_sets.MEAN, level="task").dropna(subset="pairs").reset_index()
    table["printed"] = table["task"].isin(list(TASKS.values()))
    findings = Findings(
        table.filter(["model", "task", "printed", "n", "pairs", "snapkv", "morphkv", "over_snapkv", "low", "high"])
    )
    long = papers.figure("morphkv", "table3").melt(["model", "method"], var_name="column", value_name="printed")
    long["task"] = [TASKS[column] for column in long["column"]]
    wide = long.pivot(index=["model", "task"], columns="method", values="printed")
    for which, method, answers in (("printed", "snapkv", base["score"]), ("morphkv", "morphkv", own["score"])):
        # LongBench gives two decimals, of which the table prints one.
        off = (wide[method] - answers.reindex(wide.index).round(2)).abs()
        findings.set(FROM_ANSWERS, off.max(), which=which)
        findings.set(CELLS_OFF, (off > 0.05 + 1e-9).sum(), which=which)
    short = table["pairs"] < table["n"]
    findings.set(SHORT_CELLS, (short & table["printed"]).sum())
    _count(findings, OF_CELLS, table[table["printed"] & ~short])
    _count(findings, OF_RUN, table)
    findings.set(LEAST_OF_TASK, _of(table, "gov_report").min(), task="gov_report")
    findings.set(MOST_OF_TASK, _of(table, "trec").max(), task="trec")
    for model, mean in means["over_snapkv"].to_dict().items():
        findings.set(MEAN_OF_RUN, mean, model=model)
    findings.set(MOST_OF_MEANS, means["over_snapkv"].max())
    phi = wide.loc["Phi4"].loc[[TASKS[column] for column in BEYOND]]
    findings.set(BEYOND_FULL, (phi["morphkv"] - phi["full"]).min(), source="printed")
    findings.set(BEYOND_FULL, (own.loc["Phi4"]["score"].reindex(phi.index) - phi["full"]).min(), source="answers")
    return findings


def _count(findings: Findings, effect: str, cells: pd.DataFrame) -> None:
    ahead, behind = cells["low"] > 0, cells["high"] < 0
    for what, number in {
        "cells": len(cells),
        "ahead": ahead.sum(),
        "behind": behind.sum(),
        "open": (~ahead & ~behind).sum(),
        "share_ahead": ahead.mean(),
        "share_not_behind": 1 - behind.mean(),
    }.items():
        findings.set(effect, number, what=what)


def _of(table: pd.DataFrame, task: str) -> pd.Series:
    return table.set_index("task").loc[[task], "over_snapkv"]


def main() -> None:
    """Print the scores of a folder of the authors' answers as CSV."""
    if len(sys.argv) != 2:
        raise KvlabError("name the folder of the authors' answers, and nothing else")
    sys.stdout.write(
        "# LongBench's scores of the authors' published answers, by `python -m kvlab.analyses.morphkv.rescored`.\n"
    )
    scored(Path(sys.argv[1])).to_csv(sys.stdout, index=False)


if __name__ == "__main__":
    main()
