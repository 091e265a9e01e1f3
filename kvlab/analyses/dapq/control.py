"""DapQ, section 3: is it the position or the content that SnapKV's window lacks?

Table 1 puts the content right or wrong, and the position right or thousands of tokens off. SnapKV's window is 32 tokens
off, and its content is the prompt's last tokens. So here the same tokens have positions from L (where the response will
be) and from L - 32. Queries of any content have much in common; cosines are also computed without their common mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvlab.analyses.dapq.position import TOGETHER, ids_of, nonsense, response
from kvlab.analyses.findings import Findings
from kvlab.analyses.texts import without_span
from kvlab.core import attention, hookable, ranking
from kvlab.instruments import measures
from kvlab.lib import progress_bars
from kvlab.lib.intervals import interval
from kvlab.replays.reference import reference
from kvlab.traces.passes import prefilled, pseudo_queries
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.core.adapter import StoreCache
    from kvlab.inputs.models import LM

PLACES = ("right", "back", "start")
"""At L, at L - n as SnapKV's window, and at 0."""
CELLS = (
    *((content, place) for content in ("true", "last", "random") for place in ("right", "back")),
    ("true", "start"),
    ("sentence", "right"),
    ("sentence", "start"),
)
"""The runs of `similarity`: (content, place).

The response, the prompt's last tokens (SnapKV's window) and tokens drawn from the vocabulary are in both places. Table
1's conditions have its sentence.
"""

VALUE = "control/{measure}/{content}/{place}"
POSITION = "control/{measure}/position/{content}"
CONTENT = "control/{measure}/content/{place}"
POSITION_LESS_CONTENT = "control/{measure}/position_less_content"
MEAN_QUERY = "control/similarity/mean_query"
OVER_MEAN = "control/similarity/random_less_mean_query"
CENTRED = "centred/pre/{condition}"
SHARE_OF_HEADS = "control/heads/position_over_content"
EQUAL_AT = "offset/equal_to_content"
AT_WINDOW = "offset/loss_at_window_less_content"
ADJACENT = "adjacent/{rope}/{distance}"
NEAR_LESS_FAR = "adjacent/{rope}/near_less_far"
WINDOW_RECALL = "control/recall/window"


def tokens(lm: LM, trace: Trace, n: int, seed: int) -> dict[str, Tensor]:
    """`n` tokens of each content but the sentence, int64 `[n]`."""
    vocabulary = hookable.text_config(lm.model).vocab_size
    drawn = torch.randint(vocabulary, (n,), generator=torch.Generator().manual_seed(seed))
    return {"true": response(trace, n), "last": ids_of(trace)[: trace.prompt_length][-n:], "random": drawn}


