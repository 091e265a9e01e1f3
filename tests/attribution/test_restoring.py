"""The curve of restoring on real models: few entries by effect regain most of what a policy costs."""

from __future__ import annotations

import pytest

import kvlab
from kvlab.inputs import models

SETTINGS = [
    pytest.param("smollm2-135m", 64, 800, id="smollm2-135m"),
    pytest.param("qwen2.5-coder-0.5b", 128, 1500, id="qwen2.5-coder-0.5b", marks=pytest.mark.models),
]


@pytest.mark.parametrize(("name", "budget", "tokens"), SETTINGS)
def test_fifty_entries_by_effect_regain_more_than_by_attention_and_two_hundred_most_of_it(name, budget, tokens):
    models.pull(name)
    lm = models.load(name, device="cpu")
    text = kvlab.document("sotu/1962").window(lm, tokens)
    why = kvlab.attribute(lm, kvlab.policy("snapkv", budget=budget), text, new_tokens=32)
    assert abs(why.summary["unexplained"]) <= 0.05 * why.summary["difference"]
    regained = why.restore((50, 200), ("effect", "attention")).set_index(["order", "entries"])
    assert regained.regained["effect", 50] > regained.regained["attention", 50]
    assert regained.share["effect", 200] >= 0.8
