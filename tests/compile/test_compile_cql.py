"""Conservative Q-learning and the logged behaviour policy: against slow solvers, by hand, and on planted effects."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, special
from support.compiling import settings

from kvlab.compile import Samples, learning
from kvlab.compile.contexts import stratified
from kvlab.compile.cql import Evidence, best, solve
from kvlab.compile.trials import draw
from kvlab.errors import KvlabError

EVEN = np.full(4, 0.25)


def slow(counts, means, behaviour, alpha):
    """One state's Q by a general optimiser, from the objective as the paper states it: sample by sample."""
    actions = np.repeat(np.arange(len(counts)), counts)
    rewards = means[actions]

    def objective(q):
        return np.mean((q[actions] - rewards) ** 2) + alpha * (special.logsumexp(q) - behaviour @ q)

    return optimize.minimize(
        objective,
        np.zeros(len(counts)),
        method="Nelder-Mead",
        options=dict(xatol=1e-9, fatol=1e-14, maxiter=20_000, maxfev=20_000),
    ).x


@pytest.mark.parametrize("alpha", [0.05, 1.0, 7.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_q_is_what_a_general_optimiser_finds(alpha, seed):
    rng = np.random.default_rng(seed)
    counts, means = rng.integers(1, 9, (3, 4)), rng.normal(0, 0.5, (3, 4))
    behaviour = rng.dirichlet(np.full(4, 3.0))
    found = solve(Evidence(counts, means), behaviour, alpha)
    for state in range(3):
        assert found[state] == pytest.approx(slow(counts[state], means[state], behaviour, alpha), abs=2e-5)


def test_an_action_that_was_never_taken_has_a_q_all_the_same():
    counts, means = np.array([[5, 0, 3]]), np.array([[0.2, 0.0, -0.1]])
    behaviour = np.array([0.5, 0.2, 0.3])
    found = solve(Evidence(counts, means), behaviour, 0.4)
    assert found[0] == pytest.approx(slow(counts[0], means[0], behaviour, 0.4), abs=2e-5)


def test_without_penalty_q_is_the_mean_reward():
    evidence = Evidence.of(np.array([0, 0, 0, 2]), np.array([1, 1, 0, 1]), np.array([1.0, 3.0, 5.0, -1.0]), (3, 2))
    found = solve(evidence, np.array([0.5, 0.5]), 0.0)
    assert found[0].tolist() == [5.0, 2.0] and found[2, 1] == -1.0
    assert np.isnan(found[1]).all() and np.isnan(found[2, 0])
    assert best(found, neutral=1).tolist() == [0, 1, 1]


@pytest.mark.parametrize("alpha", [0.1, 1.0, 30.0])
def test_two_even_actions_by_hand(alpha):
    """Means of d and -d, taken alike: Q is q and -q with q - d + alpha (1 / (1 + exp(-2 q)) - 1 / 2) = 0."""
    d = 0.7
    q = optimize.brentq(lambda x: x - d + alpha * (special.expit(2 * x) - 0.5), 0, d, xtol=1e-14)
    found = solve(Evidence(np.array([[6, 6]]), np.array([[d, -d]])), np.array([0.5, 0.5]), alpha)
    assert found[0] == pytest.approx([q, -q], abs=1e-10)


def test_the_penalty_never_moves_a_states_mean_and_shrinks_its_spread():
    rng = np.random.default_rng(5)
    counts, means = rng.integers(1, 20, (50, 4)), rng.normal(0, 1, (50, 4))
    shares = counts / counts.sum(1, keepdims=True)
    spread = np.full(50, np.inf)
    for alpha in (0.0, 0.1, 1.0, 10.0, 1e3):
        q = solve(Evidence(counts, means), EVEN, alpha)
        assert (shares * q).sum(1) == pytest.approx((shares * means).sum(1), abs=1e-9)
        assert (np.ptp(q, 1) < spread).all()
        spread = np.ptp(q, 1)


def test_a_large_penalty_leaves_the_behaviour_policy():
    behaviour = np.array([0.1, 0.6, 0.3])
    q = solve(Evidence(np.array([[4, 9, 2]]), np.array([[1.0, -1.0, 0.5]])), behaviour, 1e7)
    assert q[0] - q[0, 1] == pytest.approx(np.log(behaviour / 0.6), abs=1e-5)
    # What is worth most by its mean is given up for what was done most.
    assert (
        best(q, neutral=2)[0] == 1
        and best(solve(Evidence(np.array([[4, 9, 2]]), np.array([[1.0, -1.0, 0.5]])), behaviour, 0.0), neutral=2)[0]
        == 0
    )


def test_even_logs_keep_the_order_of_the_means_whatever_the_penalty():
    means = np.random.default_rng(2).normal(0, 0.01, (30, 4))
    for alpha in (0.01, 1.0, 100.0):
        q = solve(Evidence(np.full((30, 4), 12), means), EVEN, alpha)
        assert (q.argsort(1) == means.argsort(1)).all()


def test_ties_go_to_the_neutral_action():
    q = np.array([[0.5, 0.5, 0.1], [0.2, 0.3, 0.3], [0.9, 0.3, 0.3]])
    assert best(q, neutral=1).tolist() == [1, 1, 0] and best(q, neutral=2).tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    "alpha, behaviour, said",
    [
        (-1, EVEN, "alpha"),
        (float("nan"), EVEN, "alpha"),
        (1, np.array([0.5, 0.5, 0.5, 0.5]), "propensity"),
        (1, np.array([1.0, 0.0, 0.0, 0.0]), "propensity"),
    ],
)
def test_bad_arguments_are_refused(alpha, behaviour, said):
    with pytest.raises(KvlabError, match=said):
        solve(Evidence(np.ones((1, 4), dtype=int), np.zeros((1, 4))), behaviour, alpha)


# ---------------------------------------------------------------------------------------------------- the behaviour


def test_actions_are_drawn_as_often_as_their_propensity_says():
    actions = draw(np.random.default_rng(0), 24, 50, [0.25] * 4)
    assert actions.shape == (24, 50)
    assert all((actions == action).sum(0).tolist() == [6] * 50 for action in range(4))
    uneven = draw(np.random.default_rng(0), 10, 400, [0.55, 0.3, 0.15])
    counts = np.stack([(uneven == action).sum(0) for action in range(3)])
    assert np.abs(counts - 10 * np.array([[0.55], [0.3], [0.15]])).max() < 1.0 + 1e-9
    # Every single draw has its propensity, not only all of a state's together.
    assert [(uneven[3] == action).mean() for action in range(3)] == pytest.approx([0.55, 0.3, 0.15], abs=0.09)


def test_heads_are_drawn_independently_and_by_the_seed():
    actions = draw(np.random.default_rng(1), 400, 6, [0.5, 0.5])
    correlations = np.corrcoef(actions.T)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 0.2
    assert (actions == draw(np.random.default_rng(1), 400, 6, [0.5, 0.5])).all()
    assert (actions != draw(np.random.default_rng(2), 400, 6, [0.5, 0.5])).any()


def test_contexts_are_taken_evenly_over_occupied_cells():
    cells = np.array([7] * 20 + [3] * 2 + [9] * 6)
    chosen = stratified(cells, 12, seed=0)
    assert chosen == sorted(set(chosen)) and len(chosen) == 12
    assert sorted(np.unique(cells[chosen], return_counts=True)[1].tolist()) == [2, 5, 5]
    assert stratified(cells, 12, seed=0) == chosen != stratified(cells, 12, seed=1)
    assert stratified(cells, 100, seed=0) == list(range(28))


# ---------------------------------------------------------------------------------------------------- credit


def planted(effect, samples=40, contexts=6, seed=0, noise=0.0, retained=None, **more):
    """A log whose NLL change is a context's own plus the `effect` `[states, actions]` of each action taken."""
    rng = np.random.default_rng(seed)
    states, n = effect.shape
    actions = np.concatenate([draw(rng, samples, states, [1 / n] * n) for _ in range(contexts)])
    context = np.repeat(np.arange(contexts), samples)
    change = effect[np.arange(states), actions].sum(1) + rng.normal(0, 3, contexts)[context]
    change += rng.normal(0, noise, len(change))
    about = dict(entropy=np.full(contexts, 4.0), perplexity=np.full(contexts, 5.0)) | more
    retained = np.zeros((len(change), 0), dtype=int) if retained is None else retained[np.arange(states), actions]
    return Samples(actions, change, context, [f"c{i}" for i in range(contexts)], retained=retained, **about)


def test_the_credit_of_a_head_is_the_mean_of_its_samples_less_their_contexts():
    """And a context counts the less, the more its samples vary."""
    found = planted(np.random.default_rng(3).normal(0, 0.1, (6, 4)))
    found.change[found.context == 2] *= 10
    evidence = learning.head_evidence(found, settings())
    variances = [np.var(found.change[found.context == context]) for context in range(6)]
    scale = np.mean([1 / v for v in variances])
    for state in (0, 5):
        for action in range(4):
            rewards, weights = [], []
            for context in range(6):
                there = found.context == context
                mean = found.change[there].mean()
                new = [mean - found.change[i] for i in np.flatnonzero(there) if found.actions[i, state] == action]
                assert len(new) == 10
                rewards, weights = rewards + new, weights + [1 / variances[context] / scale] * 10
            assert evidence.counts[state, action] == pytest.approx(sum(weights))
            assert evidence.means[state, action] == pytest.approx(np.average(rewards, weights=weights), abs=1e-12)
    assert evidence.counts.sum(1) == pytest.approx([240] * 6)


def test_contexts_that_do_not_vary_do_not_decide_alone():
    found = planted(np.random.default_rng(3).normal(0, 0.1, (6, 4)))
    found.change[found.context == 1] = 0.5
    weights = learning.precision(found)
    assert np.isfinite(weights).all() and weights.mean() == pytest.approx(1)
    assert (learning.precision(planted(np.zeros((2, 4)), seed=1)) > 0).all()


def test_planted_weights_are_found():
    wanted = np.random.default_rng(4).integers(0, 4, (10, 3))
    effect = np.full((30, 4), 0.05)
    effect[np.arange(30), wanted.ravel()] = 0.0
    found = learning.weights(planted(effect, samples=64, noise=0.02), settings(), n_layers=10)
    assert (found == np.array([0.25, 0.5, 1.0, 2.0])[wanted]).all()


def test_planted_thresholds_are_found_where_contexts_fell_and_the_rest_is_neutral():
    """Two cells; layer 1 loses by the strictest threshold and layer 0 by none, which leaves it to the penalty."""
    one = settings(budget=10, penalty=0.1)
    effect = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.2]])
    retained = np.array([[40, 15, 9], [40, 25, 10]])
    entropy, perplexity = np.array([3.95] * 3 + [4.35] * 3), np.array([2.0] * 3 + [90.0] * 3)
    found = planted(effect, samples=60, retained=retained, entropy=entropy, perplexity=perplexity)
    table = learning.thresholds(found, one)
    assert table.shape == (2, 6, 3)
    assert table[0, 0, 0] == table[0, 5, 2] == 0.4 and table[1, 0, 0] == table[1, 5, 2] == 0.2
    assert learning.visits(found, one).nonzero()[0].tolist() == [0, 5] and table.sum() == pytest.approx(1.2)
    evidence = learning.risk_evidence(found, one)
    # Candidates lie 30, 15 and 0 entries off a budget of 10, and the context's mean holds a third of the loss.
    assert evidence.means[18] == pytest.approx([0.2 / 3 - 0.3, 0.2 / 3 - 0.15, 0.2 / 3 - 0.2], abs=1e-9)


def test_only_the_thresholds_are_penalised():
    effect = np.zeros((4, 4))
    assert learning.head_evidence(planted(effect), settings(penalty=5.0)).means == pytest.approx(np.zeros((4, 4)))
