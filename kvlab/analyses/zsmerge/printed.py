"""ZSMerge's own tables, recomputed: do the sentences of its text follow from what it prints?"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab import papers
from kvlab.analyses.findings import Findings

CATEGORIES = {
    "code": ("lcc", "repobench-p"),
    "few_shot": ("lsht", "samsum", "trec", "triviaqa"),
    "multi_doc_qa": ("2wikimqa", "dureader", "hotpotqa", "musique"),
    "single_doc_qa": ("multifieldqa_en", "multifieldqa_zh", "narrativeqa", "qasper"),
    "summarization": ("gov_report", "multi_news", "qmsum", "vcsum"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
}
"""LongBench's tasks by its categories: the columns of table 5 behind those of table 3."""

EVICTION = ("streamingllm", "h2o")
ESPECIALLY = ("multi_doc_qa", "summarization")
"""The kinds of tasks on which section 4.4.2 says that ZSMerge is furthest ahead of StreamingLLM and H2O."""

OVER = "{table}/over_{method}/{what}"
OF_FULL = "table2/of_full/{model}/{percent}"
SHARE_ABOVE = "{table}/share_above_snapkv"
SHARE_OVER = "{table}/over_{method}/share_above"
GAIN_OF_KINDS = "table3/over_{method}/{kinds}"
H2O_FAILS = "table5/h2o_fails"
FROM_TABLE_5 = "table3/from_table5"
BELOW_BEST = "table6/below_best"
AVERAGES_THAT_DIFFER = "table6/averages_that_differ"
SHARE_OF_FULL = "table6/share_of_full/{source}"
LLAMA_SYMBOLIC = "table7/over_snapkv/llama_symbolic"


def cells(name: str) -> pd.DataFrame:
    """Return a printed table as one row for each cell.

    The columns are model, capacity (where there is one), what, and one for each method. `what` is a category, a task or
    a level. The full cache's score is next to every capacity.
    """
    table = papers.figure("zsmerge", name)
    keys = [key for key in ("model", "budget", "capacity") if key in table]
    long = table.melt([*keys, "method"], var_name="what", value_name="score")
    if len(keys) < 2:
        return long.pivot(index=[*keys, "what"], columns="method", values="score").reset_index()
    compressed, full = long[long["method"] != "full"], long[long["method"] == "full"]
    wide = compressed.pivot(index=[*keys, "what"], columns="method", values="score").reset_index()
    scores_of_full = full.filter(["model", "what"]).assign(full=full["score"])
    return wide.merge(scores_of_full)


def differences(name: str, method: str = "snapkv") -> pd.DataFrame:
    """Return ZSMerge's printed scores less another method's, one row for each cell that has both.

    The columns are those of `cells`, `gain` (in the table's unit, to its second decimal) and `relative`.
    """
    table = cells(name).dropna(subset=[method, "zsmerge"])
    gain = (table["zsmerge"] - table[method]).round(2)
    return table.assign(gain=gain, relative=table["zsmerge"] / table[method] - 1)


def over_snapkv() -> Findings:
    """Count the cells of tables 3, 5 and 7 in which ZSMerge's score lies above SnapKV's, and below.

    Returns:
        Table with the columns of `differences` and `table`. Metrics, likewise of table5 and table7:
        - `table3/over_snapkv/wins`, `.../losses` and `.../ties`: cells.
        - `table3/over_snapkv/mean` and `.../least`: of the differences, in points.
        - `table3/share_above_snapkv`.
        Two metrics are of one table:
        - `table7/over_snapkv/llama_symbolic`.
        - `table3/from_table5`: how far a printed category lies at most from the mean of its tasks.
    """
    findings, parts = Findings(pd.DataFrame()), []
    for name in ("table3", "table5", "table7"):
        part: Any = differences(name)
        gains = part["gain"]
        counts = {"wins": (gains > 0).sum(), "losses": (gains < 0).sum(), "ties": (gains == 0).sum()}
        for what, value in {**counts, "mean": gains.mean(), "least": gains.min()}.items():
            findings.set(OVER, value, table=name, method="snapkv", what=what)
        findings.set(SHARE_ABOVE, counts["wins"] / len(gains), table=name)
        parts.append(part.assign(table=name))
    llama = parts[-1].set_index(["model", "what"])["gain"]
    findings.set(LLAMA_SYMBOLIC, llama.loc["llama-3.1-8b-instruct", "symbolic"])
    findings.set(FROM_TABLE_5, _from_table_5())
    findings.table = pd.concat(parts, ignore_index=True)
    return findings


