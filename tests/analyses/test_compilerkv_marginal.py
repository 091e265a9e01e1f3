"""CompilerKV's tables from marginal contributions: signal, penalty and held-out gains on small traces."""

from __future__ import annotations

import numpy as np
import pytest
from support.claims import unmeasured
from support.compilerkv import HEADS, KV_HEADS, LAYERS, TRACES, kept

from kvlab.analyses.compilerkv import marginal, penalty
from kvlab.compile.marginal import ActionEffects, MarginalSettings
from kvlab.errors import KvlabError
from kvlab.inputs.corpus import Document
from kvlab.methods import policy
from kvlab.methods._base.lookup import DecisionTables

SETTINGS = MarginalSettings(budgets=(64, 128), lengths=(200, 300), thresholds=(0.0, 0.3, 0.6), bins=(2, 1), support=2)


def made(contexts=12, gain=0.0, by_risk=0.0, seed=0):
    """Changes of heads with a gain of one action, and costs of thresholds that rise with entropy."""
    rng = np.random.default_rng(seed)
    heads = rng.normal(0, 0.01, (contexts, 6, 4))
    heads[:, 0, 3] -= gain
    heads[:, :, 2] = 0
    entropy = np.linspace(3, 5, contexts)
    risk = np.abs(rng.normal(0.02, 0.005, (contexts, 2, 3))) + by_risk * (entropy > 4)[:, None, None]
    risk[:, :, 0] = 0
    retained = np.broadcast_to([200, 130, 60], risk.shape)
    names = [f"c{number}" for number in range(contexts)]
    return ActionEffects(heads, risk, retained, names, entropy, rng.uniform(5, 20, contexts))


def test_gains_and_risks_are_seen_and_noise_is_not():
    found = marginal.signal(made(gain=0.05, by_risk=0.05), SETTINGS, 199).metrics
    assert found["signal/alone_heads/p"] < 0.02 and found["signal/alone_risk/p"] < 0.02
    noise = [marginal.signal(made(seed=seed), SETTINGS, 99).metrics for seed in range(40)]
    for question in ("heads", "risk"):
        assert sum(one[f"signal/alone_{question}/p"] <= 0.1 for one in noise) <= 10


def test_what_cannot_be_asked_has_no_row():
    few = made(contexts=2)
    assert "signal/alone_risk/p" not in marginal.signal(few, SETTINGS, 9).metrics
    still = made()
    still.heads[:], still.risk[:] = 0, 0
    assert not marginal.signal(still, SETTINGS, 9).metrics


def test_thresholds_follow_the_penalty():
    found = penalty.effect({"alone": penalty.one_at_a_time(made(by_risk=0.05), SETTINGS, 64)}, [0, 0.01, 0.1]).metrics
    assert found["penalty/alone/threshold/0"] == 0 and found["penalty/alone/neutral/0"] == 1
    assert found["penalty/alone/threshold/0.1"] > 0.5 > found["penalty/alone/neutral/0.1"]


def tables(budget):
    rng = np.random.default_rng(budget)
    return DecisionTables(
        heads=np.repeat(rng.uniform(0.3, 2, (LAYERS, KV_HEADS)), HEADS // KV_HEADS, 1).tolist(),
        risk=rng.uniform(0.35, 0.5, (LAYERS, 2, 1)).tolist(),
        entropy_edges=[5.0],
        perplexity_edges=[],
        documents=["elsewhere@123"],
        visited=[[2], [3]],
    )


def test_held_out_gains_are_those_of_replays():
    learnt = {budget: tables(budget) for budget in (400, 500)}
    found = marginal.held_out(TRACES, learnt)
    rows = found.table.query("document == 'document 2'").groupby("method")["kept"].mean()
    assert rows["neutral/400"] == pytest.approx(
        found.table.query("method == 'neutral/400' and document == 'document 2'")["kept"].mean()
    )
    means = found.table.groupby("method")["kept"].mean()
    assert found.metrics["alone/gain/heads/400"] == pytest.approx(means["heads/400"] - means["neutral/400"])
    gate = means["gated/500"] - means["ungated gated/500"]
    assert found.metrics["alone/gain/gate/500"] == pytest.approx(gate)
    static = means["static/500"] - means["ungated static/500"]
    assert found.metrics["alone/gain/risk/500"] == pytest.approx(gate - static)
    stored = found.table.groupby("method")["stored"].mean()
    assert stored["ungated gated/400"] == round(stored["gated/400"]) < 400 == stored["heads/400"]
    weights = DecisionTables(heads=learnt[400].heads, risk=None)
    again = policy("compilerkv", budget=round(stored["gated/400"])).using(weights)
    assert len(kept(TRACES[0], again)[0][0]) == stored["ungated gated/400"]
    assert found.metrics["alone/cells"] in (1, 2)
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
    found = marginal.held_out(TRACES, {128: tables(128)})
    effect = penalty.effect({"alone": penalty.one_at_a_time(made(), SETTINGS, 64)})
    missing = unmeasured("compilerkv_tables", found, effect, marginal.signal(made(), SETTINGS, 9))
    assert not {name for name in missing if "marginal" in name or "penalty" in name}
