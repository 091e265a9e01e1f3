"""RocketKV's design: figures 6 and 7, table 1, its lead on longer prompts, and the split of a compression.

A compression is split between the two stages, and within one stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from kvlab.analyses.findings import Findings
from kvlab.analyses.rocketkv import common
from kvlab.analyses.rocketkv.budgets import (
    LEAST,
    LOSSES,
    QUALITY,
    RIVALS,
    WINDOW,
    add_gains,
    add_values,
    best_rival,
    budget_at,
    compressions,
    contenders,
    measured,
    share_stored,
    snapkv_as_compared,
    values_of,
)
from kvlab.analyses.texts import continuation
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.lib.intervals import argmin, argmin_difference
from kvlab.methods import Policy, policy
from kvlab.methods.rocketkv import RocketKV
from kvlab.methods.snapkv import SnapKV
from kvlab.replays.run import replay
from kvlab.traces.trace import Trace

LADDER = {
    "snapkv": "SnapKV, a set for each query head",
    "snapkv_gqa": "+ GQA: one set for the group",
    "snapkv_pp": "+ wide max pooling (SnapKV++)",
    "rocketkv": "+ hybrid attention (RocketKV)",
}
STEPS_UP = [
    ("snapkv_gqa", "snapkv"),
    ("snapkv_pp", "snapkv_gqa"),
    ("snapkv_pp", "snapkv"),
    ("rocketkv", "snapkv_pp"),
    ("rocketkv", "snapkv_gqa"),
]


REDUNDANCY = "redundancy/c{compression:g}"
OVER_CHANCE = "redundancy/over_chance/c{compression:g}"
OVER_CHANCE_AT_TIGHTEST = "redundancy/over_chance/tightest"
KERNEL = "{measure}/k{kernel}/n{length}"
KERNEL_GAIN = "gain/{measure}/k{kernel}_over_k{smallest}/{end}"
BEST_KERNEL = "best_kernel/{end}"
BEST_KERNEL_SIZE = "best_kernel_size/{end}"
BEST_KERNEL_GROWTH = "best_kernel/growth"
STORAGE = "storage/{method}/c{compression:g}"
TRAFFIC = "traffic/{method}/c{compression:g}"
OF_TENSORS = "of_tensors/{method}/c{compression:g}"
AUXILIARY = "auxiliary/{method}/c{compression:g}"
BY_TENSORS = "by_tensors/{method}/c{compression:g}"
LONGER_LEAD = "lead/{measure}/{end}"
LONGER_LEAD_GROWS = "lead/{measure}/longer_less_shorter"

TIMES_LONGER = 4
"""How many times as long the longer prompts of `leads` are."""


def stages(traces: Sequence[Trace], least: float = LEAST) -> tuple[float, ...]:
    """Return two compressions for figure 6: the least one, and the largest whole one at which SnapKV can still choose.

    There a set of each query head still chooses half as many tokens as its window has. SnapKV can choose nothing where
    the window takes the budget.
    """
    tightest = []
    for trace in traces:
        group = trace.heads // trace.kv_heads
        tightest.append(trace.length // (trace.steps + group * (WINDOW + WINDOW // 2)))
    return tuple(dict.fromkeys([least, float(max(least, min(tightest)))]))


def lengths(traces: Sequence[Trace], steps: int = 32) -> tuple[int, ...]:
    """Prompts for figure 7 that can be cut out of every trace: a quarter, half and all of the shortest, in tens."""
    whole = min(trace.prompt_length for trace in traces) - steps
    return tuple(whole // part // 10 * 10 for part in (4, 2, 1))


def ladder(trace: Trace, budget: int) -> dict[str, Policy]:
    """From SnapKV to RocketKV one change at a time, each at a token budget of `budget` as appendix A.3 counts it."""
    left = budget - trace.steps
    stages = {
        "snapkv": snapkv_as_compared(trace, budget),
        "snapkv_gqa": snapkv_as_compared(trace, budget, "group"),
        "snapkv_pp": policy("snapkv_pp", budget=left) if left > 32 else None,
        "rocketkv": policy("rocketkv", budget=budget),
    }
    return {name: contender for name, contender in stages.items() if contender is not None}


def stage_by_stage(traces: Sequence[Trace], wanted: Sequence[float] | None = None) -> Findings:
    """Measure the gain by each change from SnapKV to RocketKV at the same token budget (figure 6 and section 3.3).

    Returns:
        Table with columns document, method, compression, budget, step_recall, mass_lost, output_error, stored, read.
        Metrics, with intervals over documents:
        - `output_error/snapkv_gqa/c6`.
        - `gain/output_error/snapkv_gqa_over_snapkv/c6`: positive where the first is better.
        - `widening/...`: the gain at the largest compression less that at the smallest.
        - `redundancy/c6`: the share of SnapKV's choices outside the window that another head of the group has already
          chosen.
        - `redundancy/over_chance/c6`: the same less the share of heads that choose at random.
        There is no redundancy at a compression that leaves SnapKV no room outside its window and the response, as in
        large groups.

    Raises:
        KvlabError: SnapKV has no room at any of the compressions.
    """
    rows, levels = [], stages(traces) if wanted is None else wanted
    jobs = [(trace, c) for trace in traces for c in levels]
    shared, without_query = {}, {}
    for trace, c in progress_bars.each(jobs, "stages", "budget"):
        budget = budget_at(trace, c)
        snapkv = snapkv_as_compared(trace, budget)
        if snapkv is not None:
            shared[trace.document, c], without_query[trace.document, c] = redundancy(trace, snapkv)
        for method, contender in ladder(trace, budget).items():
            numbers = measured(replay(trace, contender, k=budget))
            rows.append({"document": trace.document, "method": method, "compression": c, "budget": budget} | numbers)
    if not shared:
        smallest = min(levels)
        raise KvlabError(
            f"at a compression of {smallest:g} SnapKV's budget is {budget_at(traces[0], smallest)}: too small for the "
            f"response of {traces[0].steps} tokens and a window for each head"
        )
    findings = Findings(pd.DataFrame(rows))
    _gains(findings, STEPS_UP)
    for c in sorted({at for _, at in shared}):
        ours = pd.Series({document: v for (document, at), v in shared.items() if at == c})
        chance = pd.Series({document: v for (document, at), v in without_query.items() if at == c})
        findings.add(REDUNDANCY, ours, compression=c)
        findings.add_difference(OVER_CHANCE, ours, chance, compression=c)
        if c == max(levels):
            findings.add_difference(OVER_CHANCE_AT_TIGHTEST, ours, chance)
    return findings


FIRST_STAGES = {"snapkv_gqa": "average pooling, 7", "snapkv_pp": "max pooling, 63 (SnapKV++)"}
FIRST_STAGE = "first_stage/"
"""Prefix of the effects of the first stage alone."""


def first_stage(traces: Sequence[Trace], levels: Sequence[float] | None = None) -> Findings:
    """Section 3.3: the pooling of SnapKV++ as a first stage, which leaves S / sqrt(c) tokens and reads all of them.

    Both share one set in each GQA group.

    Returns:
        Table with columns document, method, compression (c, of both stages together), budget, step_recall, mass_lost,
        output_error, stored, read. Metrics of `stage_by_stage` under names that begin with `first_stage/`, such as
        `first_stage/gain/output_error/snapkv_pp_over_snapkv_gqa/c16`.
    """
    rows = []
    for trace, c in [(trace, c) for trace in traces for c in (compressions(traces)[1:] if levels is None else levels)]:
        budget = budget_at(trace, math.sqrt(c))
        for method in FIRST_STAGES:
            contender = policy(method.removesuffix("_gqa"), budget=budget - trace.steps)
            numbers = measured(replay(trace, contender, k=budget))
            rows.append({"document": trace.document, "method": method, "compression": c, "budget": budget} | numbers)
    findings = Findings(pd.DataFrame(rows))
    _gains(findings, [("snapkv_pp", "snapkv_gqa")], FIRST_STAGE)
    return findings


@torch.inference_mode()
def redundancy(trace: Trace, snapkv: SnapKV) -> tuple[float, float]:
    """Share of the entries outside the window that a group's heads store more than once, and the same by chance.

    By chance: g heads that choose k of n tokens at random cover n (1 - (1 - k / n)^g) of them.
    """
    chosen = snapkv.prefill(trace.prompt)
    older = trace.prompt_length - snapkv.window
    heads = chosen.unflatten(1, (trace.kv_heads, -1))[..., : -snapkv.window]
    layers, groups, g, k = heads.shape
    selected = torch.zeros(layers, groups, older, dtype=torch.bool).scatter_(2, heads.flatten(2), True)
    covered = older * (1 - (1 - k / older) ** g)
    return 1 - float(selected.sum(-1).float().mean()) / (g * k), 1 - covered / (g * k)


def kernels(
    traces: Sequence[Trace],
    prompt_lengths: Sequence[int] | None = None,
    sizes: Sequence[int] = (7, 21, 63, 189, 511),
    compression: float = 8,
    steps: int = 32,
) -> Findings:
    """Find the best max-pooling kernel for RocketKV at each prompt length (figure 7).

    Args:
        traces: with the queries of all prompt tokens.
        prompt_lengths: tokens of the prompts, ascending, to which they are cut; those of `lengths` by default.
        sizes: kernels, odd.
        compression: S / t at every length. At a larger one the first stage would have little to choose outside its
            window, for the shortest prompts of 300 tokens.
        steps: tokens of the text that follow as the response.

    Returns:
        Table with columns document, length, kernel, step_recall, mass_lost, output_error. Metrics:
        - `output_error/k63/n500`, with intervals over documents.
        - `gain/output_error/k63_over_k7/longest`, with intervals over documents: each kernel over the smallest, for
          `shortest` and `longest`.
        - `best_kernel/shortest` and `best_kernel/longest`: log2 of the kernel with the smallest mean output error over
          documents.
        - `best_kernel/growth`: their difference.
        - `best_kernel_size/longest`: in tokens.
    """
    rows, cuts = [], lengths(traces, steps) if prompt_lengths is None else prompt_lengths
    jobs = [(trace, n) for trace in traces for n in cuts]
    for trace, n in progress_bars.each(jobs, "kernels", "prompt"):
        cut = continuation(trace, n, steps)
        for size in sizes:
            own = replay(cut, policy("rocketkv", budget=budget_at(cut, compression), kernel=size)).summary
            rows.append({"document": trace.document, "length": n, "kernel": size} | {m: own[m] for m in QUALITY})
    findings = Findings(pd.DataFrame(rows))
    ends = {"shortest": cuts[0], "longest": cuts[-1]}
    for measure, sign in QUALITY.items():
        values = findings.table.pivot(index="document", columns=["length", "kernel"], values=measure)
        for n, size in values.columns:
            findings.add(KERNEL, values[n, size], measure=measure, kernel=size, length=n)
        for end, n in ends.items():
            for size in sizes[1:]:
                keys = {"measure": measure, "kernel": size, "smallest": sizes[0], "end": end}
                findings.add_difference(
                    KERNEL_GAIN, sign * values.loc[:, (n, size)], sign * values.loc[:, (n, sizes[0])], **keys
                )
    curves = {}
    for end, n in ends.items():
        at_length = findings.table[findings.table["length"] == n]
        curve = at_length.pivot(index="document", columns="kernel", values="output_error")
        curves[end] = curve.set_axis(np.log2(curve.columns.to_numpy(float)), axis=1)
    for end, curve in curves.items():
        best, (low, high) = argmin(curve)
        findings.set(BEST_KERNEL, best, (low, high), end=end)
        findings.set(BEST_KERNEL_SIZE, 2**best, (2**low, 2**high), end=end)
    findings.set(BEST_KERNEL_GROWTH, *argmin_difference(curves["longest"], curves["shortest"]))
    return findings


def leads(traces: Sequence[Trace], heads: str | None = None, steps: int = 32) -> Findings:
    """Measure RocketKV's lead over the best rival at one token budget, on whole prompts and their first part.

    Section 4.2 is about this lead.

    Args:
        traces: with the queries of all prompt tokens; prompts are cut, and the text itself follows as the response.
        heads: DuoAttention's head scores of the model.
        steps: tokens of that response.

    Returns:
        Table with columns document, end ("shorter", "longer"), length, method, budget, mass_lost, output_error.
        Metrics, with intervals over documents:
        - `lead/output_error/longer` and `.../shorter`: the loss of the best rival, on average at that length, less
          RocketKV's.
        - `lead/output_error/longer_less_shorter`: their difference, paired.
    """
    rows = []
    for trace in progress_bars.each(traces, "lengths", "doc"):
        whole = trace.prompt_length - steps
        cut = {
            "longer": continuation(trace, whole, steps),
            "shorter": continuation(trace, whole // TIMES_LONGER, steps),
        }
        budget = budget_at(cut["longer"], compressions([cut["longer"]])[-1])
        for end, part in cut.items():
            for method, contender in contenders(part, budget, heads).items():
                if method not in ("rocketkv", *RIVALS):
                    continue
                result = replay(part, contender)
                numbers = {name: float(getattr(result, name).mean()) for name in LOSSES}
                about = {"document": trace.document, "end": end, "length": part.prompt_length, "method": method}
                rows.append(about | {"budget": budget} | numbers)
    findings = Findings(pd.DataFrame(rows))
    for measure in LOSSES:
        by_end = {}
        for end, part in findings.table.groupby("end"):
            losses = part.pivot(index="document", columns="method", values=measure).dropna(axis="columns")
            by_end[end] = losses.loc[:, best_rival(-losses.mean())] - losses.loc[:, "rocketkv"]
            findings.add(LONGER_LEAD, by_end[end], measure=measure, end=end)
        findings.add_difference(LONGER_LEAD_GROWS, by_end["longer"], by_end["shorter"], measure=measure)
    return findings


def best_kernels(table: pd.DataFrame) -> pd.DataFrame:
    """The kernel with the smallest output error for each document and length: length, document, kernel.

    Args:
        table: of `kernels`.
    """
    errors = table.pivot(index=["length", "document"], columns="kernel", values="output_error")
    return errors.idxmin(axis=1).rename("kernel").reset_index()


PUBLISHED = "splitpublished"


class SplitRocketKV(RocketKV):
    """RocketKV whose first stage takes c ** exponent of the compression: 0.5 is the paper's even split.

    0 evicts nothing (hybrid attention alone); 1 leaves the budget (SnapKV++ alone), which is then read whole.
    """

    name: ClassVar[str] = "rocketkv_split"
    summary: ClassVar[str] = "RocketKV with a given share of the compression in its first stage"

    exponent: Annotated[float, Field(ge=0, le=1)] = 0.5

    def capacity(self, length: int, new_tokens: int) -> int:
        total, budget = length + new_tokens, self.entries(length)
        return total if total <= budget else int(total * (budget / total) ** self.exponent)


def splits(
    traces: Sequence[Trace],
    levels: Sequence[float] | None = None,
    exponents: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
) -> Findings:
    """Measure how much of the compression the first stage should take, as an exponent of c (sections 3.1 and 3.2).

    Returns:
        Table with columns document, compression, method, exponent, step_recall, mass_lost, output_error, survived:
        - method: `split0.5`, or `splitpublished` for the published code's rule.
        - exponent: missing for the published rule.
        - survived: the share of each step's true top t that the first stage left.
        Metrics, with intervals over documents, are `output_error/split0.5/c16`, `survived/split0.5/c16`, and the gains
        `gain/output_error/split0.5_over_split0/c16` of the even split over each other one.
    """
    rows = []
    jobs = [(trace, c) for trace in traces for c in (compressions(traces)[1:] if levels is None else levels)]
    for trace, c in progress_bars.each(jobs, "splits", "budget"):
        budget = budget_at(trace, c)
        variants = [(f"split{e:g}", e, SplitRocketKV(budget=budget, exponent=e)) for e in exponents]
        variants += [(PUBLISHED, math.nan, RocketKV(budget=budget, split="adaptive"))]
        for method, exponent, contender in variants:
            result = replay(trace, contender)
            numbers = {m: result.summary[m] for m in QUALITY}
            numbers["survived"] = float(share_stored(result, budget).mean())
            about = {"document": trace.document, "compression": c, "method": method, "exponent": exponent}
            rows.append(about | numbers)
    findings = Findings(pd.DataFrame(rows))
    names = list(findings.table["method"].unique())
    _gains(findings, [("split0.5", other) for other in names if other != "split0.5" and "split0.5" in names])
    add_values(findings, "survived")
    return findings


def pages_against_dimensions(
    traces: Sequence[Trace],
    levels: Sequence[float] = (16,),
    exponents: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
) -> Findings:
    """Compare splits of the search's compression between pages and dimensions in hybrid attention (section 3.4).

    Pages have c ** exponent entries, and half of the budget pays for the dimensions. Exponent 0 finds single tokens by
    a few dimensions, as SparQ does. Exponent 1 finds pages by all dimensions, as Quest does.

    Returns:
        Table with columns document, compression, method (`pages0.5`), exponent, step_recall, mass_lost, output_error.
        Metrics, with intervals over documents, are `output_error/pages0.5/c16` and the gains
        `gain/output_error/pages0.5_over_pages0/c16` of the even split over each other one.
    """
    rows = []
    jobs = [(trace, c) for trace in traces for c in levels]
    for trace, c in progress_bars.each(jobs, "pages", "budget"):
        for e in exponents:
            contender = policy("hybrid", budget=budget_at(trace, c), page=max(1, round(c**e)))
            own = replay(trace, contender).summary
            about = {"document": trace.document, "compression": c, "method": f"pages{e:g}", "exponent": e}
            rows.append(about | {m: own[m] for m in QUALITY})
    findings = Findings(pd.DataFrame(rows))
    _gains(findings, [("pages0.5", f"pages{e:g}") for e in exponents if e != 0.5])
    return findings


def _gains(findings: Findings, pairs: Sequence[tuple[str, str]], prefix: str = "") -> None:
    """Add each measure of each method, the gains of the pairs, and their widening from least to most compression."""
    for measure, sign in QUALITY.items():
        values = add_values(findings, measure, prefix)
        for better, other in pairs:
            gain = (sign * (values.loc[:, better] - values.loc[:, other])).dropna(axis="columns")
            add_gains(findings, measure, better, other, {c: gain.loc[:, c] for c in sorted(gain.columns)}, prefix)


def table_1(trace: Trace, levels: Sequence[float] = (4, 16, 64)) -> Findings:
    """Compute table 1 at given compressions: `common.table_1`, with metrics named by compression, and its arithmetic.

    Returns:
        Its table. Metrics:
        - `storage/rocketkv/c16` and `traffic/rocketkv/c16`: measured, as shares of the full cache.
        - `auxiliary/quest/c16`: the storage beyond the full cache.
        - `of_tensors/rocketkv/c16`: the measured storage as a share of `storage_by_tensors`.
        - `by_tensors/rocketkv/c16`: `storage_by_tensors` at exactly this compression.
    """
    by_budget = {budget_at(trace, c): c for c in levels}
    table = common.table_1(trace, list(by_budget)).table
    findings = Findings(table.assign(compression=[by_budget[budget] for budget in table["budget"]]))
    for method, compression in itertools.product(common.METHODS, levels):
        findings.set(BY_TENSORS, common.storage_by_tensors(method, compression), method=method, compression=compression)
    for row in findings.table.dropna().to_dict("records"):
        at = {"method": row["method"], "compression": row["compression"]}
        findings.set(STORAGE, row["storage_measured"], **at)
        findings.set(TRAFFIC, row["traffic_measured"], **at)
        findings.set(OF_TENSORS, row["storage_measured"] / row["storage_tensors"], **at)
        if row["method"] in ("quest", "sparq"):
            findings.set(AUXILIARY, row["storage_measured"] - 1, **at)
    return findings


def by_exponent(findings: Findings, measure: str) -> pd.DataFrame:
    """One measure of `splits` or `pages_against_dimensions`: exponent, compression, method, value, low, high.

    Methods without an exponent are left out.
    """
    exponents = findings.table[["method", "exponent"]].drop_duplicates().dropna()
    return values_of(findings, measure).merge(exponents, on="method")


def published_exponent(compression: float) -> float:
    """The share of the compression that the authors' code gives to the first stage, as an exponent of c."""
    return min(0.2 + 0.06 * math.log2(compression), 0.8)
