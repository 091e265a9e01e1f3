"""MorphKV's headlines against its own figures: memory from the printed bars, figures 2b and 9, tables 1, 2, 4, 6 and 7.

No model runs. Each number follows from the paper's printed values, or from a stated setting and the published shape of
a model.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab import papers, scores
from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv import printed, sizes

BARS = {"longwriter": "figure 6", "longgenbench": "figure 8"}
"""The benchmarks with long responses, and where their cache sizes are drawn."""

SAVING_FROM_BARS = "bars/saving/{method}/{benchmark}"
OVER_MORPHKV = "figure9/{method}_over_morphkv"
SAVING_ON_LONG_CONTEXTS = "figure9b/saving/{end}"
QWEN_GAIN = "figure2b/qwen_gain"
QWEN_GAIN_INPUTS = "figure2b/qwen_gain/inputs"
QWEN_SAVING = "figure2b/qwen_saving/{length}"
VCSUM_SAVING = "figure2b/vcsum_saving/{answer}"
CHOICES = "figure10/choices/{method}"
TOTALS_THAT_DIFFER = "table7/totals_that_differ"
SIXTH = "table7/mean_of_six/{model}"
RELEVANCE = "table7/relevance_over_h2o/least"
MOST_OVER = "table1/most_over_{which}"
NOT_WORSE = "table2/share_not_worse"
LOGGED = "figure9/multinews/{method}"
LOGGED_SHARE = "figure9/logged/{method}"
LOGGED_TOTAL = "figure9/logged/{method}/of_all_prompts"
LOGGED_SAVING = "figure9/logged/saving"
MAX_AHEAD = "table4/max_over_sum/{which}"
MAX_AHEAD_INPUTS = "table4/max_over_sum/{which}/inputs"
WIDER = "table6/{what}/{which}"

FOCUSED = ("2wmqa", "mnews", "pcnt", "prt", "qms", "tqa")
"""The data sets that section 6.1.1 names as those that ask for max fusion."""

GROUP = 4
"""Query heads for each KV head of Llama-3.1-8B, Mistral-7B and Phi-4."""

DIGIT = 0.05
"""Half of the last digit of a score that is printed with one decimal."""


def memory() -> Findings:
    """Compute the savings that the printed bars of figures 6, 8 and 9 give, where the text states averages.

    Returns:
        Table with columns benchmark, method, printed, morphkv, saving. Metrics:
        - `bars/saving/h2o/longwriter` and so on.
        - `figure9/snapkv_over_morphkv` and `figure9/full_over_morphkv`: LongBench, Llama.
        - `figure9b/saving/no_answer` and `figure9b/saving/longest_answer`: by the stated settings of LongBench, in
          which SnapKV keeps the answer as well.
    """
    bars = papers.figure("morphkv", "sizes").pivot(index="benchmark", columns="method", values="ratio")
    findings, rows = Findings(pd.DataFrame()), []
    for method in ("h2o", "snapkv"):
        for benchmark in BARS:
            own, other = bars.loc[benchmark, "morphkv"], bars.loc[benchmark, method]
            saving = 1 - own / other
            findings.set(SAVING_FROM_BARS, saving, method=method, benchmark=benchmark)
            rows.append(
                {
                    "benchmark": benchmark,
                    "method": method,
                    "printed": other,
                    "morphkv": own,
                    "saving": saving,
                }
            )
    longbench = bars.loc["longbench"]
    for method, size in {"snapkv": longbench["snapkv"], "full": 1.0}.items():
        findings.set(OVER_MORPHKV, size / longbench["morphkv"], method=method)
    for end, answer in {"no_answer": 0.0, "longest_answer": sizes.answer_length()}.items():
        findings.set(SAVING_ON_LONG_CONTEXTS, _saved_over_snapkv("Llama", "longbench", answer), end=end)
    findings.table = pd.DataFrame(rows)
    return findings


def _saved_over_snapkv(model: str, benchmark: str, response: float, prompt: float | None = None) -> float:
    """1 - MorphKV's entries / SnapKV's by the stated settings, SnapKV with a set for each query head.

    Args:
        prompt: tokens; longer than every capacity unless given.
    """
    shape = sizes.paper_models()[model]
    settings: Any = sizes.settings(benchmark)["capacity"]
    prompt = float(max(settings)) if prompt is None else prompt
    own = sizes.entries("morphkv", prompt, response, settings["morphkv"])
    return 1 - own / sizes.entries("snapkv", prompt, response, settings["snapkv"], sets=shape.group)


def figure_2b() -> Findings:
    """Check figure 2b and section 1: Qwen 21 % higher with 83 % less memory, Phi-4 with 56 % less.

    Qwen's numbers are of LongGenBench, and Phi-4's of VCSum.

    Returns:
        Table with columns statement, model, response, saving. Metrics:
        - `figure2b/qwen_gain` (table 2) with its `/inputs`.
        - `figure2b/qwen_saving/implied`: at the length at which MorphKV's capacity is its printed share of the full
          cache.
        - `figure2b/qwen_saving/shortest`: the least that any length gives, where MorphKV evicts nothing.
        - `figure2b/vcsum_saving/no_answer` and `figure2b/vcsum_saving/longest_answer`: the range that LongBench allows.
    """
    second = papers.figure("morphkv", "table2").set_index(["model", "method"])["average"].loc["Qwen"]
    findings = Findings(pd.DataFrame())
    findings.set(QWEN_GAIN, second["morphkv"] / second["snapkv"] - 1)
    moved = (second["morphkv"] + 0.5) / (second["snapkv"] - 0.5) - second["morphkv"] / second["snapkv"]
    findings.set(QWEN_GAIN_INPUTS, moved)
    rows = []
    lengths = {"shortest": 1.0, "implied": float(sizes.implied_length("longgenbench"))}
    for length, response in lengths.items():
        saving = _saved_over_snapkv("Qwen", "longgenbench", response, prompt=0.0)
        findings.set(QWEN_SAVING, saving, length=length)
        rows.append({"statement": "LongGenBench", "model": "Qwen", "response": response, "saving": saving})
    answers = {"no_answer": 0.0, "longest_answer": float(scores.LONGBENCH["vcsum"].new_tokens)}
    for answer, response in answers.items():
        saving = _saved_over_snapkv("Phi4", "longbench", response)
        findings.set(VCSUM_SAVING, saving, answer=answer)
        rows.append({"statement": "VCSum", "model": "Phi4", "response": response, "saving": saving})
    findings.table = pd.DataFrame(rows)
    return findings


def choices_at_1_percent() -> Findings:
    """Count the entries that each method is free to choose at figure 10's smallest budget, by the stated settings.

    The prompts have the implied length of LongBench's. Both methods use a window of 32. SnapKV has a set for each query
    head, and so a quarter of MorphKV's entries.

    Returns:
        Table with columns method, entries, window, free; metrics `figure10/choices/snapkv`, `figure10/choices/morphkv`.
    """
    settings, group = sizes.settings("longbench"), sizes.paper_models()["Llama"].group
    budget = 0.01 * sizes.implied_length("longbench")
    findings, rows = Findings(pd.DataFrame()), []
    for method, sets in {"snapkv": group, "morphkv": 1}.items():
        entries, window = int(budget // sets), int(settings.loc[method, "window"])
        findings.set(CHOICES, entries - window, method=method)
        rows.append({"method": method, "entries": entries, "window": window, "free": entries - window})
    findings.table = pd.DataFrame(rows)
    return findings


def table_7() -> Findings:
    """Compare table 7 with table 1, and with the statements of appendix A.2 and the captions.

    The table has seven headings and six numbers in a row: the sixth criterion is left out. In two rows the last number
    is not table 1's total. It seems to be that criterion: with it, the mean of six is table 1's.

    Returns:
        Table with columns model, method, total (table 1), last (table 7), mean_of_six. Metrics:
        - `table7/totals_that_differ`: rows.
        - `table7/mean_of_six/Phi4` and `.../Qwen`: the distance from table 1's total, of the two rows that differ by
          more than rounding.
        - `table7/relevance_over_h2o/least`.
        - `table1/most_over_methods` and `table1/most_over_full`: relative gains.
    """
    first = papers.figure("morphkv", "table1").melt("method", var_name="model", value_name="total")
    table: Any = papers.figure("morphkv", "table7").merge(first, on=["model", "method"])
    criteria = ["relevance", "accuracy", "coherence", "clarity", "breadth_and_depth", "last"]
    table["mean_of_six"] = table[criteria].mean(axis=1)
    findings = Findings(table.filter(["model", "method", "total", "last", "mean_of_six"]))
    deviations = (table["last"] - table["total"]).abs()
    findings.set(TOTALS_THAT_DIFFER, (deviations > DIGIT + 1e-9).sum())
    # A difference above 1 is another number, not a rounding.
    for row in table[deviations > 1].to_dict("records"):
        findings.set(SIXTH, abs(row["mean_of_six"] - row["total"]), model=row["model"])
    relevance = table.pivot(index="model", columns="method", values="relevance")
    findings.set(RELEVANCE, (relevance["morphkv"] - relevance["h2o"]).min())
    totals: Any = first.pivot(index="model", columns="method", values="total")
    over_methods = totals["morphkv"] / totals[["h2o", "snapkv"]].min(axis=1) - 1
    findings.set(MOST_OVER, over_methods.max(), which="methods")
    findings.set(MOST_OVER, (totals["morphkv"] / totals["full"] - 1).max(), which="full")
    return findings


def table_2() -> Findings:
    """Table 2: in how many of its cells MorphKV is as good as both others, or better.

    Returns:
        Table with columns model, what, morphkv, best_other; metric `table2/share_not_worse`.
    """
    long = papers.figure("morphkv", "table2").melt(["model", "method"], var_name="what", value_name="score")
    wide: Any = long.pivot(index=["model", "what"], columns="method", values="score").reset_index()
    wide["best_other"] = wide[["h2o", "snapkv"]].max(axis=1)
    findings = Findings(wide.filter(["model", "what", "morphkv", "best_other"]))
    findings.set(NOT_WORSE, (wide["morphkv"] >= wide["best_other"]).mean())
    return findings


def logged_sizes() -> Findings:
    """Figure 9a's text on MultiNews next to the authors' published logs: sizes as shares of the full cache's.

    Returns:
        Table with columns method, stated, logged; metrics `figure9/multinews/snapkv`, `figure9/multinews/morphkv`.
    """
    findings = Findings(papers.figure("morphkv", "logs"))
    for row in findings.table.to_dict("records"):
        findings.set(LOGGED, row["logged"], method=row["method"])
    return findings


def logged_shares() -> Findings:
    """Compute figure 9 from the authors' published logs: shares of the full cache's entries on LongBench.

    SnapKV stores a set for each query head, MorphKV and the full cache one for each KV head. Only keys and values
    count. Each model has groups of four.

    Returns:
        Table with columns model, task, snapkv, morphkv (shares of the full cache). Metrics:
        - `figure9/logged/snapkv` and `figure9/logged/morphkv`: means over Llama's data sets.
        - `figure9/logged/snapkv/of_all_prompts` and its like: of all prompts' entries together.
        - `figure9/logged/saving`: one less the ratio of a model's two means, averaged over models.
    """
    rows: Any = papers.figure("morphkv", "logged_entries")
    shares = rows[["model", "task"]].assign(
        snapkv=GROUP * rows["snapkv"] / rows["full"], morphkv=rows["morphkv"] / rows["full"]
    )
    findings, means = Findings(shares), shares.groupby("model")[["snapkv", "morphkv"]].mean()
    llama = rows[rows["model"] == "Llama"]
    totals = llama[["full", "snapkv", "morphkv"]].mul(llama["prompts"], axis=0).sum()
    for method, sets in {"snapkv": GROUP, "morphkv": 1}.items():
        findings.set(LOGGED_SHARE, means.at["Llama", method], method=method)
        findings.set(LOGGED_TOTAL, sets * totals[method] / totals["full"], method=method)
    findings.set(LOGGED_SAVING, (1 - means["morphkv"] / means["snapkv"]).mean())
    return findings


def table_4() -> Findings:
    """Compare max with sum fusion in table 4, on the task that the text names, and on the six that ask for max fusion.

    Returns:
        Table with columns task, gain (of max over sum, relative). Metrics:
        - `table4/max_over_sum/largest`: of all tasks.
        - `table4/max_over_sum/six`: the mean of the six.
        - `/inputs` of each: how far the rounding of printed scores may move it.
    """
    rows: Any = papers.figure("morphkv", "table4").set_index("task")
    gains = rows["max"] / rows["sum"] - 1
    findings = Findings(gains.rename("gain").reset_index())
    for which, tasks in {"largest": [gains.idxmax()], "six": list(FOCUSED)}.items():
        part = rows.loc[tasks]
        findings.set(MAX_AHEAD, gains.loc[tasks].mean(), which=which)
        findings.set(MAX_AHEAD_INPUTS, printed.rounding(part["max"], part["sum"]), which=which)
    return findings


def table_6() -> Findings:
    """Compute how a window of 200 changes each score of table 6, in points.

    Returns:
        Table with columns model, what, change. Metrics:
        - `table6/average/least`: of the models' average accuracies.
        - `table6/average/least_of_two`: of Llama and Mistral, which the text names.
        - `table6/completion_rate/most`: the largest change, in either direction.
        - `table6/kinds/share_higher`: of the three kinds of accuracy by three models.
    """
    long = papers.figure("morphkv", "table6").melt(["model", "window"], var_name="what", value_name="score")
    wide: Any = long.pivot(index=["model", "what"], columns="window", values="score")
    change = (wide[200] - wide[32]).rename("change").reset_index()
    findings = Findings(change)
    average = change.query("what == 'average'").set_index("model")["change"]
    findings.set(WIDER, average.min(), what="average", which="least")
    findings.set(WIDER, average.loc[["Llama", "Mistral"]].min(), what="average", which="least_of_two")
    completion = change.query("what == 'completion_rate'")["change"]
    findings.set(WIDER, completion.abs().max(), what="completion_rate", which="most")
    kinds = change.query("what in ['once', 'range', 'periodic']")["change"]
    findings.set(WIDER, (kinds > 0).mean(), what="kinds", which="share_higher")
    return findings


PARTS = {
    "memory": memory,
    "figure_2b": figure_2b,
    "choices_at_1_percent": choices_at_1_percent,
    "logged_sizes": logged_sizes,
    "logged_shares": logged_shares,
    "table_2": table_2,
    "table_4": table_4,
    "table_6": table_6,
    "table_7": table_7,
}
NAMES = tuple(PARTS)
"""Names of what `everything` returns, in its order."""


def everything() -> list[Findings]:
    """All of them, in the order of the paper."""
    return [part() for part in PARTS.values()]
