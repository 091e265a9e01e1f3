"""DapQ, section 3.1-3.2 and appendix B: does a query's position matter more than its content?

The prefilled cache of one trace is used again and again; only the appended tokens run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from kvlab.analyses.findings import Findings, estimates
from kvlab.analyses.texts import plain_name, to_summarise
from kvlab.core import hookable
from kvlab.core.adapter import StoreCache
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.instruments import measures
from kvlab.lib import progress_bars
from kvlab.traces import shared
from kvlab.traces.passes import prefilled, pseudo_queries
from kvlab.traces.recording import encoder
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

SENTENCE = "Sorry, I don't know. "
CONDITIONS = ("sc_sp", "dc_sp", "sc_dp", "dc_dp")
# Differences between two conditions: right position less wrong, right content less wrong, and one against the other.
CONTRASTS = {
    "position/same_content": ("sc_sp", "sc_dp"),
    "position/different_content": ("dc_sp", "dc_dp"),
    "content/same_position": ("sc_sp", "dc_sp"),
    "content/different_position": ("sc_dp", "dc_dp"),
    "position_less_content": ("dc_sp", "sc_dp"),
}

SIMILARITY = "similarity/{rope}/{condition}"
DISTANCE = "distance/{rope}/{condition}"
CONTRAST = "effect/{rope}/{contrast}"
POSITION_OVER_CONTENT = "ratio/{rope}/dc_sp_over_sc_dp"
CONTENT_OVER_POSITION = "ratio/{rope}/content_over_position"
AT_LENGTH = "/{context}"  # appended to an effect of table 1 that was measured at another length
SIMILARITY_RANDOM = "similarity_random/{rope}/{condition}"
GAP_RANDOM = "gap_random/{rope}/{left}_less_{right}"
DECAY = "offset/spearman/{context}"
DROP = "offset/drop/{context}"
CURVE = "offset/curve/{context}/{step}"
# The effects of the context that the claims are about have names without its length.
CLAIMED_DECAY, CLAIMED_CURVE = "offset/spearman", "offset/curve/{step}"
LONGER_DECAYS_MORE = "offset/longer_decays_more"

# Trials that share one forward pass: enough to use the processor well, few enough for a laptop's memory.
TOGETHER = 8


def similarities(lm: LM, trace: Trace, cache: StoreCache, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine between pseudo-queries and the true decoding queries, averaged over layers and heads.

    Args:
        cache: the trace's prompt (`kvlab.traces.passes.prefilled`).
        ids, positions: int64 `[trials, m]`.

    Returns:
        Post-RoPE and pre-RoPE similarity, each `[trials, m]`.
    """
    m = ids.shape[1]
    response(trace, m)
    post, pre = pseudo_queries(lm, cache, ids, positions)
    return _similarity(post, trace.response_queries[:, :, :m]), _similarity(pre, trace.response_pre_queries[:, :, :m])


def _similarity(queries: Tensor, true: Tensor) -> Tensor:
    """`[trials, layers, heads, m, head_dim]`, `[layers, heads, m, head_dim]` -> `[trials, m]`."""
    return measures.query_similarity(queries, true.expand_as(queries)).mean((1, 2))


def response(trace: Trace, n: int) -> Tensor:
    """The first `n` tokens of the response; pseudo-queries are compared with their decoding queries."""
    if trace.steps < n:
        raise KvlabError(
            f"{n} pseudo-queries need as many decoding queries to compare with, and the trace has {trace.steps}"
        )
    return ids_of(trace)[trace.prompt_length :][:n]


def ids_of(trace: Trace) -> Tensor:
    """The ids of the prompt and the response, int64 `[tokens]`.

    Raises:
        KvlabError: the trace was made from tensors, and has no ids.
    """
    if trace.ids is None:
        raise KvlabError(
            "pseudo-queries run on a model, and this trace has no token ids; capture one with kvlab.capture"
        )
    return trace.ids


def nonsense(lm: LM, n: int) -> Tensor:
    """`n` tokens of the paper's fixed sentence, repeated."""
    return encoder(lm)(SENTENCE * n)[:n]


