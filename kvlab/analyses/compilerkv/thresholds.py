"""CompilerKV, appendix B.1: what a threshold can do, given the spread of a layer's scores."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pandas as pd

from kvlab.analyses.compilerkv.variants import Inspected
from kvlab.analyses.findings import Findings
from kvlab.compile.marginal import Planner
from kvlab.methods.compilerkv import CompilerKV
from kvlab.traces.trace import Trace

CELLS = "risk/cells"


def cells(traces: Sequence[Trace], tables: str | None) -> Findings:
    """Which cells of the risk table prompts fall into: with all of them in one, or in cells that no context visited,
    nothing is learnt of how thresholds adapt to the risk.

    Returns:
        Table: document, entropy, perplexity, cell (entropy bin and perplexity bin), visited (whether a calibration
        context fell into it). Metric `risk/cells`, the number of different visited cells; none without a risk table.
    """
    table, method, rows = CompilerKV(budget=1, tables=tables).tables_in_use, Planner(budget=1), []
    if table.risk is None:
        return Findings(pd.DataFrame())
    visited = (table.model_extra or {}).get("visited")
    for trace in traces:
        entropy, perplexity = (value[:1] for value in method.risk(method.planned(trace.prompt)))
        row, column = (int(at) for at in table.cell(entropy, perplexity))
        rows.append(
            {
                "document": trace.document,
                "entropy": float(entropy),
                "perplexity": float(perplexity),
                "cell": f"{row}, {column}",
                # Tables that do not say what was visited are taken at their word.
                "visited": visited is None or visited[row][column] > 0,
            }
        )
    findings = Findings(pd.DataFrame(rows))
    findings.set(CELLS, len(set(findings.table.query("visited")["cell"])))
    return findings


def admitted(traces: Sequence[Trace], tables: str | None, share: float) -> pd.DataFrame:
    """Appendix B.1: what thresholds can do, given the spread of scores relative to the largest one.

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
    """How many tokens of a prompt pass thresholds of 0.1 and 0.5, and how often the table turns nothing away."""
    tenth, half = (admitted[name].to_numpy().mean() for name in ("at_tenth", "at_half"))
    none = (admitted["threshold"] == 0).to_numpy().mean()
    return (
        f"Tokens that pass a threshold of 0.1: {tenth:.0f} of {prompt_length:,}; of 0.5: {half:.1f}. "
        f"The table turns nothing away in {none:.0%} of the cases."
    )
