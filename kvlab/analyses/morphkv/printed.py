"""MorphKV's own tables, recomputed: do the averages that its text states follow from what it prints?"""

from __future__ import annotations

import pandas as pd

from kvlab import papers
from kvlab.analyses.findings import Findings

GAIN = "{table}/gain_over_{method}"
GAIN_INPUTS = "{table}/gain_over_{method}/inputs"
GAIN_OF_MODEL = "{table}/gain_over_{method}/{model}"
GAIN_OF_OTHERS = "table1/gain_over_snapkv/others"
QWEN_BELOW = "table1/below_snapkv/Qwen"
SNAPKV_FROM_FULL = "table1/snapkv_from_full"
OVER_TASKS = "table3/{what}"
OVER_LLAMAS_TASKS = "table3/{what}/Llama"
WITH_OMITTED = "table3/{what}_with_omitted/Llama"
MULTINEWS = "table3/gain/mnews/least"
VCSUM = "figure2b/vcsum_phi4"
MAX_OVER_SUM = "table4/max_over_sum"
MAX_OVER_SUM_INPUTS = "table4/max_over_sum/inputs"
SUM_OVER_MAX = "table5/sum_over_max"


def rounding(numerator: pd.Series, denominator: pd.Series) -> float:
    """How far the mean of `over / under` may lie from that of the numbers before they were rounded for print.

    Args:
        numerator, denominator: printed numbers of one table, all above 0; each stands for half of the table's last
            digit more or less.
    """
    decimals = max(len(f"{value:.10f}".rstrip("0").partition(".")[2]) for value in (*numerator, *denominator))
    half = 0.5 * 10**-decimals
    return float(((numerator + half) / (denominator - half) - numerator / denominator).mean())


def long_responses() -> Findings:
    """Compute MorphKV's relative gain in score over SnapKV and H2O on long-response tasks (tables 1 and 2).

    Returns:
        Table with columns table, model, against, gain. The first four metrics are means over models, with intervals
        over them:
        - `table1/gain_over_snapkv`, `table1/gain_over_h2o`, `table2/gain_over_snapkv`, `table2/gain_over_h2o`.
        - `table1/gain_over_snapkv/Llama`: each model's own gain.
        - `table1/gain_over_snapkv/inputs`: how far the rounding of the printed scores may move the mean.
        - `table1/gain_over_snapkv/others`: table 1 without Qwen, for which the text claims no gain.
        - `table1/below_snapkv/Qwen`: how far Qwen's score lies below.
        - `table1/snapkv_from_full`: how far SnapKV's scores lie from full attention's, in either direction.
        SnapKV's budget covers the whole prompt in table 1, and it never evicts later. So the last metric is the noise
        of the judge and of sampling.
    """
    first = papers.figure("morphkv", "table1").set_index("method").T
    second = papers.figure("morphkv", "table2").pivot(index="model", columns="method", values="average")
    findings, rows = Findings(pd.DataFrame()), []
    for name, scores_of in (("table1", first), ("table2", second)):
        for other in ("snapkv", "h2o"):
            gains = scores_of["morphkv"] / scores_of[other] - 1
            findings.add(GAIN, gains, table=name, method=other)
            moved = rounding(scores_of.loc[:, "morphkv"], scores_of.loc[:, other])
            findings.set(GAIN_INPUTS, moved, table=name, method=other)
            for model, gain in gains.to_dict().items():
                findings.set(GAIN_OF_MODEL, gain, table=name, method=other, model=model)
                rows.append({"table": name, "model": model, "against": other, "gain": gain})
    over_snapkv = first["morphkv"] / first["snapkv"] - 1
    findings.add(GAIN_OF_OTHERS, over_snapkv.drop("Qwen"))
    findings.set(QWEN_BELOW, -over_snapkv.loc["Qwen"])
    findings.add(SNAPKV_FROM_FULL, (first["snapkv"] / first["full"] - 1).abs())
    findings.table = pd.DataFrame(rows)
    return findings


