"""From samples to tables: credit for each head and each threshold, conservative Q, the best action."""

from __future__ import annotations

import numpy as np

from kvlab.compile.contexts import cells
from kvlab.compile.cql import Evidence, best, solve
from kvlab.compile.log import Samples
from kvlab.compile.settings import Settings


def centred(samples: Samples) -> np.ndarray:
    """Minus the NLL change of each sample, less the mean over its context's samples, `[samples]`.

    All heads are drawn at once and independently, so the worth of one head's action is the mean reward of the samples
    that took it: the actions of other heads average out. The mean of a context says nothing about actions; it is
    subtracted because it varies most.
    """
    sums, counts = (np.bincount(samples.context, weights=w) for w in (samples.change, None))
    return (sums / counts.clip(min=1))[samples.context] - samples.change


def precision(samples: Samples) -> np.ndarray:
    """Weight of each sample: one over the variance of its context's NLL changes, 1 on average, `[samples]`.

    In some contexts every action matters ten times as much as in others. Without weights, a few contexts in which
    compression hurts would outweigh all others. Variances below a hundredth of their median count as that hundredth.
    """
    counts = np.bincount(samples.context).clip(min=1)
    variance = np.bincount(samples.context, centred(samples) ** 2) / counts
    variance = variance.clip(min=np.median(variance[variance > 0]) / 100 if (variance > 0).any() else 1.0)
    weights = (1 / variance)[samples.context]
    return weights / weights.mean()


def head_evidence(samples: Samples, settings: Settings) -> Evidence:
    """Of each (layer, KV head), over all contexts: `[layers x kv_heads, actions]` (section 4.3, lambda = 0)."""
    states = samples.actions.shape[1]
    rewards, weights = (np.repeat(numbers, states) for numbers in (centred(samples), precision(samples)))
    where = np.tile(np.arange(states), len(samples))
    return Evidence.of(where, samples.actions.ravel(), rewards, (states, len(settings.weights)), weights)


def risk_evidence(samples: Samples, settings: Settings) -> Evidence:
    """Of each (layer, cell of risk): `[layers x cells, actions]` (section 4.4).

    A layer's penalty is that of its own candidates (eq. 14), relative to the budget, and is known exactly. Its reward
    leaves out the penalties of other layers, which do not depend on its action.
    """
    n_layers, n_cells = samples.actions.shape[1], settings.bins[0] * settings.bins[1]
    cell = cells(samples.entropy, samples.perplexity, settings)[samples.context]
    deviation = np.abs(samples.retained - settings.budget) / settings.budget
    rewards = centred(samples)[:, None] - settings.penalty * deviation
    where = np.arange(n_layers) * n_cells + cell[:, None]
    shape = (n_layers * n_cells, len(settings.thresholds))
    weights = np.repeat(precision(samples), n_layers)
    return Evidence.of(where.ravel(), samples.actions.ravel(), rewards.ravel(), shape, weights)


def head_values(samples: Samples, settings: Settings) -> np.ndarray:
    """Q of each (layer, KV head) and weight, `[layers x kv_heads, actions]`."""
    return solve(head_evidence(samples, settings), np.array(settings.propensities("heads")), settings.alpha)


def risk_values(samples: Samples, settings: Settings) -> np.ndarray:
    """Q of each (layer, cell) and threshold, `[layers x cells, actions]`; NaN where no context fell."""
    return solve(risk_evidence(samples, settings), np.array(settings.propensities("risk")), settings.alpha)


def weights(samples: Samples, settings: Settings, n_layers: int) -> np.ndarray:
    """The best weight of each KV head, `[layers, kv_heads]` (eq. 9)."""
    chosen = best(head_values(samples, settings), settings.at_rest("heads"))
    return np.array(settings.weights)[chosen].reshape(n_layers, -1)


def thresholds(samples: Samples, settings: Settings) -> np.ndarray:
    """The best threshold of each layer and cell, `[layers, entropy bins, perplexity bins]`."""
    chosen = best(risk_values(samples, settings), settings.at_rest("risk"))
    return np.array(settings.thresholds)[chosen].reshape(-1, *settings.bins)


def visits(samples: Samples, settings: Settings) -> np.ndarray:
    """Contexts that fell into each cell, int `[entropy bins, perplexity bins]`."""
    where = cells(samples.entropy, samples.perplexity, settings)
    return np.bincount(where, minlength=settings.bins[0] * settings.bins[1]).reshape(settings.bins)