def queries_at(
    lm: LM, trace: Trace, cache: StoreCache, passes: dict[tuple[str, str], tuple[Tensor, int]]
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Post- and pre-RoPE queries `[layers, heads, n, head_dim]` of tokens that run at given first positions.

    Args:
        passes: by (content, place): ids `[n]` and the first position.
    """
    found, keys = {}, list(passes)
    for first in range(0, len(keys), TOGETHER):
        batch = keys[first : first + TOGETHER]
        ids = torch.stack([passes[key][0] for key in batch])
        starts = torch.tensor([passes[key][1] for key in batch])
        post, pre = pseudo_queries(lm, cache, ids, starts[:, None] + torch.arange(ids.shape[1]))
        found |= {key: (post[place], pre[place]) for place, key in enumerate(batch)}
    return found


def similarity(lm: LM, traces: Sequence[Trace], n: int = 32, seed: int = 0) -> Findings:
    """Compare every content at every place with the true decoding queries, head by head.

    Returns:
        Table with columns document, content, place, layer, head, and three cosines with the true queries:
        - post: after RoPE.
        - centred: before RoPE, less the mean of the prompt's queries on both sides.
        - mean_query: of that mean itself, put at the right position.
        Metrics, with intervals over documents:
        - `control/similarity/random/back`: random tokens at L - n.
        - `control/similarity/position/true`: the same tokens at L less at L - n.
        - `control/similarity/content/right`: the true tokens less random ones at the same place.
        - `control/similarity/position_less_content`: random tokens at L less the true ones at L - n.
        - `control/similarity/mean_query` and `.../random_less_mean_query`.
        - `centred/pre/dc_dp`, for the conditions of table 1.
        - `control/heads/position_over_content`: the share of heads in which random tokens at the right position are
          worth more than the true tokens at L - n.
    """
    rows = []
    for number, trace in enumerate(progress_bars.each(traces, "controls", "doc")):
        length = trace.prompt_length
        contents = tokens(lm, trace, n, seed + number) | {"sentence": nonsense(lm, n)}
        starts: dict[str, int] = dict(zip(PLACES, (length, length - n, 0), strict=True))
        passes = {(content, place): (contents[content], starts[place]) for content, place in CELLS}
        true_post, true_pre = trace.response_queries[:, :, :n], trace.response_pre_queries[:, :, :n]
        mean = mean_query(trace)
        baseline = measures.query_similarity(mean.expand_as(true_pre), true_pre).mean(-1)
        for (content, place), (post, pre) in queries_at(lm, trace, prefilled(trace, lm), passes).items():
            rows.append(
                _by_head(
                    {"document": trace.document, "content": content, "place": place},
                    post=measures.query_similarity(post, true_post).mean(-1),
                    centred=measures.query_similarity(pre - mean, true_pre - mean).mean(-1),
                    mean_query=baseline,
                )
            )
    return from_heads(pd.concat(rows, ignore_index=True))


def mean_query(trace: Trace) -> Tensor:
    """The mean of those prompt queries that the trace holds, before RoPE, `[layers, heads, 1, head_dim]`."""
    assert trace.pre_queries is not None, "a captured trace has them"
    prompt = attention.exact(trace.pre_queries[:, :, : trace.pre_queries.shape[2] - trace.steps])
    return prompt.mean(2, keepdim=True)


def _by_head(about: dict[str, str], **values: Tensor) -> pd.DataFrame:
    """A row for each layer and head of tensors `[layers, heads]`."""
    layers, heads = next(iter(values.values())).shape
    at = {"layer": np.repeat(np.arange(layers), heads), "head": np.tile(np.arange(heads), layers)}
    return pd.DataFrame(at | {name: value.flatten().tolist() for name, value in values.items()}).assign(**about)


def from_heads(table: pd.DataFrame) -> Findings:
    """The metrics of `similarity` from its table."""
    findings = Findings(table)
    wide: Any = table.pivot_table(index="document", columns=["content", "place"], values="post")
    _two_by_two(
        findings, "similarity", wide.loc[:, [key for key in CELLS if key[0] != "sentence" and key[1] != "start"]]
    )
    mean: Any = table.groupby("document")["mean_query"].mean()
    findings.add(MEAN_QUERY, mean)
    findings.add_difference(OVER_MEAN, wide["random", "right"], mean)
    centred: Any = table.pivot_table(index="document", columns=["content", "place"], values="centred")
    for condition, key in {
        "dc_sp": ("sentence", "right"),
        "sc_dp": ("true", "start"),
        "dc_dp": ("sentence", "start"),
    }.items():
        findings.add(CENTRED, centred[key], condition=condition)
    heads: Any = table.pivot_table(index=["document", "layer", "head"], columns=["content", "place"], values="post")
    better = heads["random", "right"] > heads["true", "back"]
    findings.add(SHARE_OF_HEADS, better.groupby("document").mean())
    return findings


def _two_by_two(findings: Findings, measure: str, wide: Any) -> None:
    """Each cell, and what position and content are worth.

    Args:
        wide: a frame by document, with columns (content, place).
    """
    for content, place in wide.columns:
        findings.add(VALUE, wide[content, place], measure=measure, content=content, place=place)
    for content in dict.fromkeys(content for content, _ in wide.columns):
        pair = wide[content, "right"], wide[content, "back"]
        findings.add_difference(POSITION, *pair, measure=measure, content=content)
    for place in dict.fromkeys(place for _, place in wide.columns):
        findings.add_difference(CONTENT, wide["true", place], wide["random", place], measure=measure, place=place)
    findings.add_difference(POSITION_LESS_CONTENT, wide["random", "right"], wide["true", "back"], measure=measure)


def by_head(findings: Findings) -> pd.DataFrame:
    """Map what position and content are worth, by layer and head, as means over documents.

    The columns are layer, head, position and content. position: the same random tokens at L less at L - n. content: the
    true tokens less random ones, both at L - n.
    """
    means = findings.table.pivot_table(index=["layer", "head"], columns=["content", "place"], values="post")
    position = means["random", "right"] - means["random", "back"]
    return pd.DataFrame(
        {"position": position, "content": means["true", "back"] - means["random", "back"]}
    ).reset_index()


def offsets(figure_2b: Findings, controls: Findings, context: str, n: int = 32) -> Findings:
    """Find the offset at which a wrong position costs as much similarity as a wrong content at the right position.

    Args:
        figure_2b: from `position.figure_2b`, which measures an offset of n.
        controls: from `similarity`, on the same documents.
        context: of figure 2b, the one that `controls` has.

    Returns:
        Table with columns document, offset, loss and content. loss is 1 less the cosine of the true tokens. content is
        the loss of random tokens at the right position. Metrics, with intervals over documents:
        - `offset/equal_to_content`, in tokens: the geometric mean of the offsets at which the loss first reaches that
          of content. Where none does, the prompt's length counts.
        - `offset/loss_at_window_less_content`: the difference of the two losses at an offset of n, SnapKV's.
    """
    table = controls.table
    random: Any = table[(table["content"] == "random") & (table["place"] == "right")]
    content = 1 - random.groupby(random["document"].map(without_span))["post"].mean()
    curves: Any = figure_2b.table
    curves = curves[(curves["context"] == context) & (curves["offset"] > 0)]
    losses = curves.assign(loss=1 - curves["similarity"], content=curves["document"].map(content))
    return crossings(losses.filter(["document", "offset", "loss", "content"]), n)


def crossings(table: pd.DataFrame, n: int = 32) -> Findings:
    """The metrics of `offsets` from its table."""
    findings, logs, at_window = Findings(table), [], []
    for _, part in table.groupby("document"):
        curve, content = part.sort_values("offset"), part["content"].iloc[0]
        logs.append(_first_reaching(np.log2(curve["offset"].to_numpy(float)), curve["loss"].to_numpy(), content))
        at_window.append(curve.set_index("offset").at[n, "loss"] - content)
    low, high = interval(logs)
    findings.set(EQUAL_AT, 2 ** float(np.mean(logs)), (2**low, 2**high))
    findings.add(AT_WINDOW, at_window)
    return findings


def _first_reaching(x: np.ndarray, y: np.ndarray, level: float) -> float:
    """Where a curve first reaches a level, between its points along straight lines; its end if it never does."""
    above = np.flatnonzero(y >= level)
    if not len(above):
        return float(x[-1])
    i = above[0]
    return float(x[0] if i == 0 else np.interp(level, y[i - 1 : i + 1], x[i - 1 : i + 1]))


def adjacent(traces: Sequence[Trace], far: int = 16) -> Findings:
    """Section 1's premise: are the decoding queries of neighbouring positions similar, and more so than distant ones?

    Returns:
        Table with columns document, rope ("post", "pre", "centred": before RoPE less the mean), distance, similarity.
        Metrics with intervals over documents: `adjacent/post/1`, `adjacent/post/16` and `adjacent/post/near_less_far`,
        of all pairs of response tokens at that distance; the same for the others.
    """
    # A short response has no tokens so far apart.
    far = min(far, *(trace.steps - 1 for trace in traces))
    rows = []
    for trace in traces:
        kinds = {"post": attention.exact(trace.response_queries), "pre": attention.exact(trace.response_pre_queries)}
        kinds["centred"] = kinds["pre"] - mean_query(trace)
        for rope, queries in kinds.items():
            for distance in (1, far):
                cosine = measures.query_similarity(queries[:, :, distance:], queries[:, :, :-distance])
                about = {"document": trace.document, "rope": rope, "distance": distance}
                rows.append(about | {"similarity": float(cosine.mean())})
    findings = Findings(pd.DataFrame(rows))
    wide: Any = findings.table.pivot(index="document", columns=["rope", "distance"], values="similarity")
    for rope, distance in wide.columns:
        findings.add(ADJACENT, wide[rope, distance], rope=rope, distance=distance)
    for rope in ("post", "pre", "centred"):
        findings.add_difference(NEAR_LESS_FAR, wide[rope, 1], wide[rope, far], rope=rope)
    return findings


def recall(lm: LM, traces: Sequence[Trace], n: int = 32, budget: int = 256, seed: int = 0) -> Findings:
    """Measure which window finds the gold set: the same tokens at L and at L - n, of several contents.

    Returns:
        Table with columns document, content, place, recall. "window" at "back" is SnapKV's own: the prompt's last
        queries as they were. The metrics are those of `similarity` with `recall` instead of `similarity`, by raw scores
        and equations 1 to 3. Another metric is `control/recall/window`.
    """
    rows = []
    for number, trace in enumerate(progress_bars.each(traces, "controls", "doc")):
        contents, length = tokens(lm, trace, n, seed + number), trace.prompt_length
        starts = {"right": length, "back": length - n}
        kinds = ("true", "last", "random")
        passes = {(content, place): (contents[content], starts[place]) for content in kinds for place in starts}
        queries = {key: post for key, (post, _) in queries_at(lm, trace, prefilled(trace, lm), passes).items()}
        for (content, place), post in queries.items():
            scores = torch.stack([_summed(trace, layer, of_layer) for layer, of_layer in enumerate(post)])
            rows.append({"content": content, "place": place, "recall": _share(trace, scores, budget)})
            rows[-1]["document"] = trace.document
        own = trace.prompt.window_scores(n)
        rows.append({"content": "window", "place": "back", "recall": _share(trace, own, budget)})
        rows[-1]["document"] = trace.document
    table = pd.DataFrame(rows)
    findings = Findings(table)
    wide = table.pivot(index="document", columns=["content", "place"], values="recall")
    findings.add(WINDOW_RECALL, wide["window", "back"])
    _two_by_two(findings, "recall", wide.drop(columns=[("window", "back")]))
    return findings


def _summed(trace: Trace, layer: int, queries: Tensor) -> Tensor:
    """Attention of `[heads, n, head_dim]` over the prompt, summed over them and the group: `[kv_heads, length]`."""
    rows = attention.attention_over_prompt(queries, trace.prompt_keys[layer], trace.prompt.softmax(layer)).sum(-2)
    return attention.sum_over_group(rows, trace.kv_heads)


def _share(trace: Trace, scores: Tensor, budget: int) -> float:
    """Share of the gold top `budget` among the best of `scores` `[layers, kv_heads, length]`."""
    k = min(budget, trace.prompt_length)
    best = ranking.top_positions(scores, k)
    return float(reference(trace).share_found(reference(trace).gold_ranks, best, k).mean())