def long_contexts() -> Findings:
    """Compute MorphKV's score less SnapKV's in table 3, task by task, and for Llama with two tasks that it leaves out.

    Returns:
        Table with columns model, task, snapkv, morphkv, printed (False for the two). Metrics of all models, with
        intervals over tasks:
        - `table3/gain`: points.
        - `table3/share_not_worse`: the share of tasks at which MorphKV is not worse.
        - `table3/share_higher`: the share of tasks at which it is higher.
        `.../Llama` is the same of Llama. `..._with_omitted/Llama` is the same of Llama with the two tasks. Two metrics
        have no interval:
        - `table3/gain/mnews/least`: points, of all models.
        - `figure2b/vcsum_phi4`: the relative gain.
    """
    printed = papers.figure("morphkv", "table3").melt(["model", "method"], var_name="task", value_name="score")
    printed = printed.pivot(index=["model", "task"], columns="method", values="score").reset_index()
    answers = papers.figure("morphkv", "rescored").query("model == 'Llama' and task in ['trec', 'lsht']")
    omitted = answers.replace({"setting": {"morphkv_2048": "morphkv"}}).pivot(
        index=["model", "task"], columns="setting", values="score"
    )
    table = pd.concat([printed.assign(printed=True), omitted.reset_index().assign(printed=False)], ignore_index=True)
    table = table.filter(["model", "task", "snapkv", "morphkv", "printed"])
    findings = Findings(table)
    gains = table["morphkv"] - table["snapkv"]
    llama = table["model"] == "Llama"
    # Scores are printed with one decimal: a difference below half of that is none.
    for what, values in (("gain", gains), ("share_not_worse", gains > -0.05), ("share_higher", gains > 0.05)):
        findings.add(OVER_TASKS, values[table["printed"]], what=what)
        findings.add(OVER_LLAMAS_TASKS, values[table["printed"] & llama], what=what)
        findings.add(WITH_OMITTED, values[llama], what=what)
    findings.set(MULTINEWS, min(gains[table["task"] == "mnews"]))
    vcsum = table.set_index(["model", "task"]).loc[("Phi4", "vcs")]
    findings.set(VCSUM, vcsum["morphkv"] / vcsum["snapkv"] - 1)
    return findings


def in_numbers(*recomputed: Findings) -> pd.DataFrame:
    """All numbers, a row for each: value, low, high; without an interval, low and high are the value."""
    rows = [row for findings in recomputed for row in findings.rows]
    ends = [(row.value, row.value) if row.low is None else (row.low, row.high) for row in rows]
    return pd.DataFrame(
        {"value": [row.value for row in rows], "low": [low for low, _ in ends], "high": [high for _, high in ends]},
        index=[row.metric for row in rows],
    )


def fusions() -> Findings:
    """Compare max fusion with sum fusion in tables 4 and 5: relative, as means over tasks or over models and criteria.

    Returns:
        Table with columns table, what, gain (of max over sum). Metrics `table4/max_over_sum` and `table5/sum_over_max`
        have intervals. `table4/max_over_sum/inputs` is how far the rounding of the printed scores may move the first.
    """
    fourth = papers.figure("morphkv", "table4").set_index("task")
    fifth = papers.figure("morphkv", "table5").melt(["model", "fusion"], var_name="what", value_name="score")
    fifth = fifth.pivot(index=["model", "what"], columns="fusion", values="score")
    gains = {"table4": fourth["max"] / fourth["sum"] - 1, "table5": fifth["max"] / fifth["sum"] - 1}
    rows = [
        {"table": name, "what": key if name == "table4" else " ".join(key), "gain": gain}
        for name, series in gains.items()
        for key, gain in series.to_dict().items()
    ]
    findings = Findings(pd.DataFrame(rows))
    findings.add(MAX_OVER_SUM, gains["table4"])
    findings.set(MAX_OVER_SUM_INPUTS, rounding(fourth.loc[:, "max"], fourth.loc[:, "sum"]))
    findings.add(SUM_OVER_MAX, fifth["sum"] / fifth["max"] - 1)
    return findings
