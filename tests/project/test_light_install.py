"""`pip install kvlab` without an extra: capture, replay, compress, eval and score run, the rest names its extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from support.paths import ROOT

from kvlab.lib import extras

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "IPython": "ipython",
    "dask_jobqueue": "dask-jobqueue",
    "lm_eval": "lm-eval",
    "math_verify": "math-verify",
}
# Python runs this before all else: it finds the lab's packages nowhere, as in an environment without them.
BLOCKED = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {sorted(extras.EXTRAS[extras.LAB])}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base(*words) runs Python with them in an empty folder, where the extras are not installed."""
    hook, here = tmp_path_factory.mktemp("hook"), tmp_path_factory.mktemp("here")
    (hook / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
    around = {name: value for name, value in os.environ.items() if name not in ("KVLAB_ROOT", "MLFLOW_TRACKING_URI")}
    around["PYTHONPATH"] = os.pathsep.join([str(hook), str(ROOT)])

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=here, env=around)

    return run


REPLAYED = """
import kvlab, torch
lm = kvlab.random_lm("tiny-llama-gqa")
policy = kvlab.policy("snapkv", budget=40)
trace = kvlab.capture(lm, torch.arange(3, 67), new_tokens=4)
assert len(kvlab.replay(trace, policy).table)
with kvlab.compress(lm, policy) as session:
    lm.model.generate(torch.arange(3, 67)[None], max_new_tokens=2, do_sample=False)
explorer = kvlab.explore(trace, "snapkv", "streamingllm", budgets=[40])
assert "streamingllm" in explorer.html()
for needed in (lambda: explorer.panel, lambda: session.records.save("t.parquet")):
    try:
        needed()
    except kvlab.KvlabError as error:
        print(error)
"""


LISTS = [f"list {what}" for what in ("policies", "storages", "models", "tasks", "claims")]
SCORES = [f"score {task} answers.jsonl" for task in ("qasper", "gov_report", "vcsum")]
BENCH = (
    "bench decode --shape tiny-llama-gqa --contexts 64 --new-tokens 2 --repeats 1 --policies streamingllm --budget 32"
)
DOCTOR = "doctor --json"
# One process imports torch once for all commands. It prints the code, the output and the errors of each.
ANSWERED = """
import contextlib, io, json, sys
from kvlab import cli
for line in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: cli.main(line.split())
        except SystemExit as left: code = left.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def answered(base, tmp_path_factory):
    """The exit code, the output and the errors of each command that needs no extra."""
    answers = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    line = {"pred": "the old ferry", "answers": ["old ferry"], "all_classes": None}
    answers.write_text(json.dumps(line) + "\n", encoding="utf-8")
    asked = [*LISTS, *SCORES, BENCH, DOCTOR]
    done = base("-c", ANSWERED, *(one.replace("answers.jsonl", str(answers)) for one in asked))
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True))


def test_a_capture_a_replay_and_a_live_run_need_no_extra(base):
    done = base("-c", REPLAYED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "ipywidgets is not installed: pip install 'kvlab[lab]'"


@pytest.mark.parametrize("asked", LISTS)
def test_lists_need_no_extra(answered, asked):
    code, out, err = answered[asked]
    assert code == 0 and out.strip(), err


@pytest.mark.parametrize("asked", SCORES)
def test_a_score_needs_no_extra(answered, asked):
    code, out, err = answered[asked]
    assert code == 0 and json.loads(out)["n"] == 1, err


def test_bench_needs_no_extra(answered):
    code, out, err = answered[BENCH]
    assert code == 0 and "streamingllm" in out, err


def test_doctor_says_what_is_not_installed_and_finds_nothing_wrong(answered):
    found = {finding["what"]: finding for finding in json.loads(answered[DOCTOR][1])}
    assert found["store"]["state"] == found["jupyter"]["state"] == "remark"
    assert found["store"]["mend"] == "pip install 'kvlab[lab]'"


def test_an_evaluation_whose_log_is_asked_for_names_the_extra(base):
    asked = ["-m", "kvlab", "eval", "arithmetic", "--model", "random:tiny-llama-gqa", "--limit", "1"]
    done = base(*asked, "--log")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kvlab: MLflow is not installed: pip install 'kvlab[lab]'\n"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("run quickstart", "MLflow"),
        ("reproduce", "MLflow"),
        ("report", "MLflow"),
        ("report --from kept", "MLflow"),
        ("stability", "MLflow"),
        ("pages --only snapkv", "matplotlib"),
    ],
)
def test_a_command_that_needs_an_extra_names_it(base, words, name):
    done = base("-m", "kvlab", *words.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kvlab: {name} is not installed: pip install 'kvlab[lab]'\n"


def test_the_lab_names_its_extra(base):
    done = base("-m", "kvlab.workbench.lab")
    assert done.returncode == 1 and done.stderr == "kvlab: MLflow is not installed: pip install 'kvlab[lab]'\n"


def test_a_notebooks_first_line_names_the_extra(base):
    told = "from kvlab.workbench.store import tracking\ntry: tracking.client()\nexcept Exception as error: print(error)"
    assert base("-c", told).stdout == "MLflow is not installed: pip install 'kvlab[lab]'\n"


def test_the_extras_are_those_of_the_project():
    for extra, modules in extras.EXTRAS.items():
        declared = {re.match(r"[\w.-]+", name)[0].lower() for name in PROJECT["optional-dependencies"][extra]}
        assert {DISTRIBUTIONS.get(name, name).lower() for name in modules} == declared


def test_nothing_is_asked_for_twice_and_the_name_before_still_works():
    optional = PROJECT["optional-dependencies"]
    assert optional["notebooks"] == ["kvlab[lab]"]
    assert not {name.partition(">=")[0] for name in PROJECT["dependencies"]} & set(optional["lab"])
