"""RocketKV, figures 1, 4 and 8: what methods keep of the attention at the same token budget, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.analyses.findings import Findings
from kvlab.core.store import EMPTY
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.methods.snapkv import SnapKV
from kvlab.replays.reference import reference
from kvlab.replays.replay import Replay
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

LEAST = 4
"""The least compression that is tried; S / t is 3.9 at the largest of the paper's budgets, 4096 of 16,000 tokens."""

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
"""The rivals of RocketKV in figure 4, without Exact-TopK (an oracle) and Hybrid (RocketKV's own second stage)."""

QUALITY = {"step_recall": 1, "mass_lost": -1, "output_error": -1}
"""Measures, with 1 where larger is better and -1 where smaller is."""
LOSSES = ("mass_lost", "output_error")

FIRST = 2
"""First layers that prior work leaves whole (appendix A.1)."""

WINDOW, GROUP = 32, 4
"""Appendix A.3: SnapKV's observation window, and the query heads in a group of the paper's models."""

VALUE = "{measure}/{method}/c{compression:g}"
GAIN = "gain/{measure}/{better}_over_{other}/c{compression:g}"
WIDENING = "widening/{measure}/{better}_over_{other}"
AHEAD = "ahead/{measure}/{better}_over_{other}"
"""At what share of the compressions a gain lies above 0 with its whole interval."""
AT_TIGHTEST = "{measure}/{method}/tightest"
GAIN_AT_TIGHTEST = "gain/{measure}/{better}_over_{other}/tightest"
"""Effects at the largest compression have these names, too, since it depends on the prompts' length."""
SHORTFALL = "shortfall/{method}"
TIGHTEST = "compression/tightest"
FINDING = "finding/{measure}"
AT_A_QUARTER = "at_a_quarter/{measure}"
FIRST_LAYERS = "first_layers/{measure}"
NEXT_BEST = "next_best"
"""Stands for the best rival in `GAIN` and `WIDENING`."""

PAIRS = [
    *[("rocketkv", other) for other in (*RIVALS, "hybrid", "rocketkv_published")],
    ("exact_topk", "rocketkv"),
    *[(better, other) for better in ("hybrid", "exact_topk") for other in ("quest", "sparq")],
    ("sparq", "quest"),
]


