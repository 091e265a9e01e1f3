"""CompilerKV, appendix B.1: what a threshold can do, given how the scores of a layer are spread."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.compilerkv.variants import Inspected
from kvlab.traces.trace import Trace


def admitted(traces: Sequence[Trace], tables: str | None, share: float) -> pd.DataFrame:
    """Appendix B.1: what thresholds can do, given how scores relative to the largest are spread.

    Returns:
        One row for each document and layer: document, layer, needed (the threshold that lets exactly the budget pass),
        threshold (the table's), at_tenth and at_half (tokens that thresholds of 0.1 and 0.5 let pass).
    """
    method, frames = Inspected(budget=share, tables=tables), []
    for trace in traces:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="compilerkv runs with neutral tables")
            planned = method.planned(trace.prompt)
        scores = method.utilities(planned)
        relative = scores / scores.amax(-1, keepdim=True)
        frames.append(
            pd.DataFrame(
                {
                    "document": trace.document,
                    "layer": trace.layers,
                    "needed": relative.topk(method.entries(trace.prompt_length), -1).values[:, -1].tolist(),
                    "threshold": method.thresholds(planned).tolist(),
                    "at_tenth": (relative >= 0.1).sum(-1).tolist(),
                    "at_half": (relative >= 0.5).sum(-1).tolist(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def in_words(admitted: pd.DataFrame, prompt_length: int) -> str:
    """How many tokens of a prompt pass two round thresholds, and how often the table has none."""
    tenth, half = (admitted[name].to_numpy().mean() for name in ("at_tenth", "at_half"))
    none = (admitted["threshold"] == 0).to_numpy().mean()
    return (
        f"Tokens that pass a threshold of 0.1: {tenth:.0f} of {prompt_length:,}; of 0.5: {half:.1f}. "
        f"The table turns nothing away in {none:.0%} of the cases."
    )
