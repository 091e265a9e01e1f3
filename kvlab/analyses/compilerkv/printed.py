"""Add up CompilerKV's printed tables and the files in its authors' repository again; no model runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.methods._base.lookup import DecisionTables

OURS, WHOLE = "CompilerKV", "FullKV"
ROUNDING = 0.0051
"""A printed average that differs by more from its row's is not explained by rounding."""

AVERAGE_GAP = "printed/average_gap/{method}"
SMALLEST_LEAD = "printed/smallest_lead"
BEST_TASK_GAIN = "printed/best_task_gain"
BEST_TASK_GAIN_OVER_DYNAMICKV = "printed/best_task_gain_over_dynamickv"
WINS = "printed/wins"
RECOVERED, RECOVERED_MEAN = "printed/recovered/{model}", "printed/recovered/mean"
RECOVERED_MOST, RECOVERED_LEAST = "printed/recovered/most", "printed/recovered/least"
APPENDIX_GAP, APPENDIX_LEAD = "printed/appendix/average_gap", "printed/appendix/smallest_lead"
PUBLISHED_AVERAGE_GAP = "published/average_gap"
PUBLISHED_SCORE_GAP, PUBLISHED_SAME = "published/score_gap", "published/same_scores"
MIDDLE = slice(12, 21)
"""The layers that appendix B.3 calls middle, L12 to L20 of 32."""
MIDDLE_LESS_REST, SMALLEST_WEIGHT = "published/middle_less_rest", "published/smallest_weight"
ENTROPY_SLOPE, FALLS_WITH_ENTROPY = "published/entropy_slope", "published/falls_with_entropy"
HIGH_LESS_LOW, FALLS_WITH_PERPLEXITY = "published/high_less_low_perplexity", "published/falls_with_perplexity"
GAIN = "printed/gain/{method}/{table}"
POINTS, LEAST_POINTS = "printed/points/{part}", "printed/least_points/{part}"


def wide(printed: pd.DataFrame) -> pd.DataFrame:
    """A row for each (model, method), a column for each task and for the average.

    Args:
        printed: tidy, as the package stores it: model, method, task (one of them `average`), score.
    """
    return printed.pivot_table(index=["model", "method"], columns="task", values="score", sort=False)


def averages(printed: pd.DataFrame) -> pd.DataFrame:
    """Printed averages next to the averages of the rows: model, method, printed, again, gap (printed - again)."""
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
    """Recompute the text's numbers from the rows of its tables.

    Args:
        printed: table 1, as for `wide`.
        smaller: the appendix's table of the same kind at a smaller budget.

    Returns:
        `averages` of both, with a column table. Metrics of table 1:
        - `printed/average_gap/METHOD`: the largest difference between a printed average and that of its row.
        - `printed/smallest_lead`: the smallest lead of CompilerKV's average over the best other, over models. The rows
          are added again for it.
        - `printed/best_task_gain`: the largest lead on one task over the best other method.
        - `printed/best_task_gain_over_dynamickv`: the largest lead on one task over DynamicKV.
        - `printed/wins`: the share of tasks on which CompilerKV is the best compressed method.
        - `printed/recovered/MODEL`: the average over the full cache's.
        - `printed/recovered/mean`, `.../most` and `.../least`: the same over models.
        Metrics of both tables are `printed/gain/METHOD/table1` and `.../appendix` (see `gains`). Metrics of the
        appendix are `printed/appendix/average_gap` (CompilerKV's) and `printed/appendix/smallest_lead`.
    """
    both = {"table1": printed, "appendix": smaller}
    findings = Findings(pd.concat([averages(rows).assign(table=name) for name, rows in both.items()]))
    gaps = averages(printed).pivot(index="method", columns="model", values="gap").abs().max(axis=1)
    for method, gap in gaps.items():
        findings.set(AVERAGE_GAP, gap, method=method)
    findings.set(APPENDIX_GAP, averages(smaller).query("method == @OURS")["gap"].abs().to_numpy().max())
    table = wide(printed).drop(columns="average")
    rivals = table.drop(index=[OURS, WHOLE], level="method")
    ours, dynamic = (table.xs(method, level="method") for method in (OURS, "DynamicKV"))
    best = rivals.groupby(level="model").agg("max").loc[ours.index]
    findings.set(SMALLEST_LEAD, _smallest_lead(printed))
    findings.set(APPENDIX_LEAD, _smallest_lead(smaller))
    findings.set(BEST_TASK_GAIN, (ours - best).to_numpy().max())
    findings.set(BEST_TASK_GAIN_OVER_DYNAMICKV, (ours - dynamic).to_numpy().max())
    findings.set(WINS, (ours > best).to_numpy().mean())
    mean = table.mean(axis=1).unstack("method")
    recovered = mean.div(mean[WHOLE], axis=0).loc[:, OURS]
    for model, share in recovered.items():
        findings.set(RECOVERED, share, model=model)
    findings.set(RECOVERED_MEAN, recovered.mean())
    findings.set(RECOVERED_MOST, recovered.max())
    findings.set(RECOVERED_LEAST, recovered.min())
    for name, rows in both.items():
        for method, gain in gains(rows).items():
            findings.set(GAIN, gain, method=method, table=name)
    return findings


