"""RocketKV, figures 1, 4 and 8: what methods keep of the attention at the same token budget, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from kvlab.analyses.findings import Findings
from kvlab.core.store import EMPTY
from kvlab.errors import KvlabError
from kvlab.methods import Policy, policy
from kvlab.methods.snapkv import SnapKV
from kvlab.replays.reference import reference
from kvlab.replays.run import Replay
from kvlab.traces.trace import Trace

COMPRESSIONS = (4, 8, 16, 32, 64)
"""S / t; the budgets of 4096 to 256 tokens that the paper draws are these at its 16,000 tokens."""

NAMES = {
    "exact_topk": "Exact-TopK",
    "duoattention": "DuoAttention",
    "snapkv": "SnapKV",
    "quest": "Quest",
    "sparq": "SparQ",
    "hybrid": "Hybrid",
    "rocketkv": "RocketKV",
    "rocketkv_published": "RocketKV, published split",
}
RIVALS = ("duoattention", "snapkv", "quest", "sparq")
"""What figure 4 draws RocketKV against; Exact-TopK is no method, and Hybrid is RocketKV's own second stage."""

QUALITY = {"step_recall": 1, "mass_lost": -1, "output_error": -1}
"""Measures, with the sign of what is better."""

VALUE = "{measure}/{method}/c{compression:g}"
GAIN = "gain/{measure}/{better}_over_{other}/c{compression:g}"
WIDENING = "widening/{measure}/{better}_over_{other}"
SHORTFALL = "shortfall/{method}"
NEXT_BEST = "next_best"
"""Stands for the best rival in `GAIN` and `WIDENING`."""

PAIRS = [
    *[("rocketkv", other) for other in (*RIVALS, "hybrid", "rocketkv_published")],
    ("exact_topk", "rocketkv"),
    *[(better, other) for better in ("hybrid", "exact_topk") for other in ("quest", "sparq")],
    ("sparq", "quest"),
]


def budget_at(trace: Trace, compression: float) -> int:
    """t = S / c, S the prompt and the response, in entries for each layer and KV head."""
    return round(trace.length / compression)


def snapkv_as_compared(trace: Trace, budget: int, sets: Literal["head", "group"] = "head") -> SnapKV | None:
    """SnapKV as RocketKV's appendix A.3 sets it up: what it stores must be a budget of `budget` for the whole group.

    The generated tokens all stay and are taken off; with a set for each query head, the rest is shared among the
    group's heads.

    Returns:
        None where that leaves the prompt no more than its window.
    """
    left = budget - trace.steps
    if sets == "head":
        left //= trace.heads // trace.kv_heads
    return SnapKV(budget=left, sets=sets) if left >= SnapKV(budget=1.0).minimum else None


def contenders(trace: Trace, budget: int, heads: str | None) -> dict[str, Policy]:
    """The policies of figures 1, 4 and 8 at one budget; SnapKV is absent where it has no room (appendix A.3).

    Args:
        heads: scores that tell DuoAttention's heads apart, as its `heads`.
    """
    found = {name: policy(name, budget=budget) for name in ("exact_topk", "quest", "sparq", "hybrid", "rocketkv")}
    found["duoattention"] = policy("duoattention", budget=budget, heads=heads)
    found["rocketkv_published"] = policy("rocketkv", budget=budget, split="adaptive")
    if snapkv := snapkv_as_compared(trace, budget):
        found["snapkv"] = snapkv
    return {name: found[name] for name in NAMES if name in found}


def share_of_top(result: Replay, k: int, stored: bool = False) -> Tensor:
    """Share of each step's true top `k` among what the step read, or what was stored after it: `[layers, kv_heads,
    steps]`.

    A replay counts with its policy's own budget, and SnapKV's is not what its comparison calls the budget.
    """
    trace, full = result.trace, reference(result.trace)
    found = torch.empty(full.step_ranks.shape[:3])
    for now in range(trace.steps):
        of_layer = [(result.stored if stored else result.kept)(layer, now + 1) for layer in trace.layers]
        widest = max(one.shape[1] for one in of_layer)
        sets = torch.stack([F.pad(one, (0, widest - one.shape[1]), value=EMPTY) for one in of_layer])
        found[:, :, now] = full.share_found(full.step_ranks[:, :, now], sets, k)
    return found


def measured(result: Replay, budget: int) -> dict[str, float]:
    """Means of the measures of quality, and bytes as shares of the full cache's, which grows with each step."""
    trace, own = result.trace, result.summary
    whole = (trace.keys.nbytes + trace.values.nbytes) * (trace.prompt_length + (trace.steps + 1) / 2) / trace.length
    return {
        "step_recall": own["step_recall"] if result.budget == budget else float(share_of_top(result, budget).mean()),
        "mass_lost": own["mass_lost"],
        "output_error": own["output_error"],
        "stored": own["stored_bytes"] / whole,
        "read": own["read_bytes"] / whole,
    }


