"""Does a log of trials hold any signal? F-tests whose distribution comes from exchanging what chance exchanged.

A table can be learnt from any log. Whether its entries are more than chance is asked before anything is concluded from
them: three questions, each a comparison of two linear models of the reward, with the contexts' means removed and each
context weighted as in the learning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab import compile as compiling
from kvlab.analyses.findings import Findings
from kvlab.compile import Samples, Settings, learning
from kvlab.compile.contexts import cells
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import SHIPPED_TABLES, DecisionTables

P, F = "signal/{question}/p", "signal/{question}/f"
QUESTIONS = {
    "heads": "which head has which weight",
    "thresholds": "which layer has which threshold",
    "risk": "whether a threshold's cost depends on the prompt's risk",
}
"""What is asked of a log, by the name in the metrics; in words: whether this moves the reward at all."""

LEVEL = 0.05
"""Of the claims that rest on learnt tables: with a larger p they are not measured."""


def signal(log: Mapping[str, Samples], settings: Settings, exchanges: int = 999, seed: int = 0) -> Findings:
    """The three questions of a log of joint actions.

    `heads` and `thresholds`: an additive model with an effect for each (state, action), against none. Actions were
    drawn independently of everything, so that under the null a context's rewards may be exchanged among its samples.
    `risk`: the effect of each threshold (of how many layers have it) in each cell of risk, against the same effect in
    all cells; under the null contexts may exchange their cells, so that contexts that differ for any other reason
    are allowed for.

    Args:
        log: samples of the phases "heads" and "risk", or of one of them.
        exchanges: how many random exchanges are drawn.

    Returns:
        Table: question, f, df1, df2, p. Metrics `signal/QUESTION/p`, the share of exchanges (the real one counted)
        with an F as large, and `signal/QUESTION/f`; none of a question that the log cannot be asked: with one cell
        alone, fewer trials than effects, or actions that moved nothing (weights order the heads of a layer among
        themselves: where a layer has one KV head, none does).
    """
    rng, rows = np.random.default_rng(seed), []
    log = {phase: samples for phase, samples in log.items() if _any_effect(samples)}
    for table, question, actions in (("heads", "heads", settings.weights), ("risk", "thresholds", settings.thresholds)):
        if table in log and (row := _states(log[table], len(actions), exchanges, rng)):
            rows.append({"question": question, **row})
    if "risk" in log:
        cell = cells(log["risk"].entropy, log["risk"].perplexity, settings)
        if row := _risk(log["risk"], cell, len(settings.thresholds), exchanges, rng):
            rows.append({"question": "risk", **row})
    return tested(rows, ["question", "f", "df1", "df2", "p"])


def tested(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Findings:
    """Rows of tests as findings, with P and F of each question."""
    findings = Findings(pd.DataFrame(rows, columns=list(columns)))
    for row in rows:
        findings.set(P, row["p"], question=row["question"])
        findings.set(F, row["f"], question=row["question"])
    return findings


def p_value(f: float, exchanged: Iterable[float]) -> float:
    """The share of exchanges, the real one among them, that have an F as large."""
    large = [1, *(other >= f * (1 - 1e-12) for other in exchanged)]
    return sum(large) / len(large)


def of_tables(tables: str | None, exchanges: int = 999, seed: int = 0) -> Findings:
    """`signal` of the log behind tables, where there is one: that of a shipped table, or the file beside a user's own
    (`NAME-log.parquet`). Without a log, or without tables, there are no rows.
    """
    if tables is None:
        return Findings(pd.DataFrame())
    path = Path(tables)
    log_file = tables if (SHIPPED_TABLES / f"{tables}.json").exists() else path.with_name(f"{path.stem}-log.parquet")
    try:
        log = compiling.load(log_file)
    except KvlabError:
        return Findings(pd.DataFrame())
    about = DecisionTables.load(tables).model_extra or {}
    return signal(log, Settings(**about["settings"]), exchanges, seed)


def in_words(signal: Findings) -> str:
    """A line for each question: F, its degrees of freedom, and p."""
    return "\n".join(
        f"{QUESTIONS[row['question']]:60}F({row['df1']}, {row['df2']}) = {row['f']:.2f}, p = {row['p']:.3f}"
        for row in signal.table.to_dict("records")
    )


def _any_effect(samples: Samples) -> bool:
    """Whether rewards differ within contexts, by more than rounding."""
    return bool(np.abs(learning.centred(samples)).max() > 1e-9 * np.abs(samples.change).max())


def _states(samples: Samples, actions: int, exchanges: int, rng: np.random.Generator) -> dict[str, float] | None:
    """An effect of every state's every action, against none."""
    indicators = (samples.actions[:, :, None] == np.arange(1, actions)).reshape(len(samples), -1).astype(float)
    basis, rewards = (
        _orthonormal_basis(_within_contexts(indicators, samples)),
        _within_contexts(learning.centred(samples)[:, None], samples),
    )
    if _residual_df(samples, basis.shape[1]) < 1:
        return None
    order = np.argsort(samples.context, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(samples.context[order]))[:-1])
    permutations = np.tile(np.arange(len(samples))[:, None], (1, exchanges))
    for group in members:
        permutations[group] = rng.permuted(permutations[group], axis=0)
    found = _f_statistic(basis, rewards, samples)
    return _row(*found, _f_statistic(basis, rewards[permutations, 0], samples)[0])


