"""Conservative Q-learning for single steps: one state, one action, one reward (CompilerKV, eq. 4).

Q of a state minimises

    sum_a p_a (Q_a - m_a)^2  +  alpha (log sum_a exp Q_a - sum_a b_a Q_a)  (+ what does not depend on Q)

where p_a is the (weighted) share of the state's samples that took action a, m_a their mean reward and b_a the behaviour
policy's propensity. The problem is convex; Newton's method solves it for all states at once, the same way every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlab.errors import KvlabError

STEPS = 200
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Evidence:
    """What the log says of each state and action.

    Attributes:
        counts: `[states, actions]`, the number of samples, or the sum of their weights.
        means: `[states, actions]`, their mean reward, by the same weights; 0 where there is none.
    """

    counts: np.ndarray
    means: np.ndarray

    @classmethod
    def of(
        cls,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        shape: tuple[int, int],
        weights: np.ndarray | None = None,
    ) -> Evidence:
        """From samples: state, action, reward and weight (1 unless given) of each, `[n]`; `shape` is
        (states, actions).
        """
        where = np.asarray(states) * shape[1] + np.asarray(actions)
        weights = np.ones(len(where)) if weights is None else weights
        counts = np.bincount(where, weights, minlength=shape[0] * shape[1]).reshape(shape)
        sums = np.bincount(where, weights * rewards, minlength=shape[0] * shape[1]).reshape(shape)
        return cls(counts, np.divide(sums, counts, out=np.zeros(shape), where=counts > 0))


def solve(evidence: Evidence, propensities: np.ndarray, alpha: float) -> np.ndarray:
    """Q `[states, actions]`, float64; NaN for states without samples, and with alpha = 0 for actions without any.

    Args:
        propensities: `[actions]`, the behaviour policy's probability of each action; they add up to 1.
        alpha: weight of the conservative penalty; 0 leaves the mean rewards.

    Raises:
        KvlabError: a negative alpha, or propensities that do not add up to 1.
    """
    if not alpha >= 0 or not np.isfinite(alpha):
        raise KvlabError(f"alpha {alpha} must not be negative: it weighs the penalty on actions that were tried rarely")
    behaviour = np.asarray(propensities, dtype=np.float64)
    if behaviour.min() <= 0 or abs(behaviour.sum() - 1) > 1e-9:
        raise KvlabError("every action needs a propensity above 0, and together they must be 1")
    values = np.full(evidence.counts.shape, np.nan)
    known = evidence.counts.sum(1) > 0
    counts, means = evidence.counts[known].astype(np.float64), evidence.means[known]
    if alpha == 0:
        values[known] = np.where(counts > 0, means, np.nan)
    elif len(counts):
        values[known] = _newton(counts / counts.sum(1, keepdims=True), means, behaviour, alpha)
    return values


def _newton(shares: np.ndarray, means: np.ndarray, behaviour: np.ndarray, alpha: float) -> np.ndarray:
    q = np.repeat((shares * means).sum(1, keepdims=True), means.shape[1], axis=1)
    value = _objective(q, shares, means, behaviour, alpha)
    for _ in range(STEPS):
        chosen = _softmax(q)
        gradient = 2 * shares * (q - means) + alpha * (chosen - behaviour)
        if np.abs(gradient).max() <= TOLERANCE * max(1.0, alpha, np.abs(means).max()):
            break
        curvature = -alpha * chosen[:, :, None] * chosen[:, None, :]
        indices = np.arange(q.shape[1])
        curvature[:, indices, indices] += 2 * shares + alpha * chosen
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        slope = (gradient * step).sum(1)
        length, moved, reached = np.ones(len(q)), q, value
        for _ in range(60):
            moved = q - length[:, None] * step
            reached = _objective(moved, shares, means, behaviour, alpha)
            short = reached > value - 1e-4 * length * slope + 1e-15 * np.abs(value)
            if not short.any():
                break
            length[short] /= 2
        q, value = moved, reached
    return q


def _objective(q: np.ndarray, shares: np.ndarray, means: np.ndarray, behaviour: np.ndarray, alpha: float) -> np.ndarray:
    top = q.max(1)
    total = top + np.log(np.exp(q - top[:, None]).sum(1))
    return (shares * (q - means) ** 2).sum(1) + alpha * (total - q @ behaviour)


def _softmax(q: np.ndarray) -> np.ndarray:
    raised = np.exp(q - q.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def best(q: np.ndarray, neutral: int) -> np.ndarray:
    """The action of largest Q of each state, int `[states]` (eq. 9); `neutral` where it ties or nothing is known."""
    known = ~np.isnan(q).all(1)
    filled = np.where(np.isnan(q), -np.inf, q)
    top = filled.max(1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        tied = filled[:, neutral] >= top - 1e-12
    return np.where(~known | tied, neutral, filled.argmax(1))
