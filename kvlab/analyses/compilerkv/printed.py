"""What CompilerKV's printed tables say when they are added up again; no model runs."""

from __future__ import annotations

import pandas as pd

from kvlab.analyses.findings import Findings

OURS, WHOLE = "CompilerKV", "FullKV"


def wide(printed: pd.DataFrame) -> pd.DataFrame:
    """A row for each (model, method), a column for each task and for the average.

    Args:
        printed: tidy, as the package stores it: model, method, task (one of them `average`), score.
    """
    return printed.pivot_table(index=["model", "method"], columns="task", values="score", sort=False)


def averages(printed: pd.DataFrame) -> pd.DataFrame:
    """Printed averages beside those of the row's own scores: model, method, printed, again, gap (printed - again)."""
    table = wide(printed)
    again = table.drop(columns="average").mean(axis=1)
    frame = pd.DataFrame({"printed": table["average"], "again": again, "gap": table["average"] - again})
    return frame.reset_index()


def gains(printed: pd.DataFrame) -> pd.Series:
    """CompilerKV's printed average over each rival's, less 1, averaged over the models; by method."""
    by_method = wide(printed)["average"].unstack("method")
    rivals = by_method.drop(columns=[OURS, WHOLE])
    return (rivals.rdiv(by_method[OURS], axis=0) - 1).mean()


def retained(printed: pd.DataFrame) -> pd.Series:
    """Printed averages over the full cache's, averaged over the models; by method."""
    by_method = wide(printed)["average"].unstack("method")
    return by_method.div(by_method[WHOLE], axis=0).mean().drop(WHOLE)


def parts(printed: pd.DataFrame) -> pd.Series:
    """Table 2: 1 - the average without a part over the whole's, averaged over the models; by setting.

    Args:
        printed: a row for each setting (one of them `full`), a column for each model.
    """
    table = printed.set_index("setting")
    return (1 - table / table.loc["full"]).drop("full").mean(axis=1)


def checks(printed: pd.DataFrame, smaller: pd.DataFrame) -> Findings:
    """The text's numbers, from the rows of its tables.

    Args:
        printed: table 1, as for `wide`.
        smaller: the appendix's table of the same kind at a smaller budget.

    Returns:
        `averages` of both, with a column table; metrics `printed/average_gap/METHOD` (largest difference between a
        printed average of table 1 and its row's), `printed/smallest_lead` (of CompilerKV's average over the best other,
        over models, rows added again), `printed/best_task_gain` (largest lead on one task over the best other method),
        `printed/best_task_gain_over_dynamickv`, `printed/wins` (share of tasks on which CompilerKV is the best
        compressed method), `printed/recovered/MODEL` and `printed/recovered/mean` (average over the full cache's), and
        `printed/gain/METHOD/table1` and `.../appendix` (see `gains`).
    """
    both = {"table1": printed, "appendix": smaller}
    findings = Findings(pd.concat([averages(rows).assign(table=name) for name, rows in both.items()]))
    metrics = findings.metrics
    for method, rows in averages(printed).groupby("method"):
        metrics[f"printed/average_gap/{method}"] = float(rows["gap"].abs().max())
    table = wide(printed).drop(columns="average")
    ours, others = table.xs(OURS, level="method"), table.drop(index=[OURS, WHOLE], level="method")
    best = others.groupby(level="model").max().loc[ours.index]
    mean = table.mean(axis=1).unstack("method")
    metrics["printed/smallest_lead"] = float((mean[OURS] - mean.drop(columns=[OURS, WHOLE]).max(axis=1)).min())
    metrics["printed/best_task_gain"] = float((ours - best).to_numpy().max())
    dynamic = others.xs("DynamicKV", level="method")
    metrics["printed/best_task_gain_over_dynamickv"] = float((ours - dynamic).to_numpy().max())
    metrics["printed/wins"] = float((ours > best).to_numpy().mean())
    recovered = mean[OURS] / mean[WHOLE]
    metrics |= {f"printed/recovered/{model}": float(value) for model, value in recovered.items()}
    metrics["printed/recovered/mean"] = float(recovered.mean())
    for name, rows in both.items():
        metrics |= {f"printed/gain/{method}/{name}": float(value) for method, value in gains(rows).items()}
    return findings