def figure_4(
    traces: Sequence[Trace], compressions: Sequence[float] = COMPRESSIONS, heads: str | None = "smollm2-135m"
) -> Findings:
    """Figures 1, 4 and 8 on the attention itself: every method at the same compression of what a step reads.

    Args:
        traces: with a response and the last prompt queries.
        compressions: S / t.
        heads: DuoAttention's head scores of the model.

    Returns:
        Table with columns document, method, compression, budget, step_recall, mass_lost, output_error, stored, read
        (the last two as shares of the full cache). Metrics by measure, method and compression, `mass_lost/quest/c64`,
        with intervals over documents; gains, paired by document and positive where the first method is better,
        `gain/mass_lost/rocketkv_over_quest/c64`; the same over the best rival, `.../rocketkv_over_next_best/c64`, and
        of Exact-TopK over it; `widening/mass_lost/rocketkv_over_quest`, how much larger the gain is at the largest
        compression than at the smallest; `shortfall/snapkv`, at how many compressions SnapKV has no room.

    Raises:
        KvlabError: a trace without a response.
    """
    if not all(trace.steps for trace in traces):
        raise KvlabError("token budgets are about decoding, and a trace has no response; capture it with new_tokens=32")
    jobs = [(trace, c) for trace in traces for c in compressions]
    rows = []
    for trace, c in tqdm(jobs, desc="figure 4", unit="budget", leave=False):
        budget = budget_at(trace, c)
        for method, one in contenders(trace, budget, heads).items():
            numbers = measured(Replay(trace, one), budget)
            rows.append({"document": trace.document, "method": method, "compression": c, "budget": budget} | numbers)
    findings = Findings(pd.DataFrame(rows))
    for measure in (*QUALITY, "stored", "read"):
        _compare(findings, measure)
    there = findings.table.groupby("compression")["method"].unique()
    findings.set(SHORTFALL, sum("snapkv" not in methods for methods in there), method="snapkv")
    return findings


def _compare(findings: Findings, measure: str) -> None:
    """The measure of each method, and the gains of `PAIRS` and over the best rival."""
    values = add_values(findings, measure)
    if measure not in QUALITY:
        return
    gains: dict[tuple[str, str], dict[float, pd.Series]] = {}
    for c in sorted(findings.table["compression"].unique()):
        here = QUALITY[measure] * values.xs(c, axis=1, level="compression")
        pairs = [(better, other, other) for better, other in PAIRS if other in here]
        best = _best_rival(here.mean())
        pairs += [("rocketkv", NEXT_BEST, best), ("exact_topk", NEXT_BEST, best)]
        for better, name, other in pairs:
            gains.setdefault((better, name), {})[c] = here.loc[:, better] - here.loc[:, other]
    for (better, other), by_compression in gains.items():
        add_gains(findings, measure, better, other, by_compression)


def _best_rival(means: pd.Series) -> str:
    """The rival with the largest mean."""
    return str(means.filter(RIVALS).idxmax())


def add_values(findings: Findings, measure: str, under: str = "") -> pd.DataFrame:
    """Add `VALUE` for each method and compression of the table.

    Args:
        under: what the effect's name begins with.

    Returns:
        The measure by document, with a column for each (method, compression).
    """
    values = findings.table.pivot(index="document", columns=["method", "compression"], values=measure)
    for method, c in values.columns:
        findings.add(under + VALUE, values[method, c], measure=measure, method=method, compression=c)
    return values


def add_gains(
    findings: Findings, measure: str, better: str, other: str, gains: Mapping[float, pd.Series], under: str = ""
) -> None:
    """Add `GAIN` at each compression and, where there are all of several compressions, `WIDENING` from least to most.

    Args:
        gains: by compression, each by document.
        under: what the effects' names begin with.
    """
    about = {"measure": measure, "better": better, "other": other}
    for c, gain in gains.items():
        findings.add(under + GAIN, gain, compression=c, **about)
    compressions = sorted(findings.table["compression"].unique())
    if len(gains) == len(compressions) > 1:
        findings.add_difference(under + WIDENING, gains[compressions[-1]], gains[compressions[0]], **about)


def values_of(findings: Findings, measure: str) -> pd.DataFrame:
    """One measure's values: method, compression, value, low, high."""
    return findings.frame(VALUE).query("measure == @measure").drop(columns="measure")


def attention_kept(findings: Findings) -> pd.DataFrame:
    """What is not lost of the attention: method, compression, value, low, high."""
    lost = values_of(findings, "mass_lost")
    return lost.assign(value=1 - lost["value"], low=1 - lost["high"], high=1 - lost["low"])


def gains_of(findings: Findings, measure: str, better: str = "rocketkv") -> pd.DataFrame:
    """One method's gains in a measure: other, compression, value, low, high."""
    gains = findings.frame(GAIN).query("measure == @measure and better == @better")
    return gains.drop(columns=["measure", "better"])


def next_best(findings: Findings) -> pd.DataFrame:
    """Which rival is best, and by how much RocketKV is better: one row for each measure and compression."""
    rows = []
    for measure, sign in QUALITY.items():
        means = sign * findings.table.pivot_table(index="compression", columns="method", values=measure)
        for c, here in means.iterrows():
            gain = findings.row(GAIN, measure=measure, better="rocketkv", other=NEXT_BEST, compression=c)
            about = {"measure": measure, "compression": c, "next_best": _best_rival(here)}
            rows.append(about | {"value": gain.value, "low": gain.low, "high": gain.high})
    return pd.DataFrame(rows)


def costs(findings: Findings) -> pd.DataFrame:
    """What each method stores, reads and loses at each compression, as means over documents."""
    measures = ["stored", "read", "mass_lost", "output_error", "step_recall"]
    return findings.table.pivot_table(index=["method", "compression"], values=measures).filter(measures).reset_index()
