"""CompilerKV, figures A2 and A3: the content of learnt tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from kvlab.analyses.findings import Findings
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import DecisionTables

MIDDLE = (12 / 31, 20 / 31)
"""Relative depths of the layers that appendix B.3 calls middle: L12 to L20 of 32."""

MIDDLE_LESS_REST = "heads/middle_less_rest"
CHANGED = "heads/changed"
VISITED = "risk/visited"
MEAN_THRESHOLD = "risk/mean_threshold"
ENTROPY_SLOPE = "risk/entropy_slope"
HIGH_LESS_LOW = "risk/high_less_low_perplexity"


def visits(tables: DecisionTables) -> np.ndarray:
    """How many contexts fell into each cell of the risk table while it was learnt, `[entropy, perplexity]`.

    Raises:
        KvlabError: the tables do not say.
    """
    further = tables.model_extra or {}
    if "visited" not in further:
        raise KvlabError("these tables do not say which cells were visited: learn them with kvlab compile")
    return np.array(further["visited"])


def relative_weights(tables: DecisionTables) -> pd.DataFrame:
    """The head table, each weight over the largest of its layer: layers down, query heads across.

    Tokens are ranked within a layer, so a common factor on all of its heads changes nothing (eq. 10, 16).
    """
    weights = np.array(tables.heads)
    return pd.DataFrame(weights / weights.max(1, keepdims=True)).rename_axis(index="layer", columns="head")


def mean_thresholds(tables: DecisionTables) -> pd.DataFrame:
    """The risk table averaged over layers: entropy bins down, perplexity bins across, by the middle of each bin.

    NaN for cells without any context while the table was learnt.
    """
    grid = np.where(visits(tables) > 0, np.array(tables.risk).mean(0), np.nan)
    rows, columns = middles(tables)
    return pd.DataFrame(grid, pd.Index(rows.round(2), name="entropy"), pd.Index(columns.round(1), name="perplexity"))


def threshold_curves(tables: DecisionTables) -> pd.DataFrame:
    """`mean_thresholds` of visited cells as points to draw: entropy, perplexity, threshold."""
    grid = mean_thresholds(tables).dropna(how="all").dropna(axis=1, how="all")
    return grid.reset_index().melt("entropy", value_name="threshold").dropna()


def middles(tables: DecisionTables) -> tuple[np.ndarray, np.ndarray]:
    """The middle of each bin of entropy, and of perplexity (in its logarithm)."""
    _, entropies, perplexities = np.array(tables.risk).shape
    least, most = tables.perplexity
    logs = None if tables.perplexity_edges is None else np.log(tables.perplexity_edges)
    rows = _middles(*tables.entropy, entropies, tables.entropy_edges)
    return rows, np.exp(_middles(np.log(least), np.log(most), perplexities, logs))


def _middles(low: float, high: float, n: int, edges: Sequence[float] | np.ndarray | None) -> np.ndarray:
    ends = np.linspace(low, high, n + 1) if edges is None else np.array([low, *edges, high])
    return (ends[:-1] + ends[1:]) / 2


def structure(tables: DecisionTables) -> Findings:
    """Figures A2 and A3 in numbers.

    Returns:
        Table with a row for each layer: layer, depth, weight (mean relative weight of its heads), entropy_slope (of its
        thresholds over visited entropy bins, per nat, averaged over perplexity bins), high_less_low_perplexity (its
        threshold in the highest visited perplexity bin less the lowest, averaged over entropy bins). Metrics with
        intervals over layers: `heads/middle_less_rest`, `risk/entropy_slope`, `risk/high_less_low_perplexity`; and
        `heads/changed` (share of heads whose weight is not 1), `risk/visited` (share of cells), `risk/mean_threshold`.
    """
    depth = np.linspace(0, 1, tables.n_layers)
    weight = relative_weights(tables).to_numpy().mean(1)
    middle = (depth >= MIDDLE[0]) & (depth <= MIDDLE[1])
    risk, seen = np.array(tables.risk), visits(tables) > 0
    slopes, steps = _trends(risk, seen, middles(tables)[0])
    findings = Findings(pd.DataFrame({"layer": range(tables.n_layers), "depth": depth, "weight": weight}))
    if middle.sum() > 1:
        both = stats.bootstrap(
            (weight[middle], weight[~middle]),
            _difference,
            n_resamples=2000,
            method="percentile",
            rng=np.random.default_rng(0),
        )
        low, high = both.confidence_interval
        difference = float(_difference(weight[middle], weight[~middle]))
        findings.set(MIDDLE_LESS_REST, difference, (float(low), float(high)))
    findings.set(CHANGED, (np.array(tables.heads) != 1).mean())
    findings.set(VISITED, seen.mean())
    findings.set(MEAN_THRESHOLD, risk[:, seen].mean())
    trends = {"entropy_slope": (ENTROPY_SLOPE, slopes), "high_less_low_perplexity": (HIGH_LESS_LOW, steps)}
    for column, (effect, values) in trends.items():
        if values is not None:
            findings.table[column] = values
            findings.add(effect, values)
    return findings


def _difference(left: np.ndarray, right: np.ndarray, axis: int = -1) -> np.ndarray:
    return left.mean(axis) - right.mean(axis)


def _trends(risk: np.ndarray, seen: np.ndarray, entropies: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """For each layer the slope over entropy, and highest less lowest perplexity; None with fewer than two bins."""
    columns = [column for column in range(seen.shape[1]) if seen[:, column].sum() > 1]
    slopes = [np.polyfit(entropies[seen[:, c]], risk[:, seen[:, c], c].T, 1)[0] for c in columns]
    rows = [row for row in range(seen.shape[0]) if seen[row].sum() > 1]
    steps = [risk[:, row, seen[row].nonzero()[0][-1]] - risk[:, row, seen[row].nonzero()[0][0]] for row in rows]
    return (np.mean(slopes, 0) if slopes else None), (np.mean(steps, 0) if steps else None)
