"""CompilerKV, equation 14: what the penalty on the budget does to the thresholds that a log teaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from kvlab.analyses.findings import Findings
from kvlab.compile import Samples, Settings, evidence, learning
from kvlab.compile.marginal import ActionEffects, MarginalSettings

THRESHOLD, NEUTRAL = "penalty/{log}/threshold/{penalty:g}", "penalty/{log}/neutral/{penalty:g}"
PENALTIES = (0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)

ThresholdsAt = Callable[[float], tuple[np.ndarray, np.ndarray]]
"""What a log teaches with a penalty: thresholds `[layers, cells]` of the cells that were visited, and each cell's
entropy `[cells]`."""


def joint(samples: Samples, settings: Settings) -> ThresholdsAt:
    """Of a log of joint actions."""
    seen = learning.visits(samples, settings) > 0

    def thresholds_at(penalty: float) -> tuple[np.ndarray, np.ndarray]:
        table = learning.thresholds(samples, settings.replace(penalty=penalty))
        low, high = settings.entropy
        entropies = low + (np.arange(settings.bins[0]) + 0.5) / settings.bins[0] * (high - low)
        return table[:, seen], np.broadcast_to(entropies[:, None], seen.shape)[seen]

    return thresholds_at


def one_at_a_time(effects: ActionEffects, settings: MarginalSettings, budget: int) -> ThresholdsAt:
    """Of thresholds that were tried one at a time, at one budget."""

    def thresholds_at(penalty: float) -> tuple[np.ndarray, np.ndarray]:
        table, counts = evidence.risk_table(effects, settings.replace(penalty=penalty), budget)
        seen = counts >= settings.support
        cell, _, _ = evidence.cells_of(effects, settings)
        means = [effects.entropy[cell == number].mean() for number in np.flatnonzero(seen)]
        return table[:, seen], np.array(means)

    return thresholds_at


def effect(logs: Mapping[str, ThresholdsAt], penalties: Sequence[float] = PENALTIES) -> Findings:
    """What the penalty does, log by log.

    Returns:
        Table: log, penalty, threshold (mean over layers and visited cells), neutral (share of them that turn nothing
        away), slope (of the threshold over entropy, per nat, mean over layers; NaN with one entropy). Metrics
        `penalty/LOG/threshold/PENALTY` and `penalty/LOG/neutral/PENALTY`.
    """
    rows = []
    for name, thresholds_at in logs.items():
        for penalty in penalties:
            table, entropies = thresholds_at(penalty)
            slope = np.polyfit(entropies, table.T, 1)[0].mean() if len(set(entropies.tolist())) > 1 else np.nan
            rows.append(
                {
                    "log": name,
                    "penalty": penalty,
                    "threshold": table.mean(),
                    "neutral": (table == 0).mean(),
                    "slope": slope,
                }
            )
    findings = Findings(pd.DataFrame(rows))
    for row in rows:
        findings.set(THRESHOLD, row["threshold"], log=row["log"], penalty=row["penalty"])
        findings.set(NEUTRAL, row["neutral"], log=row["log"], penalty=row["penalty"])
    return findings