def compressions(traces: Sequence[Trace]) -> tuple[int, ...]:
    """Return the compressions at which every method of figure 4 still does as its name says, by the shortest sequence.

    S is the length of the shortest sequence. Half of a budget t = S / c pays for t / 2 of Quest's pages, of 2 c entries
    each. The other half reads t / 2 = S / 2c entries. That is at least one page only if c <= sqrt(S) / 2. (The paper's
    smallest budget, 256 of 16,000 tokens, is at that limit: one page of 125.) The compressions double from `LEAST` on.
    They end at the limit where it lies well beyond the last.

    Raises:
        KvlabError: a sequence that allows less than `LEAST`.
    """
    length = min(trace.length for trace in traces)
    limit = math.isqrt(length // 4)
    if limit < LEAST:
        raise KvlabError(
            f"a sequence of {length} tokens allows compressions up to {limit}, below {LEAST}; take at least "
            f"{4 * LEAST**2} tokens"
        )
    doublings = [LEAST * 2**i for i in range(int(math.log2(limit / LEAST)) + 1)]
    return tuple(doublings + [limit] * (limit >= math.sqrt(2) * doublings[-1]))


def budget_at(trace: Trace, compression: float) -> int:
    """t = S / c, S the prompt and the response, in entries for each layer and KV head."""
    return round(trace.length / compression)


def snapkv_as_compared(trace: Trace, budget: int, sets: Literal["head", "group"] = "head") -> SnapKV | None:
    """SnapKV as in RocketKV's appendix A.3: what it stores for a whole GQA group must be `budget` entries.

    All generated tokens stay, so they are subtracted; the rest is shared among the group's query heads, each with its
    own set. In groups larger than the paper's the window shrinks, so that a group's windows take no larger part of the
    budget than there.

    Returns:
        None if that leaves no room outside the window.
    """
    left, window = budget - trace.steps, WINDOW
    if sets == "head":
        group = trace.heads // trace.kv_heads
        left, window = left // group, min(WINDOW, max(1, WINDOW * GROUP // group))
    return SnapKV(budget=left, window=window, sets=sets) if left > window else None


def contenders(trace: Trace, budget: int, heads: str | None) -> dict[str, Policy]:
    """Make the policies of figures 1, 4 and 8 at one budget; SnapKV is absent where it has no room (appendix A.3).

    Some numbers of a setting are large in the paper, and small here. They are rounded to what the setting implies.
    SparQ's d / c dimensions go to the nearest number: 4 of 128 at c = 32 are 2 of 64, and would else fall to 1. Quest's
    pages have 2 c entries at every compression, and its last page is cut, so that it spends its budget. Exact-TopK is
    the authors' oracle: each query head reads its own top t, and a group up to its size times as many.

    Args:
        heads: scores that distinguish DuoAttention's heads, as its `heads`.
    """
    methods = {name: policy(name, budget=budget) for name in ("hybrid", "rocketkv")}
    methods["exact_topk"] = policy("exact_topk", budget=budget, sets="head")
    methods["quest"] = policy("quest", budget=budget, page=1, last="cut")
    methods["sparq"] = policy("sparq", budget=budget, rank=max(1, round(trace.keys.shape[-1] * budget / trace.length)))
    methods["duoattention"] = policy("duoattention", budget=budget, heads=heads)
    methods["rocketkv_published"] = policy("rocketkv", budget=budget, split="adaptive")
    if snapkv := snapkv_as_compared(trace, budget):
        methods["snapkv"] = snapkv
    return {name: methods[name] for name in NAMES if name in methods}


def share_stored(result: Replay, k: int) -> Tensor:
    """Share of each step's true top `k` that was stored after it: `[layers, kv_heads, steps]`."""
    trace, full = result.trace, reference(result.trace)
    shares = torch.empty(full.step_ranks.shape[:3])
    for now in range(trace.steps):
        of_layer = [result.stored(layer, now + 1) for layer in trace.layers]
        widest = max(slots.shape[1] for slots in of_layer)
        sets = torch.stack([F.pad(slots, (0, widest - slots.shape[1]), value=EMPTY) for slots in of_layer])
        shares[:, :, now] = full.share_found(full.step_ranks[:, :, now], sets, k)
    return shares


def measured(result: Replay) -> dict[str, float]:
    """Means of the measures of quality, and bytes as shares of the full cache, which grows with each step.

    Args:
        result: with k the budget of the comparison, which is not SnapKV's own.
    """
    trace, own = result.trace, result.summary
    whole = (trace.keys.nbytes + trace.values.nbytes) * (trace.prompt_length + (trace.steps + 1) / 2) / trace.length
    return {
        "step_recall": own["step_recall"],
        "mass_lost": own["mass_lost"],
        "output_error": own["output_error"],
        "stored": own["stored_bytes"] / whole,
        "read": own["read_bytes"] / whole,
    }


def figure_4(traces: Sequence[Trace], wanted: Sequence[float] | None = None, heads: str | None = None) -> Findings:
    """Measure figures 1, 4 and 8 on the attention itself: every method at the same compression of a step's reads.

    Args:
        traces: with a response and the last prompt queries.
        wanted: S / t; those of `compressions` by default.
        heads: DuoAttention's head scores of the model, as `shipped_tables.head_scores` finds them.

    Returns:
        Table with columns document, method, compression, budget, step_recall, mass_lost, output_error, stored, read.
        The last two are shares of the full cache. Metrics, with intervals over documents:
        - `mass_lost/quest/c64`: each measure by method and compression.
        - `gain/mass_lost/rocketkv_over_quest/c64`: gains, paired by document and positive where the first method is
          better.
        - `.../rocketkv_over_next_best/c64`: the gain over the best rival; Exact-TopK has such a gain, too.
        - `.../tightest`: each of these at the largest compression.
        - `widening/mass_lost/rocketkv_over_quest`: the gain at the largest compression less that at the smallest.
        - `ahead/mass_lost/rocketkv_over_quest`: the share of the compressions at which the gain is clear.
        - `shortfall/snapkv`: the share of the compressions at which SnapKV has no room.
        - `finding/mass_lost`: the share of the best rival's loss at the largest compression that Exact-TopK does not
          have.
        - `at_a_quarter/mass_lost`: the best rival's loss at a quarter of that compression, less Exact-TopK's at all of
          it.
        - `first_layers/mass_lost`: RocketKV's loss in the first two layers less that in the others, at the largest
          compression.
        - `compression/tightest`: the largest compression.

    Raises:
        KvlabError: a trace without a response.
    """
    if not all(trace.steps for trace in traces):
        raise KvlabError("token budgets are about decoding, and a trace has no response; capture it with new_tokens=32")
    levels = compressions(traces) if wanted is None else wanted
    rows, by_layer = [], []
    for trace, c in progress_bars.each([(trace, c) for trace in traces for c in levels], "figure 4", "budget"):
        budget = budget_at(trace, c)
        for method, contender in contenders(trace, budget, heads).items():
            result = replay(trace, contender, k=budget)
            about = {"document": trace.document, "method": method, "compression": c, "budget": budget}
            rows.append(about | measured(result))
            if method == "rocketkv" and c == max(levels) and trace.n_layers > FIRST:
                by_layer.append({name: first_layers(getattr(result, name)) for name in LOSSES})
    findings = Findings(pd.DataFrame(rows))
    for measure in (*QUALITY, "stored", "read"):
        _compare(findings, measure)
    for measure in LOSSES if by_layer else ():
        findings.add(FIRST_LAYERS, [layers[measure] for layers in by_layer], measure=measure)
    by_compression = findings.table.groupby("compression")["method"].unique()
    without_snapkv = [compression for compression, methods in by_compression.items() if "snapkv" not in methods]
    findings.set(SHORTFALL, len(without_snapkv) / len(by_compression), method="snapkv")
    findings.set(TIGHTEST, max(levels))
    return findings


def first_layers(losses: Tensor, first: int = FIRST) -> float:
    """Mean of the first layers less that of the others, of `losses` `[layers, heads, steps]`; appendix A.1 asks whether
    the first two have to be left whole.
    """
    return float(losses[:first].mean() - losses[first:].mean())


def _compare(findings: Findings, measure: str) -> None:
    """The measure of each method, and the gains of `PAIRS` and over the best rival."""
    values = add_values(findings, measure)
    if measure not in QUALITY:
        return
    gains: dict[tuple[str, str], dict[float, pd.Series]] = {}
    levels = sorted(findings.table["compression"].unique())
    for c in levels:
        at_c = QUALITY[measure] * values.xs(c, axis=1, level="compression")
        pairs = [(better, other, other) for better, other in PAIRS if other in at_c]
        best = best_rival(at_c.mean())
        pairs += [("rocketkv", NEXT_BEST, best), ("exact_topk", NEXT_BEST, best)]
        for better, name, other in pairs:
            gains.setdefault((better, name), {})[c] = at_c.loc[:, better] - at_c.loc[:, other]
    for (better, other), by_compression in gains.items():
        add_gains(findings, measure, better, other, by_compression)
    if measure in LOSSES:
        _oracle(findings, measure, values, levels)


def _oracle(findings: Findings, measure: str, losses: pd.DataFrame, levels: Sequence[float]) -> None:
    """How little Exact-TopK loses: against the best rival at the largest compression, and at a quarter of it."""
    tightest = levels[-1]
    at_tightest = losses.xs(tightest, axis=1, level="compression")
    oracle, rival = at_tightest.loc[:, "exact_topk"], at_tightest.loc[:, best_rival(-at_tightest.mean())]
    findings.add(FINDING, 1 - oracle / rival, measure=measure)
    looser = [c for c in levels if c <= tightest / 4]
    if looser:
        at_looser = losses.xs(looser[-1], axis=1, level="compression")
        best = at_looser.loc[:, best_rival(-at_looser.mean())]
        findings.add_difference(AT_A_QUARTER, best, oracle, measure=measure)


def best_rival(means: pd.Series) -> str:
    """The rival with the largest mean."""
    return str(means.filter(RIVALS).idxmax())


def add_values(findings: Findings, measure: str, prefix: str = "") -> pd.DataFrame:
    """Add `VALUE` for each method and compression of the table.

    Args:
        prefix: prefix of the effect's name.

    Returns:
        The measure by document, with a column for each (method, compression). A column is left out where the method has
        no room on some document.
    """
    values = findings.table.pivot(index="document", columns=["method", "compression"], values=measure)
    values = values.dropna(axis="columns")
    tightest = findings.table["compression"].max()
    for method, c in values.columns:
        findings.add(prefix + VALUE, values[method, c], measure=measure, method=method, compression=c)
        if c == tightest:
            findings.add(prefix + AT_TIGHTEST, values[method, c], measure=measure, method=method)
    return values


def add_gains(
    findings: Findings, measure: str, better: str, other: str, gains: Mapping[float, pd.Series], prefix: str = ""
) -> None:
    """Add `GAIN` at each compression and, if several were measured and none is missing, `WIDENING` and `AHEAD`.

    Args:
        gains: by compression, each by document.
        prefix: prefix of the effects' names.
    """
    about = {"measure": measure, "better": better, "other": other}
    levels = sorted(findings.table["compression"].unique())
    for c, gain in gains.items():
        findings.add(prefix + GAIN, gain, compression=c, **about)
        if c == levels[-1]:
            findings.add(prefix + GAIN_AT_TIGHTEST, gain, **about)
    if len(gains) == len(levels) > 1:
        findings.add_difference(prefix + WIDENING, gains[levels[-1]], gains[levels[0]], **about)
        lows = (findings.row(prefix + GAIN, compression=c, **about).low for c in levels)
        findings.set(prefix + AHEAD, sum(low is not None and low > 0 for low in lows) / len(levels), **about)


def values_of(findings: Findings, measure: str) -> pd.DataFrame:
    """One measure's values: method, compression, value, low, high."""
    return findings.frame(VALUE).query("measure == @measure").drop(columns="measure")


def attention_kept(findings: Findings) -> pd.DataFrame:
    """Attention that is kept: method, compression, value, low, high."""
    lost = values_of(findings, "mass_lost")
    return lost.assign(value=1 - lost["value"], low=1 - lost["high"], high=1 - lost["low"])


def gains_of(findings: Findings, measure: str) -> pd.DataFrame:
    """RocketKV's gains in a measure: other, compression, value, low, high."""
    gains = findings.frame(GAIN).query("measure == @measure and better == 'rocketkv'")
    return gains.drop(columns=["measure", "better"])


def next_best(findings: Findings) -> pd.DataFrame:
    """Which rival is best, and by how much RocketKV is better: one row for each measure and compression."""
    rows = []
    for measure, sign in QUALITY.items():
        means = sign * findings.table.pivot_table(index="compression", columns="method", values=measure)
        for c, at_c in means.iterrows():
            gain = findings.row(GAIN, measure=measure, better="rocketkv", other=NEXT_BEST, compression=c)
            about = {"measure": measure, "compression": c, "next_best": best_rival(at_c)}
            rows.append(about | {"value": gain.value, "low": gain.low, "high": gain.high})
    return pd.DataFrame(rows)


def costs(findings: Findings) -> pd.DataFrame:
    """Tabulate stored and read shares, losses and recall by method and compression, as means over documents."""
    measures = ["stored", "read", "mass_lost", "output_error", "step_recall"]
    return findings.table.pivot_table(index=["method", "compression"], values=measures).filter(measures).reset_index()
