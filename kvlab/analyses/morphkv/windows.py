"""MorphKV, sections 3.2, 6.1 and 6.2: how many recent tokens should decide what stays, and how are their rows fused?

The paper scores responses with benchmarks that need an 8B model. Here the attention along a response judges the same
settings. The measures are mass lost, recall of each step's own top-k, and error of the attention output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from scipy import stats

from kvlab.analyses.findings import Findings
from kvlab.analyses.texts import TOKENS, common_traces, continuation
from kvlab.core.store import LayerStore
from kvlab.errors import KvlabError
from kvlab.inputs import corpus
from kvlab.lib import progress_bars
from kvlab.methods import policy
from kvlab.replays.replay import Replay
from kvlab.replays.run import replay
from kvlab.traces import shared
from kvlab.traces.trace import Trace

if TYPE_CHECKING:
    from kvlab.inputs.models import LM

MEASURES = ("mass_lost", "step_recall", "output_error")

MEAN = "{measure}/{fusion}/w{window}/c{capacity}"
WINDOW_GAIN = "gain/{measure}/{fusion}/c{capacity}/w{old}_to_w{new}"
FUSION_GAIN = "gain/{measure}/w{window}/c{capacity}/max_to_sum"
SHORT_PROMPT_GAIN = "gain/{measure}/w{window}/c{capacity}/short_prompt/max_to_sum"
REGIME_GAIN = "gain/{measure}/{regime}/max_to_sum"
WIDER_GAIN = "gain/{measure}/generating/narrow_to_wide"
TODAY_SCORE = "walkthrough/today_score"
ME_SCORE = "walkthrough/me_score"
KEPT_TODAY = "walkthrough/kept_today"


def gain(measure: str, new: pd.Series, old: pd.Series) -> pd.Series:
    """The gain of `new` over `old`, relative to `old`: 0.1 means a tenth less lost, or a tenth more recalled."""
    return new / old - 1 if measure == "step_recall" else 1 - new / old


def window_ablation(
    traces: Iterable[Trace],
    windows: Sequence[int] = (4, 32, 200),
    capacities: Sequence[int] = (512,),
    fusions: Sequence[str] = ("sum", "max"),
) -> Findings:
    """Measure tables 4-6 by attention: window size x fusion x capacity (C + R) along a response.

    Args:
        traces: one for each document; they are used one after another, so a generator will do.

    Returns:
        Table with columns document, fusion, window, capacity, step, measure, value (mean over layers and heads).
        Metrics, with intervals over documents:
        - `mass_lost/sum/w32/c512` and likewise `step_recall/...`, `output_error/...`.
        - `gain/mass_lost/max/c512/w32_to_w200`: the relative gain of each window over those before it in `windows`.
        - `gain/mass_lost/w32/c512/max_to_sum`: the relative gain of sum over max fusion.
        Where every prompt fits into the capacity, the last gain is in table 5's regime. Then there is also
        `gain/mass_lost/w32/c512/short_prompt/max_to_sum`.
    """
    settings = [(f, w, c) for c in capacities for f in fusions for w in windows if w < c]
    frames, longest = [], 0
    for trace in progress_bars.each(traces, "window ablation", "doc"):
        longest = max(longest, trace.prompt_length)
        known = trace.queries.shape[2] - trace.steps
        if known < min(max(windows), trace.prompt_length):
            raise KvlabError(
                f"a window of {max(windows)} needs as many prompt queries; capture with window={max(windows)}"
            )
        for fusion, window, capacity in settings:
            result = replay(trace, policy("morphkv", budget=capacity, window=window, fusion=fusion))
            setting = {"document": trace.document, "fusion": fusion, "window": window, "capacity": capacity}
            frames += [frame.assign(**setting) for frame in along_steps(result)]
    findings = Findings(pd.concat(frames, ignore_index=True))
    means = _means(findings.table)
    for measure in MEASURES:
        for fusion, window, capacity in settings:
            values = means.loc[measure, fusion, window, capacity]
            findings.add(MEAN, values, measure=measure, fusion=fusion, window=window, capacity=capacity)
        for capacity in capacities:
            fusion_gains = (FUSION_GAIN, SHORT_PROMPT_GAIN) if longest < capacity else (FUSION_GAIN,)
            fitting = [w for w in windows if w < capacity]
            _add_gains(findings, measure, capacity, fusions, fitting, means, fusion_gains)
    return findings


def _means(table: pd.DataFrame) -> pd.Series:
    """Means over steps, by measure, fusion, window, capacity and document."""
    return table.groupby(["measure", "fusion", "window", "capacity", "document"]).value.mean()


def _add_gains(
    findings: Findings,
    measure: str,
    capacity: int,
    fusions: Sequence[str],
    windows: Sequence[int],
    means: pd.Series,
    fusion_gains: Sequence[str],
) -> None:
    for fusion in fusions:
        for old, new in combinations(windows, 2):
            values = gain(measure, means.loc[measure, fusion, new, capacity], means.loc[measure, fusion, old, capacity])
            findings.add(WINDOW_GAIN, values, measure=measure, fusion=fusion, capacity=capacity, old=old, new=new)
    for window in windows if {"sum", "max"} <= set(fusions) else ():
        values = _sum_over_max(means, measure, window, capacity)
        for effect in fusion_gains:
            findings.add(effect, values, measure=measure, window=window, capacity=capacity)


def _sum_over_max(means: pd.Series, measure: str, window: int, capacity: int) -> pd.Series:
    return gain(measure, means.loc[measure, "sum", window, capacity], means.loc[measure, "max", window, capacity])


def fusion_gains(traces: Iterable[Trace], window: int, capacity: int, regime: str) -> Findings:
    """Tables 4 and 5 by attention: what sum fusion gains over max fusion at one window and capacity.

    Returns:
        The table of `window_ablation` with a column regime; metrics `gain/mass_lost/{regime}/max_to_sum` and so on,
        with intervals.
    """
    table = window_ablation(traces, [window], [capacity], ["sum", "max"]).table
    findings, means = Findings(table.assign(regime=regime)), _means(table)
    for measure in MEASURES:
        findings.add(REGIME_GAIN, _sum_over_max(means, measure, window, capacity), measure=measure, regime=regime)
    return findings


def wider_window(traces: Iterable[Trace], windows: Sequence[int], capacity: int) -> Findings:
    """Table 6 in its own regime by attention: a short prompt and a response of several times the capacity, max fusion.

    Args:
        windows: a narrow and a wide one, the paper's 32 and 200 of 4K as shares of the capacity.

    Returns:
        The table of `window_ablation`; metrics `gain/mass_lost/generating/narrow_to_wide` and so on, with intervals.
    """
    narrow, wide = sorted(windows)
    table = window_ablation(traces, [narrow, wide], [capacity], ["max"]).table
    findings, means = Findings(table), _means(table)
    for measure in MEASURES:
        values = [means.loc[measure, "max", window, capacity] for window in (wide, narrow)]
        findings.add(WIDER_GAIN, gain(measure, *values), measure=measure)
    return findings


def two_regimes(
    lm: LM,
    documents: Sequence[str],
    writing: Mapping[str, int],
    answering: Mapping[str, int],
    response: str = "document",
) -> Findings:
    """`fusion_gains` for a short prompt with a long response ("writing") and a long prompt with a short one
    ("answering").

    Args:
        writing, answering: tokens and new_tokens of the traces, window and capacity of the policy.
        response: of `long_response`, when writing; answers are the model's own summaries.
    """
    written = long_responses(lm, documents, writing["tokens"], writing["new_tokens"], response)
    summarised = summaries(lm, documents, answering["tokens"], answering["new_tokens"])
    regimes = [
        fusion_gains(traces, regime["window"], regime["capacity"], name)
        for name, traces, regime in (("writing", written, writing), ("answering", summarised, answering))
    ]
    both = regimes[0] | regimes[1]
    both.table = pd.concat([findings.table for findings in regimes], ignore_index=True)
    return both


def along_steps(result: Replay, measures: Sequence[str] = MEASURES) -> list[pd.DataFrame]:
    """Frames with columns step, measure, value (means over layers and heads), one for each measure."""
    steps = range(1, result.trace.steps + 1)
    return [
        pd.DataFrame({"step": steps, "measure": name, "value": getattr(result, name).mean((0, 1)).tolist()})
        for name in measures
    ]


def slope(part: pd.DataFrame, column: str) -> float:
    """The rise of a column with each step, by the least-squares line."""
    line: Any = stats.linregress(part["step"], part[column])
    return line.slope


def long_response(
    lm: LM, document: str, tokens: int, new_tokens: int, response: str = "document", accumulate: bool = False
) -> Trace:
    """A trace of a long response to the start of a document.

    Args:
        document: its name, as `kvlab.document` takes it.
        tokens: length of the prompt.
        response: "document" feeds the document's own continuation, "greedy" generates.
        accumulate: record the attention summed over the prompt's queries (H2O).

    Raises:
        KvlabError: the document is too short, or the kind of response is unknown.
    """
    if response == "document":
        # The default traces, which other analyses share, are used where they are long enough.
        template_tokens = 64
        (whole,) = common_traces(lm, [document], tokens=max(TOKENS, tokens + new_tokens + template_tokens))
        return continuation(whole, tokens, new_tokens, accumulate)
    if response != "greedy":
        raise KvlabError(f"response={response!r} is neither 'document' nor 'greedy'")
    text = corpus.document(document)
    ids = lm.encode(text.text, chat=False)[0]
    if len(ids) < tokens:
        raise KvlabError(f"{text.name} has {len(ids)} tokens, and a prompt of {tokens} is asked for")
    trace = shared.shared(lm, ids[:tokens], new_tokens, queries="all", accumulate=accumulate, pseudo=())
    trace.meta["document"] = text.signature
    return trace


def long_responses(
    lm: LM,
    documents: Iterable[str],
    tokens: int,
    new_tokens: int,
    response: str = "document",
    accumulate: bool = False,
) -> Iterator[Trace]:
    """`long_response` of each document, made when it is asked for, so that one trace at a time is in memory."""
    for document in corpus.named(documents):
        yield long_response(lm, document, tokens, new_tokens, response, accumulate)


def summaries(lm: LM, documents: Iterable[str], tokens: int, new_tokens: int) -> Iterator[Trace]:
    """`common_traces` of each document, made when it is asked for, so that one trace at a time is in memory."""
    for document in corpus.named(documents):
        yield from common_traces(lm, [document], tokens, new_tokens)


def along(findings: Findings, measure: str, fusion: str, capacity: int, over: int = 16) -> pd.DataFrame:
    """One measure along the response, averaged over documents and `over` neighbouring steps: window, step, value."""
    table = findings.table
    chosen = table.query("measure == @measure and fusion == @fusion and capacity == @capacity")
    bins = (chosen.step - 1) // over * over + over / 2
    return chosen.groupby(["window", bins.rename("step")], as_index=False).value.mean()


def walk_through() -> Findings:
    """Section 3.2 at T0: the recent tokens *weather* and *The* give *today's* 0.3 each and *me* 0.05 each.

    The paper's C = 2 would keep both old tokens, so here C = 1. (T0 is the only step with numbers.) Unit vectors as
    keys and the logarithms of the wanted weights as queries give this attention.

    Returns:
        Table with columns token, score, kept; metrics `walkthrough/today_score` (0.6), `walkthrough/me_score` (0.1) and
        `walkthrough/kept_today` (1 if *today's* stays and *me* goes).
    """
    tokens = ["me", "today's", "weather", "The"]
    rows = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.05, 0.3, 0.65, 0], [0.05, 0.3, 0.25, 0.4]])
    queries = rows.clamp_min(1e-30).log()[None, None]
    keys = torch.eye(4)[None, None]
    trace = Trace.from_tensors(queries, keys, keys, prompt_length=3, scaling=1.0)
    morphkv = policy("morphkv", budget=3, window=2)

    result = replay(trace, morphkv)
    store = LayerStore(trace.prompt_keys, trace.prompt_values)
    morphkv.compress(store, trace.prompt)
    store.append(keys[:, :, 3:], keys[:, :, 3:])
    store.budget = 4  # all four fit, so the scores can be read before anything is evicted
    morphkv.step(store, rows[None, None, 3])
    scores = store.column("profile")[0, 0].sum(-1)
    kept = result.stored(0, 1)[0].tolist()
    table = pd.DataFrame({"token": tokens, "score": scores.tolist(), "kept": [p in kept for p in range(4)]})
    findings = Findings(table)
    findings.set(TODAY_SCORE, float(scores[1]))
    findings.set(ME_SCORE, float(scores[0]))
    findings.set(KEPT_TODAY, 1 in kept and 0 not in kept)
    return findings
