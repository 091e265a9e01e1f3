"""The tables that come with kvlab, learnt again from their logs; some of the default model's log is measured again."""

from __future__ import annotations

import numpy as np
import pytest
import yaml
from scipy import optimize, special
from support.paths import ROOT

import kvlab
from kvlab import compile as compiling
from kvlab.compile import learning, trials
from kvlab.compile.contexts import HELD_APART, Context
from kvlab.inputs import corpus
from kvlab.methods._base.lookup import SHIPPED_TABLES, DecisionTables

NAME = "smollm2-135m"
NAMES = sorted(path.stem for path in SHIPPED_TABLES.glob("*.json"))


@pytest.fixture(scope="module")
def name(request):
    """The default model's, unless a test asks for all."""
    return getattr(request, "param", NAME)


every_model = pytest.mark.parametrize("name", NAMES, indirect=True)


@pytest.fixture(scope="module")
def shipped(name):
    return DecisionTables.load(name)


@pytest.fixture(scope="module")
def settings(shipped):
    return compiling.Settings(**shipped.settings)


@pytest.fixture(scope="module")
def log(name):
    return compiling.load(name)


def test_tables_of_this_very_model(lm, shipped):
    assert (shipped.model, shipped.sha256, shipped.n_layers) == (lm.name, lm.sha256, 30)
    assert np.array(shipped.heads).shape == (30, 9) and np.array(shipped.risk).shape == (30, 20, 4)


@every_model
def test_what_comes_along(name, shipped, log):
    assert shipped.samples == {phase: len(samples) for phase, samples in log.items()}
    assert shipped.contexts == len(log["heads"].names) >= 30 and shipped.samples["heads"] >= 1500
    assert shipped.command.startswith(f"kvlab compile --model {name} --budget ")
    documents = {document.rpartition("@")[0] for document in shipped.documents}
    assert not documents & set(HELD_APART)
    assert {context.partition("[")[0] for context in log["heads"].names} <= documents
    assert sum(path.stat().st_size for path in SHIPPED_TABLES.glob(f"{name}*")) < 300_000


