"""ZSMerge's figure 4 as its authors' published script makes it, which is not as section 4.3 describes it.

Both curves are of the same merged cache. The one that the figure calls eviction has alpha = 0, so that the figure shows
what the logit bias is worth. Prompts end once they pass 100 tokens, and the errors are of the last prompt query alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from kvlab import papers
from kvlab.analyses.findings import Findings
from kvlab.core import attention, hookable
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.lib import progress_bars
from kvlab.methods import Policy, policy
from kvlab.traces.run import capture
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

ENTRIES = (160, 100, 40, 20, 10)
"""The published caches, which the paper calls 80, 50, 20, 10 and 5 %."""
TAIL = 0.4
"""Recent tokens' share of the cache."""
HALF = 0.5
"""The published errors are half of the ratio of the norms."""

ERROR = "published/error/alpha{alpha}/{entries}"
REDUCTION = "published/reduction/{entries}"
PRINTED = "printed/figure4/reduction/{entries}"
ROUNDING = "printed/figure4/reduction/{entries}/inputs"


def prompts(lm: LM, documents: Sequence[str], tokens: int) -> list[Trace]:
    """Traces of the first `tokens` tokens of each document, with all queries of the prompt.

    Raises:
        KvlabError: a document is too short.
    """
    traces = []
    for text in corpus.documents(documents):
        ids = lm.encode(text.text, chat=False)[0]
        if len(ids) < tokens:
            raise KvlabError(f"{text.name} has {len(ids)} tokens, and a prompt of {tokens} is asked for")
        trace = capture(lm, ids[:tokens], new_tokens=1, queries="all", pseudo=())
        trace.meta["document"] = text.name
        traces.append(trace)
    return traces


def projections(lm: LM) -> tuple[Tensor, ...]:
    """W_o of each compressed layer, `[hidden, heads x head_dim]`."""
    return hookable.required_projections(hookable.layers_of(lm.model), "ZSMerge's figure 4")


def figure_4(traces: Sequence[Trace], outputs: Sequence[Tensor], entries: Sequence[int] = ENTRIES) -> Findings:
    """Measure figure 4 as published: the error of the last prompt query's output, with and without the logit bias.

    There is one residual slot. Scores come from all prompt queries, and none decays. The error is half of ||o - o'|| /
    ||o|| after W_o, averaged over layers.

    Args:
        traces: from `prompts`.
        outputs: from `projections`.
        entries: caches, in entries for each layer and KV head.

    Returns:
        Table with columns document, entries, alpha, layer, error. Metrics, with intervals over documents:
        - `published/error/alpha0/40` and `published/error/alpha1/40`.
        - `published/reduction/40`: 1 - error with alpha 1 / error with alpha 0, document by document. Only caches that
          a prompt does not fit into have it.
    """
    rows, longest = [], max(trace.prompt_length for trace in traces)
    for trace in progress_bars.each(traces, "figure 4 as published", "doc"):
        for budget in entries:
            for alpha in (0, 1):
                errors = _errors(trace, outputs, published_policy(trace, budget, alpha))
                about = {"document": trace.document, "entries": budget, "alpha": alpha}
                rows += [
                    about | {"layer": layer, "error": error} for layer, error in zip(trace.layers, errors, strict=True)
                ]
    findings = Findings(pd.DataFrame(rows))
    by_document = findings.table.pivot_table(index=["entries", "document"], columns="alpha", values="error")
    for budget in entries:
        errors = by_document.loc[budget]
        for alpha in (0, 1):
            findings.add(ERROR, errors[alpha], alpha=alpha, entries=budget)
        if budget < longest:
            findings.add(REDUCTION, 1 - errors[1] / errors[0], entries=budget)
    return findings


def published_policy(trace: Trace, budget: int, alpha: float) -> Policy:
    """ZSMerge with the settings of the published script."""
    return policy(
        "zsmerge", budget=budget, proximity=TAIL, residual=1, window=trace.prompt_length, decay=1.0, alpha=alpha
    )


@torch.inference_mode()
def _errors(trace: Trace, outputs: Sequence[Tensor], zsmerge: Policy) -> list[float]:
    """Half of ||o - o'|| / ||o|| of the last prompt query after W_o, for each layer."""
    last = trace.queries.shape[2] - trace.steps
    query = trace.queries[:, :, last - 1 : last].double()
    keys, values = trace.prompt_keys.double(), trace.prompt_values.double()
    full = attention.output(attention.weights(query, keys, trace.softmax), values)
    store = LayerStore(keys.clone(), values.clone())
    zsmerge.compress(store, trace.prompt)
    bias = zsmerge.bias(store)
    bias = None if bias is None else attention.to_query_heads(bias, trace.heads)[:, :, None]
    attended = attention.weights(query, store.keys, trace.softmax, bias=bias)
    merged = attention.output(attended, store.values)
    found = []
    for layer, projection in enumerate(outputs):
        true, ours = (projection.double() @ heads[layer].flatten() for heads in (full, merged))
        found.append(HALF * float((true - ours).norm() / true.norm()))
    return found


def printed() -> Findings:
    """The printed reductions, recomputed from the published errors.

    Returns:
        Table of the published errors; metrics `printed/figure4/reduction/40`, and `.../inputs`: by how much the
        rounding of its two errors may move it.
    """
    table = papers.figure("zsmerge", "figure4_published")
    findings = Findings(table)
    for row in table.to_dict("records"):
        without, with_bias = row["alpha0"], row["alpha1"]
        rounding = (_half_digit(with_bias) + with_bias / without * _half_digit(without)) / without
        findings.set(PRINTED, 1 - with_bias / without, entries=int(row["entries"]))
        findings.set(ROUNDING, rounding, entries=int(row["entries"]))
    return findings


def _half_digit(value: float) -> float:
    """Half of the last printed digit: the third of the small errors, which section 4.3 prints, or thousandths."""
    return 0.5e-3 if value >= 0.01 else 0.5 * 10.0 ** (int(f"{value:e}".partition("e")[2]) - 2)
