"""The papers' printed speed and memory against arithmetic: bytes of weights and caches of published shapes.

Nothing is run here. A cache's bytes follow from a model's configuration; a printed figure that does not fit them tells
how it was measured. Each function takes the printed table, as `papers.figure` gives it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.core.geometry import geometry
from kvlab.inputs import shapes

GIB = 2**30
K = 1024
LLAMA_2_13B = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "intermediate_size": 13824,
}
"""Differences of Llama-2-13B's configuration from Llama-2-7B's."""

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "llama-2-7b": ("llama-2-7b", {}),
    "llama-2-13b": ("llama-2-7b", LLAMA_2_13B),
    "llama-3.1-8b": ("llama-3.1-8b", {}),
}
A800_BANDWIDTH = 2.039e12
"""Bytes per second that an NVIDIA A800 or A100 of 80 GB (SXM) can read, by its data sheet: the fastest of its kind."""
A800_BYTES = 80 * GIB

ZSMERGE_MEMORY = "memory/zsmerge/{quantity}"
WORKLOADS = "{table}/{kind}"
SAVING_96K = "saving/rocketkv/{budget}/96k"
SAVING_EQUAL_AT = "saving/rocketkv/{budget}/equal_at"
TABLE_A1 = "table_a1/{quantity}/{thousands}k"
SMALLEST_SAVING = "table_a1/smallest_saving"
GROWTH_OVER_CACHE = "table_a1/growth_over_cache"


@functools.cache
def parameters(model: str) -> int:
    """Number of weights of one of `SIZES`, counted on an empty model."""
    import torch
    from transformers import AutoModelForCausalLM

    shape, changes = SIZES[model]
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(shapes.config(shape, **changes))
    return sum(weight.numel() for weight in empty.parameters())


def entry_bytes(model: str, bytes_per_number: int = 2) -> int:
    """Bytes of keys and values of one token over all layers and KV heads."""
    shape, changes = SIZES[model]
    of_model = geometry(shapes.config(shape, **changes))
    return 2 * of_model.layers * of_model.kv_heads * of_model.head_dim * bytes_per_number


def predicted(model: str, tokens: float, batch: int = 1, bytes_per_number: int = 2) -> float:
    """Bytes of weights and of a cache with `tokens` entries for each sequence: decoding needs at least these."""
    return parameters(model) * bytes_per_number + batch * tokens * entry_bytes(model, bytes_per_number)


def zsmerge_memory(printed: pd.DataFrame) -> Findings:
    """Compute ZSMerge's memory on Llama-2-7B by arithmetic (section 4.2 and figure 3).

    The paper's k is 1,024. Its GB and MB are in fact GiB and MiB.

    Returns:
        Table with columns quantity, printed, float16, float32, in GiB. The bytes of one token are in MiB. Metrics:
        - `memory/zsmerge/QUANTITY`: in float32, which the printed figures fit.
        - `memory/zsmerge/reduction_54k`: 1 - memory with 18k entries / memory of the full cache at 54k.
    """

    def arithmetic(width: int) -> dict[str, float]:
        weights = predicted("llama-2-7b", 0, bytes_per_number=width)
        cache = entry_bytes("llama-2-7b", width)
        return {
            "token_mb": cache / 2**20,
            "weights": weights / GIB,
            "cache_20k": 20 * K * cache / GIB,
            "cache_32k": 32 * K * cache / GIB,
            "full_54k": (weights + 54 * K * cache) / GIB,
            "zsmerge": (weights + 18 * K * cache) / GIB,
        }

    figures = dict(zip(printed["quantity"], printed["printed"], strict=True))
    half, single = arithmetic(2), arithmetic(4)
    rows = [
        {"quantity": name, "printed": float(figures[name]), "float16": half[name], "float32": value}
        for name, value in single.items()
    ]
    findings = Findings(pd.DataFrame(rows))
    reduction = 1 - single["zsmerge"] / single["full_54k"]
    for name, value in {**single, "reduction_54k": reduction}.items():
        findings.set(ZSMERGE_MEMORY, value, quantity=name)
    return findings


def zsmerge_workloads(printed: pd.DataFrame, table: str = "table4") -> Findings:
    """Compare ZSMerge's tables 1 and 4 with arithmetic in float16.

    In float32 some printed figures would be impossible.

    Args:
        table: prefix of the metrics' names.

    Returns:
        The printed table with four columns more:
        - gib: weights and full cache, with each row's own batch and lengths.
        - fits: into 80 GiB.
        - bound: tokens/s at which the weights alone take the GPU's whole bandwidth (batch x bandwidth / weights).
        - from_latency: tokens/s that the printed latency gives.
        Metrics:
        - `TABLE/impossible`: rows of the full cache with a figure although weights and cache exceed 80 GiB.
        - `TABLE/unexplained`: rows of the full cache marked out of memory although they would fit.
        - `TABLE/above_bound`: rows with more tokens per second than reading the weights allows.
        - `TABLE/contradictions`: rows whose speed and latency differ by more than 5 %.
    """
    rows = printed.copy()
    names = "llama-2-" + rows["model"]
    sizes = zip(names, rows["prompt"] + rows["generated"], rows["batch"], strict=True)
    rows["gib"] = [predicted(name, tokens, batch) / GIB for name, tokens, batch in sizes]
    rows["fits"] = rows["gib"] * GIB <= A800_BYTES
    rows["bound"] = rows["batch"] * A800_BANDWIDTH / (2 * names.map(parameters))
    rows["from_latency"] = rows["batch"] * rows["generated"] / rows["latency"]
    fitted, ratio = rows["tokens_per_second"].notna(), rows["tokens_per_second"] / rows["from_latency"]
    full = rows["method"] == "full"
    kinds = {
        "impossible": full & fitted & ~rows["fits"],
        "unexplained": full & ~fitted & rows["fits"],
        "above_bound": fitted & (rows["tokens_per_second"] > rows["bound"]),
        "contradictions": (ratio - 1).abs() > 0.05,
    }
    findings = Findings(rows)
    for kind, table_of_kind in kinds.items():
        findings.set(WORKLOADS, table_of_kind.to_numpy().sum(), table=table, kind=kind)
    return findings


def zsmerge_speedups(printed: pd.DataFrame) -> pd.DataFrame:
    """Figure 3 as printed: tokens, speedup (ZSMerge's tokens/s over the full cache's)."""
    wide = printed.pivot(index="tokens", columns="method", values="tokens_per_second")
    return wide.assign(speedup=wide["zsmerge"] / wide["full"]).reset_index().filter(["tokens", "speedup"])


def zsmerge_batches(printed: pd.DataFrame) -> pd.DataFrame:
    """Return speedups of table 4's workloads of the 7B model with several batch sizes and as many new as prompt tokens.

    The columns are method (h2o or zsmerge), prompt, batch, speedup over the full cache.
    """
    rows = printed.query("model == '7b' and prompt == generated")
    wide = rows.pivot(index=["prompt", "batch"], columns="method", values="tokens_per_second")
    ratios = wide.filter(["h2o", "zsmerge"]).div(wide["full"], axis="index").reset_index()
    long = ratios.melt(["prompt", "batch"], var_name="method", value_name="speedup").dropna()
    batched = long.groupby(["method", "prompt"]).filter(lambda batches: len(batches) > 1)
    # In the order of the printed table: by workload, with the methods side by side.
    ordered = batched.sort_values(["prompt", "batch", "method"], ignore_index=True)
    return ordered.reindex(columns=["method", "prompt", "batch", "speedup"])


def rocketkv_saving(
    printed: pd.DataFrame, lengths: Sequence[int] = (16 * K, 32 * K, 64 * K, 96 * K, 128 * K)
) -> Findings:
    """Compute the share of decoding memory saved by RocketKV on Llama-3.1-8B in float16, by arithmetic (figure 5b).

    The full cache holds S entries. RocketKV stores sqrt(S x budget) of them. It also stores two vectors for each page
    of ceil(c ** 1/4) entries, which together take as much as one entry. Weights count, and activations are left out.

    Returns:
        Table with columns length, budget, saving, printed. printed is the figure's best saving; the figure does not
        print its length as a number. Metrics:
        - `saving/rocketkv/BUDGET/96k`.
        - `saving/rocketkv/BUDGET/equal_at`: the length, in tokens, at which the arithmetic gives the printed saving.
    """
    savings = dict(zip(printed["budget"], printed["memory_saving"], strict=True))

    def saving(length: int, budget: int) -> float:
        stored = math.isqrt(length * budget)
        stored += stored / math.ceil(math.sqrt(stored / budget))
        return 1 - predicted("llama-3.1-8b", stored) / predicted("llama-3.1-8b", length)

    rows = [
        {"length": length, "budget": int(budget), "saving": saving(length, budget), "printed": best}
        for budget, best in savings.items()
        for length in lengths
    ]
    findings = Findings(pd.DataFrame(rows))
    for budget, best in savings.items():
        findings.set(SAVING_96K, saving(96 * K, budget), budget=budget)
        equal = next(length for length in range(K, 256 * K, K) if saving(length, budget) >= best)
        findings.set(SAVING_EQUAL_AT, equal, budget=budget)
    return findings


def compilerkv_table_a1(printed: pd.DataFrame) -> Findings:
    """Compare CompilerKV's table A1 with the paper's own text, and with the bytes of an 8B model's cache.

    The table does not name its model. A token takes at most 128 KiB in every model of that size in the paper. This is
    the size in Llama-3.1-8B in float16 (8 KV heads of 128 in 32 layers).

    Returns:
        Table with columns input_tokens, output_tokens and:
        - memory_saved and latency_saved: shares.
        - megabytes_saved.
        - prompt_cache and whole_cache: MiB.
        - speedup: the ratio of tokens/s.
        - overhead: of the time to the first token, as a share.
        Metrics:
        - `table_a1/NAME/8k`, `16k`, `32k` of the shares and the speedup.
        - `table_a1/smallest_saving`: the smallest `memory_saved`.
        - `table_a1/growth_over_cache`: how much more memory the full cache's run takes at 32k + 8k than at 8k + 2k,
          over the bytes of its additional entries.
    """
    rows = printed.set_index(["input_tokens", "method"])
    full, ours = rows.xs("FullKV", level="method"), rows.xs("CompilerKV", level="method")
    per_token = entry_bytes("llama-3.1-8b") / 2**20
    table = pd.DataFrame(
        {
            "output_tokens": full["output_tokens"],
            "memory_saved": 1 - ours["memory_mb"] / full["memory_mb"],
            "megabytes_saved": full["memory_mb"] - ours["memory_mb"],
            "prompt_cache": full.index * per_token,
            "whole_cache": (full.index + full["output_tokens"]) * per_token,
            "speedup": ours["tokens_per_s"] / full["tokens_per_s"],
            "latency_saved": 1 - ours["latency_s"] / full["latency_s"],
            "overhead": ours["ttft_s"] / full["ttft_s"] - 1,
        }
    ).reset_index()
    findings = Findings(table)
    for row in table.to_dict("records"):
        for name in ("memory_saved", "speedup", "latency_saved", "overhead"):
            findings.set(TABLE_A1, row[name], quantity=name, thousands=row["input_tokens"] // K)
    findings.set(SMALLEST_SAVING, min(table["memory_saved"]))
    growth = full["memory_mb"].iloc[-1] - full["memory_mb"].iloc[0]
    entries = table["whole_cache"].iloc[-1] - table["whole_cache"].iloc[0]
    findings.set(GROWTH_OVER_CACHE, growth / entries)
    return findings


def in_words(
    memory: Findings, small_table: Findings, large_table: Findings, saving: Findings, table_a1: Findings
) -> str:
    """Describe the papers' printed values against arithmetic.

    Args:
        memory, saving, table_a1: of `zsmerge_memory`, `rocketkv_saving` and `compilerkv_table_a1`.
        small_table, large_table: of `zsmerge_workloads`, of ZSMerge's tables 1 and 4.
    """
    reduction = memory.row(ZSMERGE_MEMORY, quantity="reduction_54k").value
    lines = [memory.table.round(1).to_string(index=False), f"less memory at 54k: {reduction:.0%}"]
    for name, findings in (("table1", small_table), ("table4", large_table)):
        counts = [f"{row['value']:.0f} {row['kind']}" for row in findings.frame(WORKLOADS).to_dict("records")]
        lines.append(f"{name}: {', '.join(counts)}")
    for row in saving.frame(SAVING_96K).to_dict("records"):
        equal = saving.row(SAVING_EQUAL_AT, budget=row["budget"]).value / K
        lines.append(f"RocketKV, budget {row['budget']}: {row['value']:.2f} at 96k tokens; as printed at {equal:.0f}k")
    growth = table_a1.row(GROWTH_OVER_CACHE).value
    lines.append(table_a1.table.round(2).to_string(index=False))
    lines.append(f"CompilerKV: the full cache's run grows by {growth:.1f} times the bytes of its entries")
    return "\n".join(lines)
