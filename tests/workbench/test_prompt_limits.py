"""Parameters that no job could run with are refused before a model is loaded: in a second, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from support.paths import ROOT
from support.projects import EXPERIMENT, experiment
from support.refusals import one_sentence

from kvlab.errors import KvlabError
from kvlab.methods import policy, registry
from kvlab.workbench import experiments
from kvlab.workbench.experiments import budget_limits, content_key, notebooks, prompt_limits
from kvlab.workbench.jobs import launch

WRONG = [
    (["zsmerge_error_curves", "-p", "tokens=100000"], "beyond the 8,192 that smollm2-135m takes"),
    (["zsmerge_error_curves", "-p", "tokens=8100"], "prompts of 8,100 tokens, and the document sotu/1975 has"),
    (["zsmerge_error_curves", "-p", "ratios=0.1,2"], "'ratios' of zsmerge_error_curves must be at most 1, and is 2"),
    (["quickstart", "-p", "budget=1"], "parameter 'budget' of quickstart must be at least 33, and is 1"),
    (
        ["compilerkv_tables", "-p", "prompt_budgets=0"],
        "'prompt_budgets' of compilerkv_tables must be at least 1, and is 0",
    ),
    (
        ["dapq_window_recall", "-p", "budget=128"],
        "must be at least 129 (one more than 128, the largest of 'windows'), and is 128",
    ),
    (["dapq_window_recall", "-p", "budgets=64,8"], "must be at least 33 (one more than 32, the largest of 'window')"),
    (
        ["dapq_position_vs_content", "-p", "contexts=2000,9000"],
        "'contexts' of dapq_position_vs_content: prompts of 9,000 tokens and the 32 that follow are beyond the 8,192",
    ),
    (["all_together", "-p", "needle_lengths=320,0"], "'needle_lengths' of all_together must be at least 1, and is 0"),
    (["quickstart", "-p", "new_tokens=-1"], "'new_tokens' of quickstart must be at least 0, and is -1"),
    (["explore", "-p", "tokens=0"], "'tokens' of explore must be at least 1, and is 0"),
    (
        ["morphkv_window_ablation", "-p", "answering={tokens: 9000, new_tokens: 32, window: 5, capacity: 150}"],
        "'answering.tokens' of morphkv_window_ablation: prompts of 9,000 tokens and the 32 that follow",
    ),
]
# Says how each command has ended, and what was imported until then.
SCRIPT = """import json, sys
from kvlab import cli
for arguments in json.loads(sys.argv[1]):
    try: cli.main(["run", *arguments])
    except SystemExit as left: print(left.code, {'torch', 'transformers', 'mlflow', 'papermill'} & set(sys.modules))"""


def test_what_cannot_run_is_refused_before_anything_is_loaded(lm, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_ROOT", str(ROOT))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    asked = json.dumps([arguments for arguments, _ in WRONG])
    done = subprocess.run([sys.executable, "-c", SCRIPT, asked], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["1 set()"] * len(WRONG), done.stderr
    for said, (_, told) in zip(done.stderr.splitlines(), WRONG, strict=True):
        assert told in said
    assert not list(tmp_path.iterdir())


def test_what_experiments_run_is_within_the_limits(lm):
    for name in experiments.names():
        for profile in ("quick", "full", "gpu"):
            for job in experiments.jobs(name, profile):
                budget_limits.check(job.parameters, {}, name)
                if profile != "gpu":  # its models are not here
                    prompt_limits.check(job.parameters, name)


REFUSED = [
    ("explore", {"budget": 1}, "parameter 'budget' of explore: snapkv: budget 1 is below the 33 entries"),
    ("explore", {"budget": 32, "left": "h2o", "right": "pyramidkv"}, "pyramidkv: budget 32 is below the 33"),
    ("speed_and_memory", {"budget": "1"}, "parameter 'budget' of speed_and_memory: h2o: budget 1 is below"),
    ("speed_and_memory", {"budget": 0}, "h2o: budget 0 keeps nothing"),
    (
        "tasks_at_small_budgets",
        {"qa": {"h2o": [64], "snapkv": [64, 1]}},
        "'qa' of tasks_at_small_budgets: snapkv: budget",
    ),
    ("tasks_at_small_budgets", {"needle": {"snapkv_unpooled": [9]}}, "snapkv_unpooled: budget 9 is below"),
]


@pytest.mark.parametrize(("name", "given", "told"), REFUSED, ids=str)
def test_a_budget_that_a_named_policy_cannot_accept_is_refused_before_a_job_starts(
    lm, tmp_path, monkeypatch, name, given, told
):
    monkeypatch.setenv("KVLAB_ROOT", str(ROOT))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    with one_sentence(told):
        launch.run(name, overrides=given)
    assert not list(tmp_path.iterdir())


def test_a_budget_that_the_named_policies_accept_is_let_through():
    usual = {"left": "snapkv", "right": "dapq", "budget": 128, "document": "sotu/1962"}
    budget_limits.check(usual | {"left": "streamingllm", "budget": 5}, usual, "explore")
    budget_limits.check(usual | {"budget": 0.001}, usual, "explore")  # a share is raised to what the policy needs
    budget_limits.check({"notes": {"tokens": 24, "window": 3}, "budget": 0}, {}, "toy")  # nothing there is a policy


def test_every_budget_has_a_limit_or_policies_that_are_named():
    """A new experiment's budget would else fail in its job."""
    for name in experiments.names():
        found = experiments.load(name)
        for parameter in notebooks.parameters_of(found.path):
            if "budget" in parameter and parameter not in found.limits:
                with pytest.raises(KvlabError, match="budget 0 keeps nothing"):
                    budget_limits.check(notebooks.parameters_of(found.path) | {parameter: 0}, {}, name)


