"""MorphKV, figures 2a, 6, 8 and 9: bytes that each method stores by formula, against measured and printed ones.

The paper's MorphKV keeps one set of entries for each KV head. Its SnapKV and H2O keep one for each query head. This
multiplies their entries by the size of a GQA group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from kvlab import papers, scores
from kvlab.analyses.findings import Findings
from kvlab.analyses.morphkv.windows import slope
from kvlab.core.geometry import Geometry, geometry
from kvlab.errors import KvlabError
from kvlab.inputs import shapes

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

SCORE_BYTES = 4
"""Scores and attention rows that a policy keeps with its entries are float32, whatever the cache is."""

METHODS = ("full", "snapkv", "h2o", "morphkv")

DEVIATION = "sizes/deviation"
GROWTH = "growth/{policy}"
RELATIVE_SIZE = "relative_size/{benchmark}/{method}"
WITH_ROWS = "relative_size/{benchmark}/morphkv_with_rows"
SAVING = "saving/{benchmark}/{method}"

HEADLINE = "longgenbench"
"""The benchmark that the accuracy of the abstract's sentence is of, and with it the memory that it saves."""

# LongBench's names of the tasks of table 3, for its longest answers.
TABLE_3 = (
    "2wikimqa",
    "dureader",
    "hotpotqa",
    "multi_news",
    "multifieldqa_en",
    "multifieldqa_zh",
    "musique",
    "narrativeqa",
    "passage_count",
    "passage_retrieval_en",
    "qasper",
    "qmsum",
    "samsum",
    "triviaqa",
    "vcsum",
)


def of_model(lm: LM) -> Geometry:
    """Return the geometry of a loaded model, with the layers whose cache policies compress.

    Layers of a hybrid model that look at a window or keep a state do not count.
    """
    return replace(geometry(lm.model.config), layers=len(lm.layout.compressed))


def paper_models() -> dict[str, Geometry]:
    """The four models of section 4, by the paper's names."""
    published = {"Llama": "llama-3.1-8b", "Mistral": "mistral-7b-v0.2", "Qwen": "qwen2.5-7b"}
    known = {name: geometry(shapes.config(shape)) for name, shape in published.items()}
    # From the published config.json of microsoft/phi-4.
    return {
        "Llama": known["Llama"],
        "Mistral": known["Mistral"],
        "Phi4": Geometry(40, 40, 10, 128),
        "Qwen": known["Qwen"],
    }


def entries(method: str, prompt: float, response: float, budget: float, sets: int = 1) -> float:
    """Entries stored for one KV head in one layer once `response` tokens have been decoded.

    Args:
        method: one of METHODS. SnapKV evicts from the prompt alone, H2O and MorphKV hold at most `budget` in all.
        sets: sets of entries for each KV head: 1, or the group's size where every query head stores its own.

    Raises:
        KvlabError: another method.
    """
    if method not in METHODS:
        raise KvlabError(f"{method!r} is none of {', '.join(METHODS)}")
    if method == "full":
        return prompt + response
    if method == "snapkv":
        return sets * (min(prompt, budget) + response)
    return sets * min(prompt + response, budget)


def stored_bytes(
    model: Geometry,
    method: str,
    prompt: float,
    response: float,
    budget: float,
    window: int = 0,
    sets: int = 1,
    element: int = 4,
    score_bytes: int = SCORE_BYTES,
) -> float:
    """Bytes of one sequence over all layers, with what the method keeps with its entries.

    H2O keeps one score for each entry, MorphKV `window` attention weights.

    Args:
        element: bytes of one number of a key or a value (4: float32, 2: bfloat16).
        score_bytes: bytes of one score or attention weight; 0 counts keys and values alone.
    """
    auxiliary = {"h2o": 1, "morphkv": window}.get(method, 0) * score_bytes
    count = entries(method, prompt, response, budget, sets)
    return model.layers * model.kv_heads * count * (2 * model.head_dim * element + auxiliary)


def against_formula(table: pd.DataFrame, model: Geometry, budget: int, window: int) -> Findings:
    """Compare measured bytes of `along_a_response` with the formula's, and measure how fast they grow.

    Args:
        table: with columns document, policy, prompt, step, measure, value; SnapKV with a set for each query head.
        model: of the model that was measured, in float32.

    Returns:
        Table with columns policy, prompt, step, measured, predicted, deviation (relative). Metrics:
        - `sizes/deviation`: the largest.
        - `growth/snapkv` and so on, with intervals over documents: bytes that a decoded token adds, as a multiple of
          its bytes in the full cache. They are of the second half of the response.
    """
    rows = table.loc[(table["measure"] == "stored_bytes") & table["policy"].isin(METHODS)]
    sets = {"snapkv": model.group}
    known = rows.filter(["policy", "prompt", "step"]).drop_duplicates()
    predicted = [
        stored_bytes(model, policy, prompt, step, budget, window, sets.get(policy, 1))
        for policy, prompt, step in known.itertuples(index=False)
    ]
    rows = rows.assign(measured=rows["value"]).merge(known.assign(predicted=predicted))
    rows["deviation"] = (rows["measured"] / rows["predicted"] - 1).abs()
    findings = Findings(rows.filter(["policy", "prompt", "step", "measured", "predicted", "deviation"]))
    findings.set(DEVIATION, max(rows["deviation"]))
    late = rows.loc[rows["step"] > max(rows["step"]) / 2].groupby(["policy", "document"])
    growth = late.apply(slope, "measured", include_groups=False)
    for name in rows["policy"].unique():
        findings.add(GROWTH, growth[name] / growth["full"], policy=name)
    return findings