@every_model
def test_no_experiment_evaluates_on_what_they_were_learnt_from(shipped):
    """In any profile: tables must be judged on texts that they have not seen."""
    learnt_from = {name.rpartition("@")[0] for name in shipped.documents}
    assert len(learnt_from) > 20

    def texts(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for entry in value.values() if isinstance(value, dict) else value:
                yield from texts(entry)

    folder = ROOT / "experiments"
    read = {
        name: set(texts(yaml.safe_load((folder / f"{name}.yaml").read_text()))) & learnt_from
        for name in (path.stem for path in folder.glob("*.yaml"))
    }
    assert not any(read.values()), {name: found for name, found in read.items() if found}


def test_the_policy_finds_them_by_name(lm):
    one = kvlab.policy("compilerkv", budget=64, tables=NAME)
    with kvlab.compress(lm.model, one) as session:
        ids = lm.encode("The ferry to the outer island leaves at seven. " * 30, chat=False)
        lm.model.generate(ids, max_new_tokens=2, do_sample=False)
    sizes = [session.kept_after_prefill(layer).shape[1] for layer in range(30)]
    assert max(sizes) <= 64 and min(sizes) >= 1


def slow(states, actions, rewards, weights, state, n, behaviour, alpha):
    """Q of one state from its samples by a general optimiser."""
    there = states == state
    taken, got, counted = actions[there], rewards[there], weights[there]

    def objective(q):
        return np.average((q[taken] - got) ** 2, weights=counted) + alpha * (special.logsumexp(q) - behaviour @ q)

    return optimize.minimize(objective, np.full(n, got.mean()), method="BFGS", options=dict(gtol=1e-12)).x


def weighed(found):
    """One over the variance of each context, sample by sample; none is so small that it would be clipped."""
    variances = np.array([found.change[found.context == c].var() for c in range(len(found.names))])
    assert variances.min() > np.median(variances) / 100
    return 1 / variances[found.context]


@every_model
def test_a_sample_of_heads_learnt_again(shipped, settings, log):
    found, layers = log["heads"], shipped.n_layers
    group = len(shipped.heads[0]) * layers // found.actions.shape[1]
    # Context by context, with nothing of kvlab's own but the log.
    rewards = np.concatenate(
        [found.change[found.context == c].mean() - found.change[found.context == c] for c in range(len(found.names))]
    )
    assert (np.diff(found.context) >= 0).all()
    values = learning.head_values(found, settings)
    table = np.array(shipped.heads)[:, ::group].ravel()
    for state in np.random.default_rng(0).choice(len(table), 12, replace=False):
        q = slow(
            np.full(len(rewards), state),
            found.actions[:, state],
            rewards,
            weighed(found),
            state,
            4,
            np.full(4, 0.25),
            settings.alpha,
        )
        assert values[state] == pytest.approx(q, abs=1e-6)
        best = q.argsort()
        if q[best[-1]] - q[best[-2]] > 1e-5:
            assert settings.weights[best[-1]] == table[state]
    assert (learning.weights(found, settings, layers).repeat(group, 1) == np.array(shipped.heads)).all()


@every_model
def test_a_sample_of_thresholds_learnt_again(shipped, settings, log):
    found, actions = log["risk"], len(settings.thresholds)
    entropy = ((found.entropy - 2) / 8 * 20).astype(int).clip(0, 19)
    perplexity = (np.log(found.perplexity) / np.log(100) * 4).astype(int).clip(0, 3)
    cell = (entropy * 4 + perplexity)[found.context]
    mean = np.array([found.change[found.context == c].mean() for c in range(len(found.names))])
    table, rng = np.array(shipped.risk), np.random.default_rng(1)
    reached = np.unique(cell)
    for where in rng.choice(reached, min(4, len(reached)), replace=False):
        for layer in rng.choice(shipped.n_layers, 4, replace=False):
            penalty = settings.penalty * np.abs(found.retained[:, layer] - settings.budget) / settings.budget
            rewards = mean[found.context] - found.change - penalty
            q = slow(
                cell,
                found.actions[:, layer],
                rewards,
                weighed(found),
                where,
                actions,
                np.full(actions, 1 / actions),
                settings.alpha,
            )
            best = q.argsort()
            if q[best[-1]] - q[best[-2]] > 1e-5:
                assert settings.thresholds[best[-1]] == table[layer, where // 4, where % 4]
    visited = np.zeros((20, 4), dtype=int)
    np.add.at(visited, (entropy, perplexity), 1)
    assert visited.tolist() == shipped.visited and (table[:, visited == 0] == 0).all()


def context_of(lm, name, continuation) -> Context:
    place, _, _sha = name.rpartition("@")
    document, _, span = place.rpartition("[")
    start, end = map(int, span[:-1].split(":"))
    ids = lm.encode(corpus.document(document).text, chat=False)[0]
    return Context(name, ids[start:end], ids[end : end + continuation + 1])


@pytest.mark.parametrize("phase", ["heads", "risk"])
def test_logged_samples_measured_again(lm, shipped, settings, log, phase):
    """To within 2 per mille of a nat: other processors add up in another order, and a near-tie may fall otherwise."""
    found = log[phase]
    shortest = min(
        (name for name in found.names if not name.startswith("code/")),
        key=lambda name: len(context_of(lm, name, 0).ids),
    )
    which = found.names.index(shortest)
    rows = np.flatnonzero(found.context == which)[:3]
    with trials.prefilled(lm, context_of(lm, shortest, settings.continuation), settings) as prefilled:
        assert prefilled.entropy == pytest.approx(found.entropy[which], abs=1e-3)
        assert prefilled.perplexity == pytest.approx(found.perplexity[which], rel=1e-3)
        ones = []
        for row in found.actions[rows]:
            if phase == "heads":
                weights = np.array(settings.weights)[row].reshape(30, 3)
                ones.append(trials.with_weights(settings, weights, 3))
            else:
                base = trials.with_weights(settings, np.array(shipped.heads)[:, ::3], 3)
                ones.append(trials.with_thresholds(base, np.array(settings.thresholds)[row]))
        again = prefilled.losses([prefilled.kept(one) for one in ones]) - prefilled.full_loss()
        assert again.tolist() == pytest.approx(found.change[rows].tolist(), abs=2e-3)
        if phase == "risk":
            counts = trials.candidates(base, prefilled, settings.thresholds)
            expected = counts[np.arange(30), found.actions[rows]]
            assert np.abs(expected - found.retained[rows]).max() <= 2
