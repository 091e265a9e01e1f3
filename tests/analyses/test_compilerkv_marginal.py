"""CompilerKV's weights from marginal contributions: the signal in trials, and held-out gains on small traces."""

from __future__ import annotations

import numpy as np
import pytest
from support.claims import unmeasured
from support.compilerkv import HEADS, KV_HEADS, LAYERS, TRACES

from kvlab.analyses.compilerkv import marginal, printed, quality
from kvlab.compile.marginal import ActionEffects, MarginalSettings
from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Document
from kvlab.methods import policy
from kvlab.methods._base.lookup import PUBLISHED_TABLES, DecisionTables

SETTINGS = MarginalSettings(budgets=(64, 128), lengths=(200, 300))


def made(contexts=12, gain=0.0, seed=0):
    """Changes of heads with a gain of one action."""
    heads = np.random.default_rng(seed).normal(0, 0.01, (contexts, 6, 4))
    heads[:, 0, 3] -= gain
    heads[:, :, 2] = 0
    return ActionEffects(heads, [f"c{number}" for number in range(contexts)])


def test_gains_are_seen_and_noise_is_not():
    assert marginal.signal(made(gain=0.05), SETTINGS, 199).metrics["signal/alone_heads/p"] < 0.02
    noise = [marginal.signal(made(seed=seed), SETTINGS, 99).metrics for seed in range(40)]
    assert sum(one["signal/alone_heads/p"] <= 0.1 for one in noise) <= 10


def test_what_cannot_be_asked_has_no_number():
    still = made()
    still.heads[:] = 0
    assert not marginal.signal(still, SETTINGS, 9).metrics
    assert not marginal.signal(made(contexts=1), SETTINGS, 9).metrics


def tables(budget):
    weights = np.random.default_rng(budget).uniform(0.3, 2, (LAYERS, KV_HEADS))
    heads = np.repeat(weights, HEADS // KV_HEADS, 1).tolist()
    return DecisionTables(heads=heads, risk=[[[0.5]]] * LAYERS, documents=["elsewhere@123"])


def test_held_out_gains_are_those_of_replays():
    """Without thresholds, whatever the tables have."""
    learnt = {budget: tables(budget) for budget in (400, 500)}
    found = marginal.held_out(TRACES, learnt)
    for budget, of_budget in learnt.items():
        base = policy("compilerkv", budget=budget)
        lost = [
            [quality.replayed(trace, each).summary["mass_lost"] for trace in TRACES]
            for each in (base, base.using(DecisionTables(heads=of_budget.heads, risk=None)))
        ]
        gain = np.mean(lost[0]) - np.mean(lost[1])
        assert found.metrics[f"alone/gain/heads/{budget}"] == pytest.approx(gain, abs=1e-6)
        assert found.metrics[f"alone/kept/neutral/{budget}"] == pytest.approx(1 - np.mean(lost[0]), abs=1e-6)
    assert found.metrics["alone/changed/400"] == 1 and "over equal ones" in marginal.in_words(found)


def test_texts_that_were_learnt_from_are_refused():
    seen = tables(400).model_copy(update={"documents": ["document 2@55"]})
    with pytest.raises(KvlabError, match="learnt from document 2"):
        marginal.held_out(TRACES, {400: seen})


def test_prompts_take_turns_and_keep_their_lengths(lm):
    texts = [Document("a", "The ferry leaves at seven. " * 90), Document("b", "It returns at nine, empty. " * 200)]
    found = marginal.prompts(lm, [*texts, Document("short", "Too short.")], SETTINGS, 5)
    assert [prompt.name.partition("[")[0] for prompt in found] == ["a", "b", "a", "b", "a"]
    lengths = [lm.encode(prompt.text).shape[-1] for prompt in found]
    assert all(0 <= wanted - length < 20 for wanted, length in zip([200, 300, 300, 200, 200], lengths, strict=True))
    assert all(prompt.text.endswith("in one paragraph.") for prompt in found)
    with pytest.raises(KvlabError, match="no document"):
        marginal.prompts(lm, [Document("short", "Too short.")], SETTINGS, 1)


def test_every_claim_s_metric_is_measured():
    published = printed.published_tables(DecisionTables.load(PUBLISHED_TABLES))
    found = marginal.held_out(TRACES, {128: tables(128)})
    assert not unmeasured("compilerkv_tables", found, published, marginal.signal(made(), SETTINGS, 9))
