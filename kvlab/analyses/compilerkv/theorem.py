"""CompilerKV, theorem 4.1 and appendix A on real attention: one identity, one bound, and one claim that is neither."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from kvlab.analyses.compilerkv.variants import Inspected
from kvlab.analyses.findings import Findings
from kvlab.core import attention
from kvlab.core.store import EMPTY
from kvlab.traces.trace import Trace

LARGEST_GAP = "theorem41/largest_gap"
LARGEST_RATIO = "theorem41/largest_ratio"
MEAN_RATIO = "theorem41/mean_ratio"
VIOLATED = "theorem41/a2_violated"


def distances(rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far rows of attention lie from their renormalised subsets.

    Args:
        rows: `[..., length]`, each summing to 1.
        kept: bool, same shape; at least one entry of positive weight in each row.

    Returns:
        The l1 distance, the squared l2 distance and the discarded mass, each `[...]`.
    """
    subset = rows.masked_fill(~kept, 0)
    renormalised = subset / subset.sum(-1, keepdim=True)
    difference = rows - renormalised
    return difference.abs().sum(-1), difference.square().sum(-1), rows.masked_fill(kept, 0).sum(-1)


@torch.inference_mode()
def theorem_4_1(
    traces: Sequence[Trace], budgets: Sequence[int | float] = (64, 512), tables: str | None = None
) -> Findings:
    """Check appendix A on the rows of every decoding step, layer and head, in double precision.

    (A1) bounds the l1 distance by twice the discarded mass. In fact they are equal: renormalising adds exactly the
    discarded mass to the kept entries. (A5) is about the Frobenius norm. Each row's squared l2 distance is at most
    twice the squared discarded mass. The reason is that the positive and the negative part of the difference both sum
    to that mass. (A2) says that the discarded mass of a head is at most the utility of the discarded tokens over the
    head's weight. The text at hand lacks the formula of A2. Here it follows the paper's sentences, for the queries of
    the utility's window. Both sides are averaged over the window.

    Returns:
        Table with one row for each document, budget, layer and head, and the columns:
        - gap: the largest difference between the l1 distance and twice the mass.
        - ratio: the squared l2 distance over its bound, both summed over steps.
        - lost and bound: the two sides of A2.
        The metrics are `theorem41/largest_gap`, `theorem41/largest_ratio`, `theorem41/mean_ratio` and
        `theorem41/a2_violated`. The last is the share of heads whose discarded mass exceeds the bound.
    """
    frames = []
    # In double precision, so on the CPU: Apple's GPUs have none.
    for trace in (captured.to("cpu") for captured in traces):
        visible = attention.last_visible(trace.steps, trace.length, trace.keys.device)
        for budget in budgets:
            method = Inspected(budget=budget, tables=tables, pad="budget")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="compilerkv runs with neutral tables")
                planned = method.planned(trace.prompt)
            kept = _mask(method.prefill(planned)[:, 0], trace.prompt_length)
            queries = min(method.utility_window, trace.prompt_length)
            window = trace.prompt.window_sums(method.utility_window).double() / queries
            dropped = ~kept[:, None]
            lost = (window * dropped).sum(-1)
            utility = (method.utilities(planned).double() * ~kept).sum(-1) / queries
            bound = utility[:, None] / method.weights(trace.prompt).double()
            for layer in range(trace.n_layers):
                queries, keys = trace.response_queries[layer].double(), trace.keys[layer].double()
                rows = attention.weights(queries, keys, trace.softmax.row(layer), visible)
                stays = torch.cat([kept[layer], torch.ones(trace.steps, dtype=torch.bool)]).expand(rows.shape)
                l1, squares, mass = distances(rows, stays)
                frames.append(
                    pd.DataFrame(
                        {
                            "document": trace.document,
                            "budget": budget,
                            "layer": trace.layers[layer],
                            "head": range(trace.heads),
                            "gap": (l1 - 2 * mass).abs().amax(-1).tolist(),
                            "ratio": (squares.sum(-1) / (2 * mass.square().sum(-1))).tolist(),
                            "lost": lost[layer].tolist(),
                            "bound": bound[layer].tolist(),
                        }
                    )
                )
    table = pd.concat(frames, ignore_index=True)
    findings = Findings(table)
    findings.set(LARGEST_GAP, table["gap"].to_numpy().max())
    findings.set(LARGEST_RATIO, table["ratio"].to_numpy().max())
    breaks = table.assign(breaks=table["lost"] > table["bound"])
    means = breaks.pivot_table(index="document", values=["ratio", "breaks"])
    findings.add(MEAN_RATIO, means["ratio"])
    findings.add(VIOLATED, means["breaks"])
    return findings


def by_head(theorem: Findings) -> pd.DataFrame:
    """Both sides of A2, averaged over documents: budget, layer, head, lost, bound."""
    return theorem.table.pivot_table(index=["budget", "layer", "head"], values=["lost", "bound"]).reset_index()


def in_words(theorem: Findings) -> str:
    """The identity, the bound, and how often A2 does not hold."""
    gap, largest, mean, violated = (
        theorem.row(effect).value for effect in (LARGEST_GAP, LARGEST_RATIO, MEAN_RATIO, VIOLATED)
    )
    return (
        f"largest difference between the l1 distance and twice the mass: {gap:.0e}\n"
        f"squared l2 distance over its bound: {mean:.2f} in the mean, {largest:.2f} at most\n"
        f"heads that discard more than A2 allows: {violated:.0%}"
    )


def _mask(positions: Tensor, length: int) -> Tensor:
    """Positions `[rows, n]`, -1 padded, as bool `[rows, length]`."""
    mask = torch.zeros(len(positions), length + 1, dtype=torch.bool)
    mask.scatter_(1, positions.masked_fill(positions == EMPTY, length), True)
    return mask[:, :length]