def _risk(
    samples: Samples, cell: np.ndarray, actions: int, exchanges: int, rng: np.random.Generator
) -> dict[str, float] | None:
    """An effect of every threshold in each cell, against one for all cells; `cell` is that of each context."""
    counts = (samples.actions[:, :, None] == np.arange(1, actions)).sum(1).astype(float)
    base = _orthonormal_basis(_within_contexts(counts, samples))
    rewards = _within_contexts(learning.centred(samples)[:, None], samples)
    rewards -= base @ (base.T @ rewards)
    names = np.unique(cell)
    if len(names) < 2 or _residual_df(samples, len(names) * base.shape[1]) < 1:
        return None

    def f_of(of_contexts: np.ndarray) -> tuple[np.ndarray, int, int]:
        there = (of_contexts[samples.context][:, None] == names).astype(float)
        within = _within_contexts((there[:, :, None] * counts[:, None]).reshape(len(samples), -1), samples)
        return _f_statistic(_orthonormal_basis(within - base @ (base.T @ within)), rewards, samples, base.shape[1])

    found = f_of(cell)
    return _row(*found, np.concatenate([f_of(rng.permutation(cell))[0] for _ in range(exchanges)]))


def _within_contexts(columns: np.ndarray, samples: Samples) -> np.ndarray:
    """Columns `[samples, n]` less their context's mean, times the root of the context's weight."""
    counts = np.bincount(samples.context).clip(min=1)[:, None]
    sums = np.zeros((len(counts), columns.shape[1]))
    np.add.at(sums, samples.context, columns)
    return (columns - (sums / counts)[samples.context]) * np.sqrt(learning.precision(samples))[:, None]


def _f_statistic(
    basis: np.ndarray, rewards: np.ndarray, samples: Samples, before: int = 0
) -> tuple[np.ndarray, int, int]:
    """F of what a basis explains of rewards `[samples, n]`, one for each column, and its degrees of freedom; `before`
    of them went to a model that was taken out already.
    """
    explained = ((basis.T @ rewards) ** 2).sum(0)
    first = basis.shape[1]
    second = _residual_df(samples, before + first)
    return explained / first / (((rewards**2).sum(0) - explained) / second), first, second


def _residual_df(samples: Samples, effects: int) -> int:
    """Degrees of freedom that are left once contexts have their means and so many effects are fitted."""
    return len(samples) - len(samples.names) - effects


def _row(found: np.ndarray, first: int, second: int, exchanged: np.ndarray) -> dict[str, float]:
    """An F with its degrees of freedom and its p value."""
    return {"f": float(found[0]), "df1": first, "df2": second, "p": p_value(found[0], exchanged)}


def _orthonormal_basis(columns: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what the columns span, `[samples, rank]`."""
    if not columns.shape[1]:
        return columns
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return left[:, sizes > 1e-9 * max(sizes.max(), 1e-300)]
