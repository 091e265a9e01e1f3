"""DapQ, section 3.1-3.2 and appendix B: does a query's position matter more than its content?

The prefilled cache of one trace is used again and again; only the appended tokens run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor
from tqdm.auto import tqdm

from kvlab.analyses import Findings
from kvlab.cache import StoreCache
from kvlab.errors import KvlabError
from kvlab.trace import Trace, prefilled, pseudo_queries

if TYPE_CHECKING:
    from kvlab.models import LM

SENTENCE = "Sorry, I don't know. "
CONDITIONS = ("sc_sp", "dc_sp", "sc_dp", "dc_dp")
# Trials that share one forward pass: enough to keep the matrices busy, few enough for a laptop's memory.
TOGETHER = 8


def similarities(lm: LM, trace: Trace, cache: StoreCache, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine between pseudo-queries and the true decoding queries, averaged over layers and heads.

    Args:
        cache: the trace's prompt (`kvlab.trace.prefilled`).
        ids, positions: int64 `[trials, m]`.

    Returns:
        Post-RoPE and pre-RoPE similarity, each `[trials, m]`.
    """
    m = ids.shape[1]
    response(trace, m)
    truth = trace.response_queries[:, :, :m].float(), trace.response_pre_queries[:, :, :m].float()
    found = pseudo_queries(lm, cache, ids, positions)
    return tuple(
        F.cosine_similarity(queries.float(), true[None], dim=-1).mean((1, 2))
        for queries, true in zip(found, truth, strict=True)
    )


def response(trace: Trace, n: int) -> Tensor:
    """The first `n` tokens of the response, whose decoding queries are what pseudo-queries are compared with."""
    if trace.steps < n:
        raise KvlabError(
            f"{n} pseudo-queries need as many decoding queries to compare with, and the trace has {trace.steps}"
        )
    return trace.ids[trace.prompt_length :][:n]


def nonsense(lm: LM, n: int) -> Tensor:
    """`n` tokens of the paper's fixed sentence, repeated."""
    ids = torch.tensor(lm.tokenizer(SENTENCE * n, add_special_tokens=False).input_ids)
    return ids[:n]


def table_1(lm: LM, traces: Sequence[Trace], n: int = 32) -> Findings:
    """Table 1: same or different content (SC, DC) at the same or a different position (SP, DP), post and pre RoPE.

    "Different position" is 0 .. n-1, "different content" the fixed sentence, as in the paper; repeated over traces.

    Returns:
        Table with columns document, condition, rope, similarity; metrics `similarity/post/sc_sp` and so on, and
        `ratio/post/dc_sp_over_sc_dp` (the paper's 2.2x); intervals over the documents.
    """
    rows = []
    for trace in tqdm(traces, desc="table 1", unit="doc", disable=len(traces) < 3, leave=False):
        true, other = response(trace, n), nonsense(lm, n)
        here, away = torch.arange(n) + trace.prompt_length, torch.arange(n)
        found = similarities(
            lm, trace, prefilled(trace), torch.stack([true, other, true, other]), torch.stack([here, here, away, away])
        )
        for rope, values in zip(("post", "pre"), found, strict=True):
            for condition, row in zip(CONDITIONS, values, strict=True):
                rows.append(
                    {
                        "document": trace.document,
                        "condition": condition,
                        "rope": rope,
                        "similarity": float(row.mean()),
                    }
                )
    table = pd.DataFrame(rows)
    findings = Findings(table)
    for (rope, condition), group in table.groupby(["rope", "condition"]):
        findings.add(f"similarity/{rope}/{condition}", group["similarity"])
    wide = table[table["rope"] == "post"].pivot(index="document", columns="condition", values="similarity")
    findings.add("ratio/post/dc_sp_over_sc_dp", wide["dc_sp"] / wide["sc_dp"])
    return findings