def table_1(lm: LM, traces: Sequence[Trace], n: int = 32) -> Findings:
    """Measure table 1: same or different content (SC, DC) and position (SP, DP), post and pre RoPE.

    "Different position" is 0 .. n-1, and "different content" is the fixed sentence, as in the paper. The
    measurement is repeated over traces.

    Returns:
        Table with columns document, condition, rope, similarity. Metrics, with intervals over documents:
        - `similarity/post/sc_sp` and so on.
        - `distance/post/sc_sp`: 1 - similarity.
        - `effect/post/position/same_content` and likewise for CONTRASTS: differences paired by document.
        - `ratio/post/dc_sp_over_sc_dp`: the paper's 2.2x.
        - `ratio/post/content_over_position`: the ratio of the two costs, each where the other is wrong too.
    """
    rows = []
    for trace in progress_bars.each(traces, "table 1", "doc"):
        true, different = response(trace, n), nonsense(lm, n)
        right, wrong = torch.arange(n) + trace.prompt_length, torch.arange(n)
        cosines = similarities(
            lm,
            trace,
            prefilled(trace, lm),
            torch.stack([true, different, true, different]),
            torch.stack([right, right, wrong, wrong]),
        )
        for rope, values in zip(("post", "pre"), cosines, strict=True):
            for condition, row in zip(CONDITIONS, values, strict=True):
                rows.append(
                    {
                        "document": trace.document,
                        "condition": condition,
                        "rope": rope,
                        "similarity": float(row.mean()),
                    }
                )
    findings = Findings(pd.DataFrame(rows))
    for rope, part in findings.table.groupby("rope"):
        wide = part.pivot(index="document", columns="condition", values="similarity")
        for condition in CONDITIONS:
            findings.add(SIMILARITY, wide[condition], rope=rope, condition=condition)
            findings.add(DISTANCE, 1 - wide[condition], rope=rope, condition=condition)
        for contrast, (right, wrong) in CONTRASTS.items():
            findings.add_difference(CONTRAST, wide.loc[:, right], wide.loc[:, wrong], rope=rope, contrast=contrast)
        if rope == "post":
            findings.add(POSITION_OVER_CONTENT, wide["dc_sp"] / wide["sc_dp"], rope=rope)
            content, position = wide["sc_dp"] - wide["dc_dp"], wide["dc_sp"] - wide["dc_dp"]
            findings.add(CONTENT_OVER_POSITION, content / position, rope=rope)
    return findings


def at_length(lm: LM, trace: Trace, n: int = 32) -> Findings:
    """Table 1 on one more prompt of another length: metrics like `ratio/post/dc_sp_over_sc_dp/4k`, no intervals."""
    usual = table_1(lm, [trace], n)
    findings = Findings(usual.table)
    for row in usual.rows:
        findings.set(row.effect + AT_LENGTH, row.value, context=context_name(trace.prompt_length), **row.keys)
    return findings


def position_over_content(table: Findings, context: str, longest: Findings) -> str:
    """The ratio of similarities, right position over right content, as text.

    Args:
        table, context: from `table_1`, and the name of its prompts' length.
        longest: from `at_length`.
    """
    ratios = {context: table.row(POSITION_OVER_CONTENT, rope="post").value}
    at_length = longest.frame(POSITION_OVER_CONTENT + AT_LENGTH)
    ratios |= dict(zip(at_length["context"], at_length["value"], strict=True))
    return "the right position over the right content: " + ", ".join(f"{r:.2f} at {of}" for of, r in ratios.items())


