"""DapQ, section 6 and figure 6: what should the pseudo-queries say, and how many should there be?

The paper judges by LongBench scores of an 8B model. Here two measures judge the same pseudo-queries: the recall of the
tokens that they keep, and the attention mass lost with the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import Tensor

from kvlab.analyses.dapq.recall import with_pseudo
from kvlab.analyses.findings import Findings, estimates
from kvlab.core import attention
from kvlab.errors import KvlabError
from kvlab.lib import progress_bars
from kvlab.methods.dapq import DapQ
from kvlab.replays.reference import reference
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

MEASURES = ("recall", "mass_lost")
RANDOM = {"RS_C": "scattered", "RC_C": "span"}
FIXED = "Fix_C"
SOFTMAXES = ("prompt", "all")
USUAL = {"content": "first_last", "first": 4}

CONTENT = "content/{measure}/{content}/b{budget}"
VARIATION = "content/cv/{measure}/b{budget}"
ENDS_LESS_RANDOM = "content/ends_less_random/{measure}/b{budget}"
GAP = "content/gap/{measure}/b{budget}"
POSITION = "content/position/{measure}/b{budget}"
POSITION_LESS_GAP = "content/position_less_gap/{measure}/b{budget}"
LENGTH = "length/{measure}/n{length}"
BEST_LENGTH = "length/best/{measure}/r{response}"
RISE = "length/rise/{measure}"
FALL = "length/fall/{measure}"
MUTUAL = "mutual/{measure}/n{length}"
MUTUAL_GROWS = "mutual/loss_grows/{measure}"


def contents(
    n: int = 32, firsts: Sequence[int] = (2, 4, 8, 16), seeds: Sequence[int] = (0, 1)
) -> dict[str, list[dict]]:
    """The contents of figure 6a as options of the DapQ policy, by the paper's names; random ones once for each seed.

    Args:
        n: pseudo-queries.
        firsts: m of each FmLn, whose n is the rest.
    """
    variants = {f"F{m}L{n - m}": [{"content": "first_last", "first": m, "window": n}] for m in firsts}
    variants |= {name: [{"content": kind, "seed": s, "window": n} for s in seeds] for name, kind in RANDOM.items()}
    return variants | {FIXED: [{"content": "sentence", "window": n}]}


def dapq_with(options: Mapping, budget: float = 1.0) -> DapQ:
    """DapQ with these options."""
    return DapQ(budget=budget, **options)


def scored(trace: Trace, kept: Tensor) -> dict[str, float]:
    """Recall of the gold top-k in `kept` and the attention mass of the response on prompt tokens outside of it.

    Args:
        kept: positions `[layers, kv_heads, k]` after the prefill; all of the response stays.

    Returns:
        Means over layers, heads and steps.
    """
    side, lost = reference(trace), []
    for layer, positions in enumerate(kept):
        rows = side.weights(layer)[:, :, : trace.prompt_length]
        where = attention.to_query_heads(positions, trace.heads)[:, None].expand(-1, trace.steps, -1)
        lost.append(float((rows.sum(-1) - rows.gather(-1, where).sum(-1)).mean()))
    return {"recall": recalled(trace, kept), "mass_lost": float(np.mean(lost))}


def recalled(trace: Trace, kept: Tensor) -> float:
    """Share of the gold top-k among `kept` positions `[layers, kv_heads, k]`, averaged over layers and KV heads."""
    side = reference(trace)
    return float(side.share_found(side.gold_ranks, kept, kept.shape[-1]).mean())


def figure_6a(
    lm: LM,
    traces: Sequence[Trace],
    budgets: Sequence[int] = (64, 128, 256),
    n: int = 32,
    firsts: Sequence[int] = (2, 4, 8, 16),
    draws: int = 2,
    seed: int = 0,
) -> Findings:
    """Measure figure 6a: `n` pseudo-queries of each content at the response's positions, and of one at position 0.

    Args:
        draws: draws of each random content for each document; their mean counts.

    Returns:
        Table with columns document, content, budget, measure, value. Metrics for each measure and budget, with
        intervals over documents:
        - `content/recall/F4L28/b128`: the measure of a content.
        - `content/cv/recall/b128`: the coefficient of variation, over the contents, of their means over documents.
        - `content/ends_less_random/recall/b128`: the mean of all FmLn less that of RS_C and RC_C, paired.
        - `content/gap/recall/b128`: `gap_by_others`.
        - `content/position/recall/b128`: first 4 and last at the right position less the same at position 0, paired.
        - `content/position_less_gap/recall/b128`: that difference less the gap.
        Larger differences are better everywhere: for mass lost their signs are turned.
    """
    rows, usual, elsewhere = [], USUAL | {"window": n}, f"F4L{n - 4} at 0"
    for number, trace in enumerate(progress_bars.each(traces, "figure 6a", "doc")):
        options = contents(n, firsts, range(seed + draws * number, seed + draws * (number + 1)))
        own = with_pseudo(
            lm, trace, [dapq_with(parameters) for variants in options.values() for parameters in variants]
        )
        at_start = with_pseudo(lm, trace, [dapq_with(usual)], start=0)
        for budget in budgets:
            sets = {
                name: [dapq_with(parameters, budget).prefill(own.prompt) for parameters in variants]
                for name, variants in options.items()
            }
            sets[elsewhere] = [dapq_with(usual, budget).prefill(at_start.prompt)]
            for name, retained in sets.items():
                measured = [scored(own, kept) for kept in retained]
                about = {"document": trace.document, "content": name, "budget": budget}
                rows += [about | {"measure": m, "value": float(np.mean([f[m] for f in measured]))} for m in MEASURES]
    findings = Findings(pd.DataFrame(rows))
    for measure, budget in itertools.product(MEASURES, budgets):
        part = findings.table.query("measure == @measure and budget == @budget")
        wide, at = (
            part.pivot(index="document", columns="content", values="value"),
            {"measure": measure, "budget": budget},
        )
        for content in findings.table["content"].unique():
            findings.add(CONTENT, wide[content], content=content, **at)
        right = wide.drop(columns=elsewhere)
        findings.set(VARIATION, *variation(right), **at)
        sign = -1 if measure == "mass_lost" else 1
        ends = [content for content in right if content not in (*RANDOM, FIXED)]
        findings.add_difference(
            ENDS_LESS_RANDOM, sign * right[ends].mean(axis=1), sign * right[list(RANDOM)].mean(axis=1), **at
        )
        gap = gap_by_others(sign * right)
        findings.add(GAP, gap, **at)
        if (published := f"F4L{n - 4}") in right:
            effects = sign * (right.loc[:, published] - wide.loc[:, elsewhere])
            findings.add(POSITION, effects, **at)
            findings.add_difference(POSITION_LESS_GAP, effects, gap, **at)
    return findings


def variation(wide: pd.DataFrame) -> tuple[float, tuple[float, float]]:
    """Coefficient of variation (population) of the columns' means over the rows.

    Args:
        wide: a row for each document, a column for each content.

    Returns:
        The value and its 95 % interval from resampled rows.
    """
    values = wide.to_numpy()
    drawn = values[np.random.default_rng(0).integers(len(values), size=(2000, len(values)))].mean(1)
    low, high = np.quantile(drawn.std(-1) / drawn.mean(-1), [0.025, 0.975])
    means = values.mean(0)
    return float(means.std() / means.mean()), (float(low), float(high))


def figure_6b(
    lm: LM,
    traces: Sequence[Trace],
    lengths: Sequence[int] = (1, 4, 8, 16, 32, 64, 128),
    budget: int = 128,
    share: float = 1 / 8,
    responses: Sequence[int] = (),
) -> Findings:
    """Measure figure 6b: windows of 1 to 128 pseudo-queries; the first eighth repeats the prompt's start (4 of 32).

    Args:
        share: of the pseudo-tokens that repeat the prompt's start; the others repeat its end.
        responses: numbers of first response tokens; recall is also measured by their gold top k. Is the best length
            just that of the response?

    Returns:
        Table with columns document, response, length, measure, value. Metrics with intervals over documents, for each
        measure and the whole response:
        - `length/recall/n32`: the measure at a length.
        - `length/rise/recall`: the best length less the shortest.
        - `length/fall/recall`: the best length less the longest.
        A larger rise or fall is better for mass lost, too. For each document the best length is the one that is best on
        average over the others: otherwise its choice would flatter both. `length/best/recall/r32` is the best length on
        average, by responses of 32 tokens.
    """
    rows = []
    for trace in progress_bars.each(traces, "figure 6b", "doc"):
        options = {n: {"content": "first_last", "first": round(share * n), "window": n} for n in lengths}
        own = with_pseudo(lm, trace, [dapq_with(parameters) for parameters in options.values()])
        kept = {n: dapq_with(parameters, budget).prefill(own.prompt) for n, parameters in options.items()}
        parts = {steps: shortened(own, steps) for steps in responses}
        for n, positions in kept.items():
            measured = [(own.steps, name, value) for name, value in scored(own, positions).items()]
            measured += [(steps, "recall", recalled(part, positions)) for steps, part in parts.items()]
            about = {"document": trace.document, "length": n}
            rows += [about | {"response": steps, "measure": name, "value": value} for steps, name, value in measured]
    findings = Findings(pd.DataFrame(rows))
    whole = max(findings.table["response"])
    for measure, of in findings.table.groupby("measure"):
        for response, part in of.groupby("response"):
            wide = part.pivot(index="document", columns="length", values="value")
            good = -wide if measure == "mass_lost" else wide
            findings.set(BEST_LENGTH, good.columns[good.mean().argmax()], measure=measure, response=response)
            if response != whole:
                continue
            for n in wide:
                findings.add(LENGTH, wide[n], measure=measure, length=n)
            reached = pd.Series({document: good.at[document, n] for document, n in best_by_others(good).items()})
            findings.add_difference(RISE, reached, good.loc[:, min(lengths)], measure=measure)
            findings.add_difference(FALL, reached, good.loc[:, max(lengths)], measure=measure)
    return findings


def mutual(
    lm: LM, traces: Sequence[Trace], lengths: Sequence[int] = (4, 32, 128), budget: int = 128, share: float = 1 / 8
) -> Findings:
    """Compare pseudo-queries that attend to each other with a softmax over the prompt alone (section 6.2).

    Returns:
        Table with columns document, length, softmax ("prompt", "all"), measure, value. Metrics with intervals over
        documents:
        - `mutual/recall/n128`: the softmax over the prompt less that of the pass; larger is better for mass lost, too.
        - `mutual/loss_grows/recall`: the same at the longest window less that at the shortest.
    """
    rows = []
    for trace in progress_bars.each(traces, "mutual attention", "doc"):
        options = {n: {"content": "first_last", "first": round(share * n), "window": n} for n in lengths}
        policies = [dapq_with(parameters | {"softmax": over}) for parameters in options.values() for over in SOFTMAXES]
        with_passes = with_pseudo(lm, trace, policies)
        for n, over in itertools.product(lengths, SOFTMAXES):
            kept = dapq_with(options[n] | {"softmax": over}, budget).prefill(with_passes.prompt)
            about = {"document": trace.document, "length": n, "softmax": over}
            rows += [about | {"measure": name, "value": value} for name, value in scored(with_passes, kept).items()]
    findings = Findings(pd.DataFrame(rows))
    for measure, part in findings.table.groupby("measure"):
        wide: Any = part.pivot(index="document", columns=["softmax", "length"], values="value")
        gain = (-1 if measure == "mass_lost" else 1) * (wide["prompt"] - wide["all"])
        for n in gain:
            findings.add(MUTUAL, gain[n], measure=measure, length=n)
        findings.add_difference(MUTUAL_GROWS, gain[max(lengths)], gain[min(lengths)], measure=measure)
    return findings


def shortened(trace: Trace, steps: int) -> Trace:
    """The same prompt with the first `steps` tokens of its response."""
    if not 0 < steps <= trace.steps:
        raise KvlabError(f"the response has {trace.steps} tokens; a part of it has 1 to {trace.steps}, not {steps}")
    length, gone = trace.prompt_length + steps, trace.steps - steps
    known = trace.queries.shape[2] - gone
    return replace(
        trace,
        queries=trace.queries[:, :, :known],
        pre_queries=None if trace.pre_queries is None else trace.pre_queries[:, :, :known],
        keys=trace.keys[:, :, :length],
        values=trace.values[:, :, :length],
        ids=None if trace.ids is None else trace.ids[:length],
    )


def gap_by_others(good: pd.DataFrame) -> pd.Series:
    """For each row (a document) the gap between two columns (contents): the best and the worst of all other rows.

    The largest less the smallest of a row itself would be positive where no content is better than another.
    """
    best, worst = best_by_others(good), best_by_others(-good)
    gaps = {document: good.at[document, best[document]] - good.at[document, worst[document]] for document in good.index}
    return pd.Series(gaps).rename_axis(good.index.name)


def best_by_others(wide: pd.DataFrame) -> pd.Series:
    """For each row the column that is largest on average over all other rows."""
    if len(wide) < 2:
        raise KvlabError("what is best is chosen on other documents, so at least two are needed")
    others = (-wide + wide.sum()) / (len(wide) - 1)
    return others.idxmax(axis=1)


def by_length(figure: Findings, measure: str, aligned: bool = False) -> pd.DataFrame:
    """Return figure 6b's points to draw: response, length, value, low, high (intervals over documents).

    Args:
        aligned: remove the differences between documents that are the same at every length. Each document is moved so
            that its mean over the lengths is the mean of all. Values stay, and intervals shrink to the differences
            between lengths.
    """
    groups: list[Any] = []
    for response, part in figure.table.query("measure == @measure").groupby("response"):
        wide = part.pivot(index="document", columns="length", values="value")
        if aligned:
            wide = wide.sub(wide.mean(axis=1) - wide.to_numpy().mean(), axis="index")
        groups += [((response, length), values) for length, values in wide.items()]
    return estimates(groups, ["response", "length"])