@pytest.mark.parametrize("name", ["quickstart", "all_together", "compilerkv_budgets"])
def test_the_least_budget_is_what_the_policies_need(name):
    found = experiments.load(name)
    needs = {
        method: policy(method, budget=1.0).minimum
        for method in registry()
        if "budget" in registry()[method].model_fields
    }
    code = "\n".join(notebooks.code(found.path))
    named = {method for method in needs if re.search(rf'"{method}"', code)} if name == "quickstart" else needs
    least = {axis: low for axis, (low, _) in found.limits.items()}
    assert least and set(least.values()) == {max(needs[method] for method in named)}


def test_models_and_documents_that_are_not_at_hand_are_left_to_the_job(tmp_path, own_home):
    text = tmp_path / "short.txt"
    text.write_text("a short text " * 20)
    prompt_limits.check({"model": "org/none", "tokens": 300, "document": str(text)}, "toy")
    with pytest.raises(KvlabError, match=r"asks for prompts of 400 tokens, and the document .*short\.txt has 260"):
        prompt_limits.check({"model": "random:tiny-llama-gqa", "tokens": 400, "documents": [str(text)]}, "toy")


def test_the_context_of_a_folder(tmp_path):
    for config in ({"max_position_embeddings": 512}, {"text_config": {"max_position_embeddings": 512}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        prompt_limits.check({"model": str(tmp_path), "tokens": 500, "new_tokens": 12}, "toy")
        with pytest.raises(KvlabError, match="beyond the 512"):
            prompt_limits.check({"model": str(tmp_path), "tokens": 500, "new_tokens": 13}, "toy")
    (tmp_path / "config.json").write_text("[1")
    prompt_limits.check({"model": str(tmp_path), "tokens": 10**6}, "toy")
    assert content_key.model_folder("") is None and content_key.model_folder("org/none") is None


def test_limits_are_those_of_parameters_that_there_are(project):
    experiment(project, limits={"scale": [0, 1]})
    assert experiments.jobs(EXPERIMENT, overrides={"scale": "0.7"})[0].parameters["scale"] == 0.7
    for value, told in (("1.5", "at most 1, and is 1.5"), ("-1", "at least 0, and is -1.0")):
        with pytest.raises(KvlabError, match=f"'scale' of {EXPERIMENT} must be {told}"):
            experiments.jobs(EXPERIMENT, overrides={"scale": value})
    experiment(project, limits={"scle": [0, 1]})
    with pytest.raises(KvlabError, match="did you mean 'scale'"):
        experiments.jobs(EXPERIMENT)
    experiment(project, limits={"scale": [0]})
    with pytest.raises(KvlabError, match=r"limits\.scale"):
        experiments.load(EXPERIMENT)