def figure_2a(lm: LM, traces: Sequence[Trace], trials: int = 20, n: int = 32, seed: int = 0) -> Findings:
    """Measure figure 2a: similarities for random contents (drawn from the vocabulary) and random spans of positions.

    A span starts anywhere in [0, prompt] ("dp_m") or in [0, 100] ("dp_100").

    Args:
        trials: for each document and condition.

    Returns:
        Table with columns document, condition, rope, trial, similarity. The metrics are means over documents of the
        documents' means, with intervals over documents:
        - `similarity_random/post/dc_sp` and so on.
        - `gap_random/post/dc_sp_less_sc_dp_m`: right position with random content, less right content at a random
          position.
        - `..._less_sc_dp_100` and `gap_random/post/dc_dp_m_less_dc_dp_100`.
    """
    vocabulary = hookable.text_config(lm.model).vocab_size
    rows, jobs = [], 5 * trials * len(traces)
    with progress_bars.counting(jobs, "figure 2a", "trial") as bar:
        for number, trace in enumerate(traces):
            generator = torch.Generator().manual_seed(seed + number)
            conditions = _random_conditions(trace, trials, n, vocabulary, generator)
            cache = prefilled(trace, lm)
            for condition, (ids, positions) in conditions.items():
                for batch in torch.arange(trials).split(TOGETHER):
                    cosines = similarities(lm, trace, cache, ids[batch], positions[batch])
                    for rope, values in zip(("post", "pre"), cosines, strict=True):
                        about = {"document": trace.document, "condition": condition, "rope": rope}
                        means = zip(batch.tolist(), values.mean(-1).tolist(), strict=True)
                        rows += [about | {"trial": t, "similarity": v} for t, v in means]
                    bar.update(len(batch))
    findings = Findings(pd.DataFrame(rows))
    for rope, part in findings.table.groupby("rope"):
        wide = part.pivot_table(index="document", columns="condition", values="similarity")
        for condition in wide:
            findings.add(SIMILARITY_RANDOM, wide[condition], rope=rope, condition=condition)
        for left, right in (
            ("dc_sp", "sc_dp_m"),
            ("dc_sp", "sc_dp_100"),
            ("dc_dp_m", "dc_dp_100"),
            ("sc_dp_m", "sc_dp_100"),
        ):
            pair = wide.loc[:, left], wide.loc[:, right]
            findings.add_difference(GAP_RANDOM, *pair, rope=rope, left=left, right=right)
    return findings


def _random_conditions(
    trace: Trace, trials: int, n: int, vocabulary: int, generator: torch.Generator
) -> dict[str, tuple[Tensor, Tensor]]:
    """Ids and positions `[trials, n]` of each condition of figure 2a."""
    true = response(trace, n).expand(trials, n)
    right = (torch.arange(n) + trace.prompt_length).expand(trials, n)

    def contents() -> Tensor:
        return torch.randint(vocabulary, (trials, n), generator=generator)

    def spans(within: int) -> Tensor:
        return torch.randint(max(within - n + 1, 1), (trials, 1), generator=generator) + torch.arange(n)

    return {
        "dc_sp": (contents(), right),
        "sc_dp_m": (true, spans(trace.prompt_length)),
        "dc_dp_m": (contents(), spans(trace.prompt_length)),
        "sc_dp_100": (true, spans(100)),
        "dc_dp_100": (contents(), spans(100)),
    }


