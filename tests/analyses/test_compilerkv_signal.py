"""Whether a log holds a signal: on logs with planted effects, and on logs of noise alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from kvlab.analyses.compilerkv import signal
from kvlab.compile import Samples, Settings, log
from kvlab.compile.trials import draw

SETTINGS = Settings(thresholds=(0.0, 0.2, 0.4), bins=(2, 1), entropy=(3.0, 5.0))


def made(effect, seed, contexts=8, samples=24, noise=0.1, low=None):
    """A log in which actions have the `effect` `[states, actions]`; `low` is another effect, of every other context,
    whose entropy is lower.
    """
    rng = np.random.default_rng(seed)
    states, n = effect.shape
    actions = np.concatenate([draw(rng, samples, states, [1 / n] * n) for _ in range(contexts)])
    context = np.repeat(np.arange(contexts), samples)
    change = np.zeros(len(context))
    for number in range(contexts):
        there = context == number
        own = effect if number % 2 or low is None else low
        change[there] = own[np.arange(states), actions[there]].sum(1) + rng.normal(0, 2)
        change[there] += rng.normal(0, noise * (1 + number), samples)
    entropy = np.array([4.5 if number % 2 else 3.5 for number in range(contexts)])
    names = [f"c{number}" for number in range(contexts)]
    return Samples(actions, change, context, names, entropy, np.full(contexts, 9.0), np.zeros((0, 0), dtype=int))


def p_of(samples, question, phase="risk", seed=0):
    return signal.signal({phase: samples}, SETTINGS, exchanges=199, seed=seed).metrics[f"signal/{question}/p"]


def test_planted_effects_of_heads_are_seen():
    effect = np.random.default_rng(1).normal(0, 0.2, (6, 4))
    found = signal.signal({"heads": made(effect, 1)}, SETTINGS, exchanges=199)
    assert found.metrics["signal/heads/p"] == 1 / 200 and found.metrics["signal/heads/f"] > 3
    row = found.table.iloc[0]
    assert (row["df1"], row["df2"]) == (18, 8 * 24 - 8 - 18)
    assert "p = 0.005" in signal.in_words(found) and set(found.metrics) == {"signal/heads/p", "signal/heads/f"}


def test_noise_alone_is_no_signal_and_p_is_even():
    """Over many logs of noise, in contexts of unequal noise, about one in ten has a p of at most 0.1."""
    found = [p_of(made(np.zeros((6, 4)), seed), "heads", "heads", seed) for seed in range(60)]
    assert 1 <= sum(p <= 0.1 for p in found) <= 14 and stats.kstest(found, "uniform").pvalue > 0.01


def test_the_f_is_that_of_textbooks_where_contexts_are_equally_noisy(monkeypatch):
    samples = made(np.random.default_rng(2).normal(0, 0.1, (3, 4)), 3)
    monkeypatch.setattr(signal.learning, "precision", lambda given: np.ones(len(given)))
    dummies = (samples.actions[:, :, None] == np.arange(1, 4)).reshape(len(samples), -1).astype(float)
    contexts = (samples.context[:, None] == np.arange(8)).astype(float)

    def squares(design):
        return np.linalg.lstsq(design, samples.change, rcond=None)[1][0]

    less, more = squares(contexts), squares(np.hstack([contexts, dummies]))
    expected = ((less - more) / 9) / (more / (len(samples) - 8 - 9))
    assert signal.signal({"heads": samples}, SETTINGS, 9).metrics["signal/heads/f"] == pytest.approx(expected)


def test_a_threshold_s_cost_that_depends_on_the_risk_is_told_from_one_that_does_not():
    steep, flat = np.array([[0.0, 0.2, 0.4]] * 4), np.array([[0.0, 0.02, 0.04]] * 4)
    alike, apart = made(steep, 5, noise=0.02), made(steep, 5, noise=0.02, low=flat)
    assert p_of(alike, "thresholds") == p_of(apart, "thresholds") == 1 / 200
    assert p_of(apart, "risk") < 0.05 < p_of(alike, "risk")


def test_contexts_that_differ_for_other_reasons_are_no_dependence_on_risk():
    """Every context has a slope of its own, whatever its cell: an F from tables would call that a signal."""
    rng, found = np.random.default_rng(7), []
    for seed in range(40):
        samples = made(np.zeros((4, 3)), seed, noise=0.01)
        slopes = rng.normal(0, 0.2, 8)
        samples.change[:] += slopes[samples.context] * samples.actions.sum(1)
        found.append(p_of(samples, "risk", seed=seed))
    assert sum(p <= 0.05 for p in found) <= 6


def test_one_cell_and_too_few_trials_are_not_asked():
    samples = made(np.zeros((4, 3)), 1)
    samples.entropy[:] = 4.5
    assert "signal/risk/p" not in signal.signal({"risk": samples}, SETTINGS, 9).metrics
    few = made(np.zeros((30, 4)), 1, contexts=2, samples=8)
    assert not signal.signal({"heads": few}, SETTINGS, 9).metrics


@pytest.mark.parametrize("rounding", [0.0, 1e-16])
def test_actions_that_cannot_move_anything_are_not_asked(rounding):
    """As weights of heads cannot where every layer has one KV head: its tokens keep their order."""
    samples = made(np.zeros((6, 4)), 1)
    samples.change[:] = 2.5 + rounding * np.random.default_rng(0).normal(size=len(samples))
    assert not signal.signal({"heads": samples, "risk": samples}, SETTINGS, 9).metrics


def test_the_log_beside_tables_is_found(tmp_path):
    samples = made(np.zeros((2, 4)), 3)
    lines = [
        {
            "context": name,
            "entropy": 4.0,
            "perplexity": 9.0,
            "full": 0.0,
            "nll": samples.change[samples.context == number].tolist(),
            "actions": ["".join(map(str, row)) for row in samples.actions[samples.context == number]],
        }
        for number, name in enumerate(samples.names)
    ]
    log.save(tmp_path / "mine-log.parquet", {"heads": lines})
    about = {"heads": [[1.0, 1.0]], "risk": None, "settings": SETTINGS.model_dump(mode="json")}
    (tmp_path / "mine.json").write_text(json.dumps(about))
    found = signal.of_tables(str(tmp_path / "mine.json"), 49)
    assert found.metrics == signal.signal({"heads": samples}, SETTINGS, 49).metrics
    (tmp_path / "mine-log.parquet").unlink()
    assert not signal.of_tables(str(tmp_path / "mine.json")).metrics and not signal.of_tables(None).metrics
