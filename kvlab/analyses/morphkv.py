"""MorphKV, sections 3.2 and 6.1-6.2: how many recent tokens should decide what stays, and how are they fused?

The paper scores responses with benchmarks that need an 8B model; here the same settings are judged by what they do to
attention along a long response: mass lost, recall of each step's own top-k, and error of the attention output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from tqdm.auto import tqdm

from kvlab.analyses import Findings
from kvlab.cache import LayerStore
from kvlab.errors import KvlabError
from kvlab.policies import policy
from kvlab.replay import Replay
from kvlab.trace import Trace, capture

if TYPE_CHECKING:
    from kvlab.corpus import Document
    from kvlab.models import LM

MEASURES = ("mass_lost", "step_recall", "output_error")


def window_ablation(
    traces: Sequence[Trace],
    windows: Sequence[int] = (2, 8, 32, 64, 200),
    capacities: Sequence[int] = (256, 512),
    fusions: Sequence[str] = ("sum", "max"),
) -> Findings:
    """Table 6 and section 6.1 by attention: window size x fusion x capacity (C + R) over a long response.

    Returns:
        Table with columns document, fusion, window, capacity, step, measure, value (means over layers and heads);
        metrics `mass_lost/sum/w32/c512` and likewise `step_recall/...`, `output_error/...`, with intervals over
        documents.
    """
    for trace in traces:
        if trace.queries.shape[2] - trace.steps < min(max(windows), trace.prompt_length):
            raise KvlabError(
                f"a window of {max(windows)} needs as many prompt queries; capture with window={max(windows)}"
            )
    settings = [(f, w, c) for c in capacities for f in fusions for w in windows if w < c]
    frames, findings = [], Findings(pd.DataFrame())
    with tqdm(total=len(settings) * len(traces), desc="window ablation", unit="replay", leave=False) as bar:
        for fusion, window, capacity in settings:
            means = {name: [] for name in MEASURES}
            for trace in traces:
                result = Replay(trace, policy("morphkv", budget=capacity, window=window, fusion=fusion))
                for name in MEASURES:
                    along = getattr(result, name).mean((0, 1))
                    means[name].append(float(along.mean()))
                    step = range(1, trace.steps + 1)
                    one = pd.DataFrame({"step": step, "measure": name, "value": along.tolist()})
                    frames.append(
                        one.assign(document=trace.document, fusion=fusion, window=window, capacity=capacity)
                    )
                bar.update()
            for name in MEASURES:
                findings.add(f"{name}/{fusion}/w{window}/c{capacity}", means[name])
    findings.table = pd.concat(frames, ignore_index=True)
    return findings


def long_response(lm: LM, document: Document, tokens: int, new_tokens: int, window: int, response: str) -> Trace:
    """A trace of a long response to the start of a document.

    Args:
        tokens: length of the prompt.
        window: how many prompt queries to keep.
        response: "document" feeds the document's own continuation, "greedy" what the model generates.

    Raises:
        KvlabError: the document is too short, or another kind of response.
    """
    if response not in ("document", "greedy"):
        raise KvlabError(f"response={response!r} is neither 'document' nor 'greedy'")
    ids = lm.encode(document.text, chat=False)[0]
    if len(ids) < tokens + new_tokens:
        raise KvlabError(f"{document.name} has {len(ids)} tokens, and {tokens} + {new_tokens} are asked for")
    given = ids[tokens : tokens + new_tokens] if response == "document" else None
    trace = capture(lm, ids[:tokens], new_tokens, window, pseudo=(), response=given)
    trace.meta["document"] = document.signature
    return trace


def repetition(trace: Trace, n: int = 8) -> float:
    """Share of the response's n-token sequences that had occurred in it before."""
    response = trace.ids[trace.prompt_length :].tolist()
    sequences = [tuple(response[i : i + n]) for i in range(len(response) - n + 1)]
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def by_setting(findings: Findings) -> pd.DataFrame:
    """The metrics of `window_ablation` as points to draw: measure, fusion, window, capacity, value, low, high."""
    rows = []
    for name, value in findings.metrics.items():
        measure, fusion, window, capacity = name.split("/")
        low, high = findings.intervals[name]
        setting = {"measure": measure, "fusion": fusion, "window": int(window[1:]), "capacity": int(capacity[1:])}
        rows.append(setting | {"value": value, "low": low, "high": high})
    return pd.DataFrame(rows)


def along(findings: Findings, measure: str, fusion: str, capacity: int, over: int = 16) -> pd.DataFrame:
    """One measure along the response, averaged over documents and `over` neighbouring steps: window, step, value."""
    table = findings.table
    chosen = table[(table["measure"] == measure) & (table["fusion"] == fusion) & (table["capacity"] == capacity)]
    bins = (chosen["step"] - 1) // over * over + over / 2
    return chosen.groupby(["window", bins.rename("step")], as_index=False)["value"].mean()


def walk_through() -> Findings:
    """Section 3.2 at T0: the recent tokens *weather* and *The* give *today's* 0.3 each and *me* 0.05 each.

    The paper's C = 2 would keep both old tokens, so C = 1 here, the only step with numbers. The attention is made by
    keys that are unit vectors and queries that are the logarithms of the wanted weights.

    Returns:
        Table with columns token, score, kept; metrics `walkthrough/today_score` (0.6), `walkthrough/me_score` (0.1) and
        `walkthrough/kept_today` (1 if *today's* stays and *me* goes).
    """
    tokens = ["me", "today's", "weather", "The"]
    rows = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.05, 0.3, 0.65, 0], [0.05, 0.3, 0.25, 0.4]])
    queries = rows.clamp_min(1e-30).log()[None, None]
    keys = torch.eye(4)[None, None]
    trace = Trace.from_tensors(queries, keys, keys, prompt_length=3, scaling=1.0)
    one = policy("morphkv", budget=3, window=2)

    result = Replay(trace, one)
    store = LayerStore(trace.prompt_keys, trace.prompt_values)
    one.compress(store, trace.prompt)
    store.append(keys[:, :, 3:], keys[:, :, 3:])
    store.budget = 4  # so that the scores can be read before anything is evicted
    one.step(store, rows[None, None, 3])
    scores = store.column("profile")[0, 0].sum(-1)
    kept = result.stored(0, 1)[0].tolist()
    table = pd.DataFrame({"token": tokens, "score": scores.tolist(), "kept": [p in kept for p in range(4)]})
    today_stays = float(1 in kept and 0 not in kept)
    return Findings(
        table,
        {
            "walkthrough/today_score": float(scores[1]),
            "walkthrough/me_score": float(scores[0]),
            "walkthrough/kept_today": today_stays,
        },
    )
