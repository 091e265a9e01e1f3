"""Rank correlations of stand-ins with outcomes, across policies and within one, with intervals over documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from kvlab.analyses.findings import Findings
from kvlab.analyses.stand_ins.cells import REPLAYED, RESPONSE
from kvlab.papers.stand_ins import ACROSS, DOCUMENTS

LOSSES = ("mass_lost", "output_error", "likelihood")
"""The stand-ins that are smaller where less is lost."""

PAIRS = {
    "kl": REPLAYED,
    "response": REPLAYED,
    "answer": REPLAYED,
    "right": (*REPLAYED, "likelihood"),
}
"""The stand-ins that each outcome is correlated with."""

WITHIN = "within/{stand_in}/{outcome}"
"""As ACROSS, of each policy over all budgets and prompts together, averaged over policies."""
BY_BUDGET = "across/{stand_in}/{outcome}/{budget:g}"

RESAMPLES = 500

CELL = ["document", "prompt", "budget"]


def signed(table: pd.DataFrame) -> pd.DataFrame:
    """All measures so that more is better, and outcomes relative to the full cache on the same prompt.

    Args:
        table: from `cells.measure`.

    Returns:
        Columns document, kind, prompt, policy, budget, the stand-ins and the outcomes; outcomes are missing where the
        kind of prompt has none.
    """
    worse = table["nll"] - table["nll_full"]
    found = table.filter([*CELL, "kind", "policy", *REPLAYED]).assign(likelihood=worse)
    found[list(LOSSES)] = -found[list(LOSSES)]
    responded = table["kind"] == RESPONSE
    right = table["right"] - table["right_full"]
    of_kind = {"kl": -table["kl"].where(responded), "response": -worse.where(responded)}
    of_kind |= {"answer": -worse.where(~responded), "right": right.where(~responded)}
    return found.assign(**{_column(name): values for name, values in of_kind.items()})


def _column(outcome: str) -> str:
    return f"outcome_{outcome}"


def findings(table: pd.DataFrame, seed: int = 0) -> Findings:
    """Correlate each stand-in with each outcome.

    Args:
        table: from `cells.measure`.
        seed: of the resampled documents.

    Returns:
        Rows of ACROSS and BY_BUDGET, with Student's intervals over documents. DOCUMENTS is how many documents had a
        correlation. WITHIN has the interval of resampled documents, since it is no mean over them.
    """
    found, measures = Findings(table), signed(table)
    for outcome, stand_ins in PAIRS.items():
        part = measures.dropna(subset=[_column(outcome)])
        for stand_in in stand_ins:
            keys = {"stand_in": stand_in, "outcome": outcome}
            cells = of_cells(part, stand_in, _column(outcome))
            by_document = _by_document(cells)
            if by_document.empty:
                continue
            found.add(ACROSS, by_document, **keys)
            found.set(DOCUMENTS, len(by_document), **keys)
            for budget, mine in cells.groupby("budget"):
                found.add(BY_BUDGET, _by_document(mine), **keys, budget=budget)
        varied = [name for name in stand_ins if found.found(ACROSS, stand_in=name, outcome=outcome)]
        for stand_in, (value, interval) in within(part, varied, _column(outcome), seed).items():
            found.set(WITHIN, value, interval, stand_in=stand_in, outcome=outcome)
    return found


def _by_document(cells: pd.Series) -> pd.Series:
    return cast("pd.Series", cells.groupby("document").mean())


def of_cells(measures: pd.DataFrame, stand_in: str, outcome: str) -> pd.Series:
    """Spearman's correlation over the policies of each cell, by document, prompt and budget.

    Cells in which all policies are equal have none, and are left out.
    """
    known = measures.dropna(subset=[stand_in, outcome])
    of_each: dict[Any, float] = {}
    for cell, part in known.groupby(CELL):
        ours, theirs = part[stand_in].to_numpy(), part[outcome].to_numpy()
        if np.ptp(ours) and np.ptp(theirs):
            of_each[cell] = float(cast("Any", stats.spearmanr(ours, theirs)).statistic)
    index = (
        pd.MultiIndex.from_tuples(of_each, names=CELL) if of_each else pd.MultiIndex.from_product([[]] * 3, names=CELL)
    )
    return pd.Series(list(of_each.values()), index=index, dtype=float)


def within(
    measures: pd.DataFrame, stand_ins: Sequence[str], outcome: str, seed: int = 0
) -> Mapping[str, tuple[float, tuple[float, float]]]:
    """Spearman's correlation of each policy over its cells, averaged over policies; the interval resamples documents.

    It is the basic bootstrap's: a resample holds documents twice, which raises correlations, and percentiles would lie
    too high.
    A policy without a value of the stand-in, or whose cells are all equal, is left out of its average.
    """
    columns = [*stand_ins, outcome]
    of_documents: list[NDArray[np.float64]] = [_by_policy(part, columns) for _, part in measures.groupby("document")]
    if not of_documents:
        return {}

    def mean(drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        both = np.concatenate([of_documents[number] for number in drawn], axis=1)
        ranks = stats.rankdata(both, axis=1)
        ranks = ranks - ranks.mean(axis=1, keepdims=True)
        product = (ranks[..., :-1] * ranks[..., -1:]).sum(axis=1)
        norms = np.linalg.norm(ranks, axis=1)
        size = norms[:, :-1] * norms[:, -1:]
        known = np.logical_and(size > 0, ~np.any(np.isnan(both), axis=1)[:, :-1])
        rho = np.divide(product, size, out=np.zeros_like(product), where=known)
        return rho.sum(axis=0) / np.maximum(known.sum(axis=0), 1)

    every = np.arange(len(of_documents))
    values = low = high = mean(every)
    if len(every) > 1:
        options = {"method": "basic", "n_resamples": RESAMPLES, "random_state": np.random.default_rng(seed)}
        low, high = stats.bootstrap((every,), mean, vectorized=False, **options).confidence_interval
    triples = zip(values.tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: (value, (low, high)) for name, (value, low, high) in zip(stand_ins, triples, strict=True)}


def _by_policy(part: pd.DataFrame, columns: Sequence[str]) -> NDArray[np.float64]:
    """`[policies, cells, columns]` of one document."""
    ordered = part.sort_values(["policy", *CELL])
    return ordered.filter(columns).to_numpy(float).reshape(len(set(ordered["policy"])), -1, len(columns))


def in_words(found: Findings) -> str:
    """Describe the measurements as text."""
    table = found.table
    counts = {name: table[name].nunique() for name in ("policy", "budget", "document", "prompt")}
    return (
        f"{counts['policy']} policies, {counts['budget']} budgets, {counts['document']} documents, "
        f"{counts['prompt']} prompts: {len(table)} cells"
    )