def figure_2b(lm: LM, traces: Sequence[Trace], parts: int = 8, n: int = 32) -> Findings:
    """Measure figure 2b: the true content at start positions from 0 to the right one, for several context lengths.

    Args:
        traces: of any lengths; those of one `context_name` are averaged.
        parts: number of even steps from the right position to position 0; smaller offsets (powers of four, and n) are
            measured as well.

    Returns:
        Table with columns document, context, start, offset, similarity. The metrics of a context are means over its
        documents, with intervals:
        - `offset/spearman/2k`: the rank correlation of similarity with the offset; -1 is a monotone decay.
        - `offset/drop/2k`: the similarity at the right position less that at position 0.
        - `offset/curve/2k/0` .. `offset/curve/2k/{parts}`: the similarity after each even step.

    Raises:
        KvlabError: two traces of one document whose lengths have the same name.
    """
    rows, even = [], {}
    for trace in progress_bars.each(traces, "figure 2b", "context"):
        length, context, text = trace.prompt_length, context_name(trace.prompt_length), plain_name(trace)
        if (text, context) in even:
            raise KvlabError(f"{text} is there twice with about {context} tokens; contexts need lengths further apart")
        steps = torch.linspace(0, length, parts + 1).round().long()
        near = 4 ** torch.arange(1, 8)
        # SnapKV's window is n tokens before the response.
        offsets = torch.cat([steps, near[near < length // parts], torch.tensor([min(n, length)])]).unique()
        true, cache = response(trace, n), prefilled(trace, lm)
        for batch in offsets.split(TOGETHER):
            positions = (length - batch)[:, None] + torch.arange(n)
            values = similarities(lm, trace, cache, true.expand(len(batch), n), positions)[0].mean(-1)
            for offset, value in zip(batch.tolist(), values.tolist(), strict=True):
                about = {"document": text, "context": context, "start": length - offset, "offset": offset}
                rows.append(about | {"similarity": value})
        even[text, context] = steps.tolist()
    findings = Findings(pd.DataFrame(rows))
    for context, part in findings.table.groupby("context", sort=False):
        curves = {text: curve.set_index("offset")["similarity"] for text, curve in part.groupby("document")}
        ranks = [np.asarray(stats.spearmanr(curve.index, curve))[0] for curve in curves.values()]
        findings.add(DECAY, ranks, context=context)
        findings.add(DROP, _drops(part), context=context)
        for step in range(parts + 1):
            values = [curve.at[even[text, context][step]] for text, curve in curves.items()]
            findings.add(CURVE, values, context=context, step=step)
    return findings


def _drops(part: pd.DataFrame) -> pd.Series:
    """Similarity at the right position less that at position 0, by document."""
    curves = part.sort_values("offset").groupby("document")["similarity"]
    return pd.Series({document: curve.iloc[0] - curve.iloc[-1] for document, curve in curves})


def longer_decays_more(figure: Findings, short: str, long: str) -> Findings:
    """Give figure 2b's two findings: the decay in the longer of two contexts, and its excess over the shorter one's.

    Args:
        figure: from `figure_2b`.
        short, long: names of two contexts, such as "500" and "2k".

    Returns:
        Metrics:
        - `offset/longer_decays_more`: the drop from the right position to position 0 in the long context, less that in
          the short one; paired by document.
        - the long context's `offset/spearman` and `offset/curve/0` .. under names without its length.
    """
    drops = {context: _drops(part) for context, part in figure.table.groupby("context")}
    missing = {short, long} - set(drops)
    if missing:
        raise KvlabError(f"there is no context of {min(missing)} in the figure; it has {', '.join(map(str, drops))}")
    findings = Findings(figure.table)
    findings.add_difference(LONGER_DECAYS_MORE, drops[long], drops[short])
    for decay in figure.frame(DECAY).query("context == @long").to_dict("records"):
        findings.set(CLAIMED_DECAY, decay["value"], (decay["low"], decay["high"]))
    for point in figure.frame(CURVE).query("context == @long").to_dict("records"):
        findings.set(CLAIMED_CURVE, point["value"], (point["low"], point["high"]), step=point["step"])
    return findings


def averaged(table: pd.DataFrame) -> pd.DataFrame:
    """Figure 2b's curves as means over documents with intervals: context, start, offset, similarity, low, high.

    Documents of one context differ in length by a few tokens, so points are joined by their place among the offsets.
    """
    groups = [
        ((context, *part[["start", "offset"]].mean()), part["similarity"])
        for context, curves in table.groupby("context", sort=False)
        for _, part in curves.groupby(curves.groupby("document")["offset"].rank())
    ]
    return estimates(groups, ["context", "start", "offset"]).rename(columns={"value": "similarity"})


def of_length(lm: LM, documents: Sequence[str], tokens: int, new_tokens: int) -> list[Trace]:
    """Traces of requests to summarise at most `tokens` tokens of each document, without any policy's pseudo-queries."""
    prompts = [to_summarise(lm, document, tokens) for document in corpus.documents(documents)]
    return shared.shared(lm, prompts, new_tokens, pseudo=())


def responses(lm: LM, traces: Sequence[Trace]) -> str:
    """A line for each trace: its document, its prompt's length and how its response begins."""
    lines = []
    for trace in traces:
        begins = lm.decode(ids_of(trace)[trace.prompt_length :]).strip()[:90]
        lines.append(f"{plain_name(trace)} {trace.prompt_length} tokens: {begins} ...")
    return "\n".join(lines)


def context(traces: Sequence[Trace]) -> str:
    """The name of the context of traces of one length."""
    return context_name(traces[0].prompt_length)


def context_name(tokens: int) -> str:
    """3993 -> "4k": the paper's name of a context length; below a thousand it is rounded to hundreds ("500")."""
    if tokens < 950:
        return f"{round(tokens, -2)}"
    return f"{tokens / 1000:.1f}".removesuffix(".0") + "k"