def _smallest_lead(printed: pd.DataFrame) -> float:
    """Of CompilerKV's average over the best other compressed method's, over models; rows added again."""
    mean = wide(printed).drop(columns="average").mean(axis=1).unstack("method")
    return mean.rsub(mean[OURS], axis=0).drop(columns=[OURS, WHOLE]).to_numpy().min()


def published_results(results: pd.DataFrame, printed: pd.DataFrame) -> Findings:
    """The scores in the authors' repository next to table 1.

    Args:
        results: model, task, score.
        printed: table 1, as for `wide`.

    Returns:
        Table: model, published and printed (averages of CompilerKV), whole (the full cache's). Metrics
        `published/average_gap` (largest difference of the averages), `published/score_gap` (of one task's score) and
        `published/same_scores` (share of scores that print alike).
    """
    theirs = results.pivot_table(index="model", columns="task", values="score", sort=False)
    table = wide(printed)
    ours, whole = (table.xs(method, level="method").loc[theirs.index] for method in (OURS, WHOLE))
    means = pd.DataFrame({"published": theirs.mean(axis=1), "printed": ours["average"], "whole": whole["average"]})
    gaps = (theirs - ours[theirs.columns]).abs().to_numpy()
    findings = Findings(means.reset_index())
    findings.set(PUBLISHED_AVERAGE_GAP, (means["published"] - means["printed"]).abs().to_numpy().max())
    findings.set(PUBLISHED_SCORE_GAP, gaps.max())
    findings.set(PUBLISHED_SAME, (gaps < ROUNDING).mean())
    return findings


def published_tables(tables: DecisionTables) -> Findings:
    """Describe figures A2 and A3 in numbers, from the tables in the authors' repository.

    Returns:
        Table with a row for each layer and columns layer and:
        - weight: the mean over its heads.
        - entropy_slope: of its thresholds over the middles of the entropy bins, per nat, as a mean over perplexity
          bins.
        - high_less_low_perplexity: its threshold in the last perplexity bin less the first, as a mean over entropy
          bins.
        The metrics are the means of the last two over layers, the shares of layers in which thresholds fall, and:
        - `published/middle_less_rest`: the mean weight of layers 12 to 20 less that of the others.
        - `published/smallest_weight`: the smallest weight over the mean weight.
    """
    heads, risk = np.array(tables.heads), np.array(tables.risk)
    low, high = tables.entropy
    middles = low + (np.arange(risk.shape[1]) + 0.5) / risk.shape[1] * (high - low)
    slopes = np.polyfit(middles, risk.mean(2).T, 1)[0]
    steps = (risk[:, :, -1] - risk[:, :, 0]).mean(1)
    weights = heads.mean(1)
    findings = Findings(
        pd.DataFrame(
            {
                "layer": range(len(heads)),
                "weight": weights,
                "entropy_slope": slopes,
                "high_less_low_perplexity": steps,
            }
        )
    )
    findings.set(MIDDLE_LESS_REST, weights[MIDDLE].mean() - np.delete(weights, MIDDLE).mean())
    findings.set(SMALLEST_WEIGHT, heads.min() / heads.mean())
    findings.set(ENTROPY_SLOPE, slopes.mean())
    findings.set(FALLS_WITH_ENTROPY, (slopes < 0).mean())
    findings.set(HIGH_LESS_LOW, steps.mean())
    findings.set(FALLS_WITH_PERPLEXITY, (steps < 0).mean())
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
    """Table 2's losses next to what appendix B.1 says of the thresholds."""
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
    """Describe the result of `checks` in words: the wrong averages, and the numbers of the text."""
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