# ---------------------------------------------------------------------------------------------- against print


def implied_length(benchmark: str) -> int:
    """Tokens of prompt and response at which MorphKV's stated capacity is the printed share of the full cache.

    Section 5.3 prints another length: an average prompt of nearly 6K tokens.
    """
    capacity = settings(benchmark).loc["morphkv", "capacity"]
    return round(capacity / _printed().loc[benchmark, "morphkv"])


def answer_length() -> float:
    """Mean of the longest answers that LongBench allows on the tasks of table 3, in tokens: an upper bound."""
    return sum(scores.LONGBENCH[task].new_tokens for task in TABLE_3) / len(TABLE_3)


def settings(benchmark: str) -> pd.DataFrame:
    """The settings of section 5 for each method on a benchmark: columns capacity, window, stores, by method."""
    table = papers.figure("morphkv", "settings")
    return table[table["benchmark"] == benchmark].set_index("method")


def _printed() -> pd.DataFrame:
    return papers.figure("morphkv", "sizes").pivot(index="benchmark", columns="method", values="ratio")


def benchmark_sizes(benchmark: str) -> pd.DataFrame:
    """Cache sizes of the stated settings at the implied length, relative to full attention.

    Returns:
        Columns model, method, ratio (keys and values), with_rows (and what is kept with them, all in bfloat16).
    """
    stated, total = settings(benchmark), implied_length(benchmark)
    # LongWriter's and LongGenBench's prompts fit into every budget, so only prompt + response matters there.
    response = answer_length() if benchmark == "longbench" else total
    models = paper_models()
    if benchmark == "longgenbench":
        models.pop("Phi4")  # table 2 has no row for it
    if benchmark == "longbench":
        models = {"Llama": models["Llama"]}  # figure 9a
    rows = []
    for name, model in models.items():
        full = stored_bytes(model, "full", total - response, response, 0, element=2)
        for method, setting in stated.to_dict("index").items():
            window = 0 if pd.isna(setting["window"]) else int(setting["window"])
            sets = 1 if method == "morphkv" else model.group
            args = (model, method, total - response, response, setting["capacity"], window, sets, 2)
            ratio, with_rows = (stored_bytes(*args, score_bytes=n) / full for n in (0, 2))
            rows.append({"model": name, "method": method, "ratio": ratio, "with_rows": with_rows})
    return pd.DataFrame(rows)


def printed_sizes() -> Findings:
    """Compute figures 6, 8 and 9 by formula at the implied lengths, next to the printed sizes.

    Returns:
        Table with columns benchmark, method, predicted, with_rows, printed, tokens (the implied length). Metrics, with
        intervals over models:
        - `relative_size/longwriter/snapkv` and so on, and `relative_size/longgenbench/morphkv_with_rows`.
        - the savings `saving/longwriter/h2o` and so on: 1 - MorphKV / that method.
    """
    printed, rows = _printed(), []
    findings = Findings(pd.DataFrame())
    for benchmark in ("longwriter", "longgenbench", "longbench"):
        sizes = benchmark_sizes(benchmark)
        ratios = sizes.pivot(index="model", columns="method", values="ratio")
        with_rows = sizes.groupby("method").with_rows.mean()
        for method in ratios:
            findings.add(RELATIVE_SIZE, ratios[method], benchmark=benchmark, method=method)
            rows.append(
                {
                    "benchmark": benchmark,
                    "method": method,
                    "predicted": ratios[method].mean(),
                    "with_rows": with_rows[method],
                    "printed": printed.loc[benchmark, method],
                    "tokens": implied_length(benchmark),
                }
            )
            if method != "morphkv":
                findings.add(SAVING, 1 - ratios["morphkv"] / ratios[method], benchmark=benchmark, method=method)
        findings.add(WITH_ROWS, sizes[sizes["method"] == "morphkv"]["with_rows"], benchmark=benchmark)
    findings.table = pd.DataFrame(rows)
    return findings


def over_lengths(model: str, batch: int, lengths: list[int], benchmark: str = "longwriter") -> pd.DataFrame:
    """Figure 2a by formula: gigabytes of a batch's keys and values in bfloat16, by response length.

    Args:
        model: one of `paper_models`.

    Returns:
        Columns method, tokens, gigabytes.
    """
    shape, stated = paper_models()[model], settings(benchmark)
    rows = []
    for method in METHODS:
        budget = 0 if method == "full" else stated.loc[method, "capacity"]
        sets = shape.group if method in ("snapkv", "h2o") else 1
        for n in lengths:
            size = batch * stored_bytes(shape, method, 0, n, budget, sets=sets, element=2, score_bytes=0)
            rows.append({"method": method, "tokens": n, "gigabytes": size / 1e9})
    return pd.DataFrame(rows)