def over_eviction() -> Findings:
    """Compare ZSMerge with StreamingLLM and H2O in tables 3 and 5. H2O has no scores on Mistral-7B.

    Returns:
        Table with the columns of `differences`, `table` and `against`. Metrics, likewise over streamingllm:
        - `table3/over_h2o/least`: points.
        - `table3/over_h2o/especially`: the mean relative gain on the kinds of ESPECIALLY.
        - `table3/over_h2o/elsewhere`: the mean relative gain on the other kinds.
        - `table5/over_h2o/share_above`.
        `table5/h2o_fails` counts tasks on which H2O has less than a tenth of the full cache's score at a size.
    """
    findings, parts = Findings(pd.DataFrame()), []
    for method in EVICTION:
        kinds: Any = differences("table3", method)
        tasks: Any = differences("table5", method)
        findings.set(OVER, kinds["gain"].min(), table="table3", method=method, what="least")
        named = kinds["what"].isin(ESPECIALLY)
        findings.set(GAIN_OF_KINDS, kinds.loc[named, "relative"].mean(), method=method, kinds="especially")
        findings.set(GAIN_OF_KINDS, kinds.loc[~named, "relative"].mean(), method=method, kinds="elsewhere")
        findings.set(SHARE_OVER, (tasks["gain"] > 0).mean(), table="table5", method=method)
        parts += [kinds.assign(table="table3", against=method), tasks.assign(table="table5", against=method)]
    findings.table = pd.concat(parts, ignore_index=True)
    of_h2o: Any = cells("table5").dropna(subset=["h2o"])
    findings.set(H2O_FAILS, of_h2o.loc[of_h2o["h2o"] < 0.1 * of_h2o["full"], "what"].nunique())
    return findings


def _from_table_5() -> float:
    """The largest distance of table 3's cells from the means of table 5's."""
    keys = ["model", "capacity", "method"]
    categories, tasks = (papers.figure("zsmerge", name).fillna({"capacity": 0}) for name in ("table3", "table5"))
    both: Any = categories.merge(tasks, on=keys)
    return max(float((both[name] - both[list(of)].mean(axis=1)).abs().max()) for name, of in CATEGORIES.items())


def infinite_bench() -> Findings:
    """Check the averages of table 6 against its rows, and how far ZSMerge lies below the best compressed one.

    Returns:
        Table with columns method, printed, recomputed (the mean of the eight tasks), difference. Metrics:
        - `table6/averages_that_differ`: rows whose mean does not print as their average.
        - `table6/below_best`: of the printed averages.
        - `table6/share_of_full/printed` and `table6/share_of_full/recomputed`.
        - `table6/over_h2o/average` and `table6/over_infllm/average`: ZSMerge's less theirs.
        - `table6/over_best/retrieve_kv`: ZSMerge's less the best of the other compressed ones.
    """
    rows = papers.figure("zsmerge", "table6").set_index("method")
    table: Any = pd.DataFrame({"printed": rows["average"], "recomputed": rows.drop(columns="average").mean(axis=1)})
    table["difference"] = table["printed"] - table["recomputed"]
    findings = Findings(table.reset_index())
    # Half of the last printed digit, and what floats are off by.
    findings.set(AVERAGES_THAT_DIFFER, (table["difference"].abs() > 0.005 + 1e-9).sum())
    compressed = table["printed"].drop(["full", "zsmerge"])
    findings.set(BELOW_BEST, compressed.max() - table.loc["zsmerge", "printed"])
    for method in ("h2o", "infllm"):
        lead = table.loc["zsmerge", "printed"] - table.loc[method, "printed"]
        findings.set(OVER, lead, table="table6", method=method, what="average")
    retrieved: Any = rows["retrieve_kv"]
    best = retrieved.drop(["full", "zsmerge"]).max()
    findings.set(OVER, retrieved["zsmerge"] - best, table="table6", method="best", what="retrieve_kv")
    for source in ("printed", "recomputed"):
        findings.set(SHARE_OF_FULL, table.loc["zsmerge", source] / table.loc["full", source], source=source)
    return findings


def summaries() -> Findings:
    """Compute ZSMerge's relative gain in ROUGE over H2O, the eviction-based method of table 2, and over LESS.

    Returns:
        Table with the columns of `differences` and `method`. Metrics:
        - `table2/over_h2o/least`, `table2/over_h2o/most`, `table2/over_h2o/mean`, and the same over less: relative.
        - `table2/of_full/llama-2-7b/5` and so on: the least of its ROUGEs with 5 % of the cache, as a share of the full
          cache's.
    """
    findings, parts = Findings(pd.DataFrame()), []
    for method in ("h2o", "less"):
        part: Any = differences("table2", method)
        gains = part["relative"]
        for what, value in {"least": gains.min(), "most": gains.max(), "mean": gains.mean()}.items():
            findings.set(OVER, value, table="table2", method=method, what=what)
        parts.append(part.assign(method=method))
    findings.table = pd.concat(parts, ignore_index=True)
    table: Any = cells("table2")
    least = (table["zsmerge"] / table["full"]).groupby([table["model"], table["budget"]]).min()
    for (model, budget), share in least.items():
        findings.set(OF_FULL, share, model=model, percent=round(100 * budget))
    return findings


def in_numbers(*recomputed: Findings) -> pd.DataFrame:
    """All numbers in one column, `value`, by their names."""
    rows = {row.metric: row.value for findings in recomputed for row in findings.rows}
    return pd.DataFrame({"value": rows})
