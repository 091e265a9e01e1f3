"""Every notebook on a model of another shape than the default's, with small parameters: nothing rests on 30 layers of 3
KV heads. The weights are random, so that the numbers say nothing; but that each claim's numbers are there does.
"""

from __future__ import annotations

import warnings

import pytest
from support.notebook_runs import executed

from kvlab import papers
from kvlab.inputs import models
from kvlab.workbench import experiments
from kvlab.workbench.experiments import notebooks

TWO = ["sotu/1962", "sotu/1975"]
SMALL = {"tokens": 400, "new_tokens": 16, "documents": TWO}
OWN = {
    "all_together": {"budgets": [64, 128], "needle_lengths": [320], "needle_depths": [0.5]},
    "compilerkv_budgets": {"budgets": [64, 256]},
    "compilerkv_tables": {"prompt_tokens": 300, "prompts": 2},
    "dapq_position_vs_content": {"trials": 1, "shorter": 200, "longest": 600},
    "dapq_pseudo_queries": {"new_tokens": 32, "draws": 1},
    "dapq_window_recall": {"new_tokens": 32},
    "evict_or_quantise": {"budgets": [0.2, 0.6], "policies": ["snapkv", "h2o"], "whole": ["kivi-4", "fp8"]},
    "morphkv_long_responses": {"tokens": 800},
    "morphkv_window_ablation": {"tokens": 560},
    "rocketkv_budgets": {"tokens": 1700},
    "rocketkv_design": {"tokens": 2000},
    "shared_context": {"length": 300, "turns": 2, "trials": 1, "kinds": ["kv"], "budgets": [64]},
    "speed_and_memory": {"lengths": [200, 400], "first_token_lengths": [200], "batches": [1, 2], "repeats": 2},
    "what_predicts_the_answer": {"tokens": 200, "length": 300, "new_tokens": 6, "budgets": [40, 64], "documents": TWO},
    "tasks_at_small_budgets": {"documents": TWO[:1], "articles": ["squad/Oxygen"], "length": 640},
    "why_it_fails": {"tokens": 200, "new_tokens": 6},
}
NO_SCORE = ("retained/",)
"""Shares of a score that random weights do not reach."""


@pytest.fixture(scope="module")
def other(tiny):
    """Qwen2.5-0.5B's groups of seven heads, on few layers."""
    shape = dict(num_hidden_layers=3, num_attention_heads=14, num_key_value_heads=2, head_dim=8, hidden_size=112)
    return tiny("tiny-qwen2", tokenizer=models.DEFAULT, max_position_embeddings=8192, **shape)


@pytest.mark.parametrize("name", experiments.names())
def test_a_notebook_measures_its_claims_on_any_shape(name, other, headless, monkeypatch):
    path = experiments.load(name).path
    given = {key: value for key, value in (SMALL | OWN.get(name, {})).items() if key in notebooks.parameters_of(path)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run = executed(path, other, monkeypatch, **given)
    assert run.state == "FINISHED"
    lacking = {
        claim.id: sorted(missing)
        for claim in papers.claims(experiment=name)
        if claim.profile == "quick"
        if (missing := {metric for metric in claim.metrics - run.metrics.keys() if not metric.startswith(NO_SCORE)})
    }
    assert lacking == {}
    assert run.tags.get("tables") in (None, "None")


def test_tables_of_a_model_with_one_kv_head_finish_without_a_question_about_heads(tiny, headless, monkeypatch):
    """Weights only order the heads of a layer among themselves: where there is one, no weight moves anything."""
    shape = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=16, hidden_size=64)
    one = tiny("tiny-qwen2", tokenizer=models.DEFAULT, max_position_embeddings=8192, **shape)
    path = experiments.load("compilerkv_tables").path
    run = executed(path, one, monkeypatch, documents=TWO, **OWN["compilerkv_tables"])
    assert run.state == "FINISHED"
    assert run.metrics["alone/changed/128"] == 0
    assert not [name for name in run.metrics if name.startswith("signal/alone_heads")]
