"""What CompilerKV's printed tables say when they are added up again; no model runs."""

from __future__ import annotations

import pandas as pd

from kvlab.analyses.findings import Findings

OURS, WHOLE = "CompilerKV", "FullKV"
ROUNDING = 0.0051
"""A printed average that differs by more from its row's is not explained by rounding."""

AVERAGE_GAP = "printed/average_gap/{method}"
SMALLEST_LEAD = "printed/smallest_lead"
BEST_TASK_GAIN = "printed/best_task_gain"
BEST_TASK_GAIN_OVER_DYNAMICKV = "printed/best_task_gain_over_dynamickv"
WINS = "printed/wins"
RECOVERED, RECOVERED_MEAN = "printed/recovered/{model}", "printed/recovered/mean"
GAIN = "printed/gain/{method}/{table}"
POINTS, LEAST_POINTS = "printed/points/{part}", "printed/least_points/{part}"


def wide(printed: pd.DataFrame) -> pd.DataFrame:
    """A row for each (model, method), a column for each task and for the average.

    Args:
        printed: tidy, as the package stores it: model, method, task (one of them `average`), score.
    """
    return printed.pivot_table(index=["model", "method"], columns="task", values="score", sort=False)


def averages(printed: pd.DataFrame) -> pd.DataFrame:
    """Printed averages beside the averages of the rows: model, method, printed, again, gap (printed - again)."""
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
    gaps = averages(printed).pivot(index="method", columns="model", values="gap").abs().max(axis=1)
    for method, gap in gaps.items():
        findings.set(AVERAGE_GAP, gap, method=method)
    table = wide(printed).drop(columns="average")
    rivals = table.drop(index=[OURS, WHOLE], level="method")
    ours, dynamic = (table.xs(method, level="method") for method in (OURS, "DynamicKV"))
    best = rivals.groupby(level="model").agg("max").loc[ours.index]
    mean = table.mean(axis=1).unstack("method")
    leads = mean.rsub(mean[OURS], axis=0).drop(columns=[OURS, WHOLE])
    findings.set(SMALLEST_LEAD, leads.to_numpy().min())
    findings.set(BEST_TASK_GAIN, (ours - best).to_numpy().max())
    findings.set(BEST_TASK_GAIN_OVER_DYNAMICKV, (ours - dynamic).to_numpy().max())
    findings.set(WINS, (ours > best).to_numpy().mean())
    recovered = mean.div(mean[WHOLE], axis=0).loc[:, OURS]
    for model, share in recovered.items():
        findings.set(RECOVERED, share, model=model)
    findings.set(RECOVERED_MEAN, recovered.mean())
    for name, rows in both.items():
        for method, gain in gains(rows).items():
            findings.set(GAIN, gain, method=method, table=name)
    return findings


def points(printed: pd.DataFrame) -> Findings:
    """Table 2 in points of LongBench's average: what is lost without each part.

    Args:
        printed: table 2, as for `parts`.

    Returns:
        Table: part, model, points. Metrics `printed/points/PART` (mean over the models) and `printed/least_points/PART`
        (of the model that loses least).
    """
    table = printed.set_index("setting")
    lost = (table.loc["full"] - table).drop("full").rename_axis(index="part", columns="model")
    findings = Findings(lost.stack().rename("points").reset_index())
    for part, of_models in lost.iterrows():
        findings.set(POINTS, of_models.mean(), part=part)
        findings.set(LEAST_POINTS, of_models.min(), part=part)
    return findings


def points_in_words(points: Findings) -> str:
    """Table 2's losses beside what appendix B.1 says of the thresholds."""
    rows = (
        f"{part:20}{points.row(POINTS, part=part).value:6.2f} points in the mean, "
        f"{points.row(LEAST_POINTS, part=part).value:.2f} at least"
        for part in points.frame(POINTS)["part"]
    )
    return "\n".join(["Table 2, lost without:", *rows])


def wrong_averages(checked: Findings) -> pd.DataFrame:
    """The rows of `checks` whose printed average differs from the row's own by more than rounding."""
    return checked.table.query("abs(gap) > @ROUNDING")


def in_words(checked: Findings) -> str:
    """What `checks` found, for a reader: the wrong averages, and the numbers of the text."""
    lines = [
        "Printed averages that differ from their rows' by more than rounding:",
        wrong_averages(checked).round(2).to_string(index=False),
    ]
    effects = {
        "smallest_lead": SMALLEST_LEAD,
        "best_task_gain": BEST_TASK_GAIN,
        "best_task_gain_over_dynamickv": BEST_TASK_GAIN_OVER_DYNAMICKV,
        "wins": WINS,
        "recovered/mean": RECOVERED_MEAN,
    }
    return "\n".join([*lines, *(f"{name:32}{checked.row(effect).value:.3f}" for name, effect in effects.items())])
