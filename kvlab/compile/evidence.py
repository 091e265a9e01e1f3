"""From what actions do alone to tables: an action other than the neutral one only where its gain is clear."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from kvlab.compile.marginal import ActionEffects, MarginalSettings, Measured
from kvlab.core.geometry import geometry
from kvlab.errors import KvlabError
from kvlab.methods._base.lookup import DecisionTables

if TYPE_CHECKING:
    from numpy.typing import NDArray


def chosen(gains: NDArray[np.floating], rest: int, level: float) -> NDArray[np.integer]:
    """The best action of each state among those whose gain over the neutral one is clear, else that: int `[states]`.

    Args:
        gains: `[contexts, states, actions]`, the reward less that of the neutral action `rest`.
        level: false discovery rate over all states and actions (one-sided t-tests over contexts; Benjamini and
            Hochberg 1995).
    """
    mean, others = gains.mean(0), [action for action in range(gains.shape[2]) if action != rest]
    if len(gains) < 2 or not others:
        return np.full(gains.shape[1], rest)
    clear = np.zeros(mean.shape, dtype=bool)
    p = p_of_gains(gains[:, :, others])
    clear[:, others] = stats.false_discovery_control(p.ravel()).reshape(p.shape) < level
    best = np.where(clear, mean, -np.inf)
    best[:, rest] = 0.0
    return best.argmax(1)


def p_of_gains(gains: NDArray[np.floating]) -> NDArray[np.floating]:
    """One-sided p of each gain `[contexts, ...]` being above 0, `[...]`; 1 where nothing ever changed."""
    mean, spread = gains.mean(0), gains.std(0, ddof=1) / np.sqrt(len(gains))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(spread > 0, mean / spread, np.where(mean == 0, -np.inf, np.sign(mean) * np.inf))
    return stats.t.sf(t, len(gains) - 1)


def head_weights(found: ActionEffects, settings: MarginalSettings, layers: int) -> NDArray[np.floating]:
    """The weight of each KV head, `[layers, kv_heads]`."""
    best = chosen(-found.heads, settings.at_rest("heads"), settings.level)
    return np.array(settings.weights)[best].reshape(layers, -1)


def edges(values: NDArray[np.floating], bins: int) -> list[float]:
    """Where values are cut into `bins` parts of equally many."""
    return [float(cut) for cut in np.quantile(values, np.arange(1, bins) / bins)]


def cells_of(found: ActionEffects, settings: MarginalSettings) -> tuple[NDArray[np.integer], list[float], list[float]]:
    """The cell of risk of each context, entropy bin x perplexity bins + perplexity bin, and the edges of both."""
    of_entropy, of_perplexity = edges(found.entropy, settings.bins[0]), edges(found.perplexity, settings.bins[1])
    rows, columns = np.searchsorted(of_entropy, found.entropy), np.searchsorted(of_perplexity, found.perplexity)
    return rows * settings.bins[1] + columns, of_entropy, of_perplexity


def threshold_gains(found: ActionEffects, budget: int, penalty: float, rest: int) -> NDArray[np.floating]:
    """Reward of each threshold less that of the neutral one, `[contexts, layers, thresholds]` (eq. 2 and 14).

    A threshold only turns tokens away, so that it never gains attention: without a penalty none has a gain.
    """
    rewards = -found.risk - penalty * np.abs(found.retained - budget) / budget
    return rewards - rewards[:, :, rest : rest + 1]


def risk_table(
    found: ActionEffects, settings: MarginalSettings, budget: int
) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
    """The thresholds `[layers, entropy bins, perplexity bins]`, and how many contexts fell into each cell.

    A cell with fewer contexts than `support` takes the thresholds of the nearest one that has them, in bins.
    """
    cell, _, _ = cells_of(found, settings)
    rest, (rows, columns) = settings.at_rest("risk"), settings.bins
    gains = threshold_gains(found, budget, settings.penalty, rest)
    counts = np.bincount(cell, minlength=rows * columns)
    known = np.flatnonzero(counts >= settings.support)
    if not len(known):
        raise KvlabError(
            f"no cell of risk has {settings.support} contexts; learn from more prompts, or with fewer bins"
        )
    cells = np.stack(np.divmod(np.arange(rows * columns), columns), 1)
    table = np.zeros((found.risk.shape[1], rows * columns))
    for where in known:
        best = chosen(gains[cell == where], rest, settings.level)
        table[:, where] = np.array(settings.thresholds)[best]
    for where in np.setdiff1d(np.arange(rows * columns), known):
        nearest = known[np.abs(cells[known] - cells[where]).sum(1).argmin()]
        table[:, where] = table[:, nearest]
    return table.reshape(-1, rows, columns), counts.reshape(rows, columns)


def tables(measured: Measured, budget: int) -> DecisionTables:
    """Both tables for one budget."""
    from kvlab import __version__

    lm, settings, found = measured.lm, measured.settings, measured.effects(budget)
    layers, shape = found.risk.shape[1], geometry(lm.model.config)
    weights = head_weights(found, settings, layers)
    risk, counts = risk_table(found, settings, budget)
    _, of_entropy, of_perplexity = cells_of(found, settings)
    about = {
        "format": "kvlab-compilerkv-1",
        "sha256": lm.sha256,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "kv_heads": shape.kv_heads,
        "kvlab": __version__,
        "learnt": "alone",
        "budget": budget,
        "settings": settings.model_dump(mode="json"),
        "documents": [_source(name) for name in measured.documents],
        "contexts": len(found.names),
        "visited": np.where(counts >= settings.support, counts, 0).tolist(),
    }
    return DecisionTables(
        model=lm.name,
        heads=np.repeat(weights, shape.group, 1).tolist(),
        risk=risk.tolist(),
        entropy=_range(found.entropy),
        perplexity=_range(found.perplexity),
        entropy_edges=of_entropy,
        perplexity_edges=of_perplexity,
        **about,
    )


def _range(values: NDArray[np.floating]) -> tuple[float, float]:
    """From the least to the largest; a little wider where they are one."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if low < high else (low * 0.99, high * 1.01)


def _source(signature: str) -> str:
    """The document of a window, `sotu/1867@sha` of `sotu/1867[0:900]@sha`."""
    name, _, sha = signature.rpartition("@")
    return f"{name.partition('[')[0]}@{sha}"
