"""CompilerKV, sections 3.2, 4.3 and 4.4: the penalty of the learning, and whether two halves of a log agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from kvlab.analyses.findings import Findings
from kvlab.compile import Samples, Settings, learning
from kvlab.compile.cql import Evidence

ALPHAS = (0, 0.01, 0.1, 1, 10, 100)
NEUTRAL, SPREAD = "alpha/{log}/neutral/{alpha:g}", "alpha/{log}/spread/{alpha:g}"
SPLIT_HALF = "{table}/split_half"


def _evidence(table: str, samples: Samples, settings: Settings) -> Evidence:
    return (learning.head_evidence if table == "heads" else learning.risk_evidence)(samples, settings)


def alpha_effect(
    logs: Mapping[str, tuple[Mapping[str, Samples], Settings]], alphas: Sequence[float] = ALPHAS
) -> Findings:
    """What the conservative penalty does (eq. 4), log by log.

    Args:
        logs: by its name, a log's samples of each table ("heads", "risk"), and the settings that it was made with.

    Returns:
        Table: log, table, alpha, spread (mean over states of the largest less the smallest Q, in nats), changed (share
        of states whose best action is another than with alpha = 0), neutral (share of states that take the neutral
        action). Metrics `alpha/LOG/neutral/ALPHA` and `alpha/LOG/spread/ALPHA`, both averaged over the two tables.
    """
    rows = [
        {"log": log, **row}
        for log, (samples, settings) in logs.items()
        for table, of_table in samples.items()
        for row in _by_alpha(table, of_table, settings, alphas)
    ]
    findings = Findings(pd.DataFrame(rows))
    for log in logs:
        means = findings.table.query("log == @log").pivot_table(index="alpha", values=["neutral", "spread"])
        for alpha, mean in means.to_dict("index").items():
            findings.set(NEUTRAL, mean["neutral"], log=log, alpha=alpha)
            findings.set(SPREAD, mean["spread"], log=log, alpha=alpha)
    return findings


def _by_alpha(table: str, samples: Samples, settings: Settings, alphas: Sequence[float]) -> list[dict]:
    """The rows of `alpha_effect` of one table."""
    evidence = _evidence(table, samples, settings)
    behaviour, rest = np.array(settings.propensities(table)), settings.at_rest(table)
    known = evidence.counts.sum(1) > 0
    first = learning.best(learning.solve(evidence, behaviour, 0.0), rest)[known]
    rows = []
    for alpha in alphas:
        q = learning.solve(evidence, behaviour, alpha)
        chosen = learning.best(q, rest)[known]
        spread = np.nanmax(q[known], 1) - np.nanmin(q[known], 1)
        rows.append(
            {
                "table": table,
                "alpha": alpha,
                "spread": spread.mean(),
                "changed": (chosen != first).mean(),
                "neutral": (chosen == rest).mean(),
            }
        )
    return rows


def reliability(samples: Mapping[str, Samples], settings: Settings, splits: int = 20, seed: int = 0) -> Findings:
    """Do two halves of the contexts teach the same? Correlation of their mean NLL changes, action by action.

    The penalty of the budget is left out: it is known exactly, so both halves share it.

    Returns:
        Table with a row for each state that both halves visited: table, state, together (product of the two halves'
        deviations from the state's mean, averaged over actions and random splits), alone (mean of their squares).
        Metrics `heads/split_half` and `risk/split_half`, correlations, with intervals over states; none of a table
        whose actions changed nothing, or of which both halves visited fewer than two states.
    """
    rng = np.random.default_rng(seed)
    free = settings.replace(penalty=0.0)
    frames = {}
    for table, of_table in samples.items():
        products = np.array([_split(table, of_table, free, rng) for _ in range(splits)])
        seen = np.flatnonzero((~np.isnan(products)).any((0, 2)))
        product, square = np.nanmean(products[:, seen], 0).T
        frames[table] = pd.DataFrame({"table": table, "state": seen, "together": product, "alone": square})
    findings = Findings(pd.concat(frames.values(), ignore_index=True))
    for table, frame in frames.items():
        if (frame["alone"] > 0).sum() < 2:
            continue
        pair = frame["together"].to_numpy(), frame["alone"].to_numpy()
        spread = stats.bootstrap(
            pair, _ratio, paired=True, n_resamples=2000, method="percentile", rng=np.random.default_rng(seed)
        )
        low, high = (float(end) for end in spread.confidence_interval)
        # Few states can be drawn so that none of them has an effect.
        ends = (low, high) if math.isfinite(low) and math.isfinite(high) else None
        findings.set(SPLIT_HALF, float(_ratio(*pair)), ends, table=table)
    return findings


def _split(table: str, samples: Samples, settings: Settings, rng: np.random.Generator) -> np.ndarray:
    """For each state the halves' product and the mean of their squares, `[states, 2]`; NaN where a half lacks it."""
    contexts = len(samples.names)
    half = np.isin(samples.context, rng.permutation(contexts)[: contexts // 2])
    left, right = (_evidence(table, _part(samples, chosen), settings) for chosen in (half, ~half))
    both = (np.minimum(left.counts, right.counts) > 0).all(1, keepdims=True)
    x, y = ((side.means - side.means.mean(1, keepdims=True)) for side in (left, right))
    return np.where(both, np.stack([(x * y).mean(1), ((x**2 + y**2) / 2).mean(1)], 1), np.nan)


def _ratio(product: np.ndarray, square: np.ndarray, axis: int = -1) -> np.ndarray:
    return product.sum(axis) / square.sum(axis)


def _part(samples: Samples, chosen: np.ndarray) -> Samples:
    retained = samples.retained[chosen] if len(samples.retained) else samples.retained
    return Samples(
        samples.actions[chosen],
        samples.change[chosen],
        samples.context[chosen],
        samples.names,
        samples.entropy,
        samples.perplexity,
        retained,
    )