def figure_2a(lm: LM, trace: Trace, trials: int = 100, n: int = 32, near: int = 100, seed: int = 0) -> Findings:
    """Figure 2a: distributions over random contents (drawn from the vocabulary) and random position spans.

    A span starts anywhere in [0, prompt] ("dp_m") or in [0, `near`] ("dp_100").

    Returns:
        Table with columns condition, rope, trial, similarity; metrics `similarity_random/post/dc_sp` and so on with
        intervals over trials.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = lm.model.config.get_text_config(decoder=True).vocab_size
    true, here = (
        response(trace, n).expand(trials, n),
        torch.arange(n).expand(trials, n) + trace.prompt_length,
    )

    def contents() -> Tensor:
        return torch.randint(vocabulary, (trials, n), generator=generator)

    def spans(within: int) -> Tensor:
        return torch.randint(max(within - n + 1, 1), (trials, 1), generator=generator) + torch.arange(n)

    wanted = {
        "dc_sp": (contents(), here),
        "sc_dp_m": (true, spans(trace.prompt_length)),
        "dc_dp_m": (contents(), spans(trace.prompt_length)),
        f"sc_dp_{near}": (true, spans(near)),
        f"dc_dp_{near}": (contents(), spans(near)),
    }
    cache, rows = prefilled(trace), []
    with tqdm(total=trials * len(wanted), desc="figure 2a", unit="trial", leave=False) as bar:
        for condition, (ids, positions) in wanted.items():
            for some in torch.arange(trials).split(TOGETHER):
                found = similarities(lm, trace, cache, ids[some], positions[some])
                for rope, values in zip(("post", "pre"), found, strict=True):
                    means = values.mean(-1).tolist()
                    rows += [
                        {"condition": condition, "rope": rope, "trial": int(t), "similarity": v}
                        for t, v in zip(some, means, strict=True)
                    ]
                bar.update(len(some))
    findings = Findings(pd.DataFrame(rows))
    for (rope, condition), group in findings.table.groupby(["rope", "condition"]):
        findings.add(f"similarity_random/{rope}/{condition}", group["similarity"])
    return findings


def figure_2b(lm: LM, traces: Sequence[Trace], points: int = 16, n: int = 32) -> Findings:
    """Figure 2b: the true content at assigned start positions from 0 to the right one, for several context lengths.

    Returns:
        Table with columns context, start, offset, similarity, low, high (interval over the n tokens); metrics
        `offset/spearman/{context}` (rank correlation of similarity with the offset; -1 is a monotone decay) and
        `offset/drop/{context}` (similarity at the right position less that at position 0).
    """
    rows, findings = [], Findings(pd.DataFrame())
    for trace in tqdm(traces, desc="figure 2b", unit="context", leave=False):
        length = trace.prompt_length
        # Even steps as in the paper's figure, and closer ones at the right position, where the curve is steep.
        near = 2 ** torch.arange(min(8, length.bit_length() - 1))
        offsets = torch.cat([torch.linspace(0, length, points).round().long(), near]).unique()
        starts = length - offsets
        true, cache = response(trace, n), prefilled(trace)
        context = context_name(length)
        similarity = []
        for some in starts.split(TOGETHER):
            positions = some[:, None] + torch.arange(n)
            similarity.append(similarities(lm, trace, cache, true.expand(len(some), n), positions)[0])
        per_token = torch.cat(similarity)
        for start, offset, values in zip(starts.tolist(), offsets.tolist(), per_token, strict=True):
            one = Findings(pd.DataFrame())
            one.add("similarity", values)
            low, high = one.intervals["similarity"]
            rows.append(
                {
                    "context": context,
                    "start": start,
                    "offset": offset,
                    "similarity": float(values.mean()),
                    "low": low,
                    "high": high,
                }
            )
        means = per_token.mean(-1)
        findings.metrics[f"offset/spearman/{context}"] = float(stats.spearmanr(offsets, means).statistic)
        findings.add(f"offset/drop/{context}", per_token[0] - per_token[-1])
    findings.table = pd.DataFrame(rows)
    return findings


def context_name(tokens: int) -> str:
    """3993 -> "4k": how the paper names a context length."""
    return f"{tokens / 1000:.1f}".removesuffix(".0") + "k"
