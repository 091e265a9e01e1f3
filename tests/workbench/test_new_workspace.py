"""`kvlab new` and `kvlab add`: what they write works as it is, and appears whole or not at all."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from support.commands import call, complaint
from support.notebook_runs import executed
from support.paths import ROOT
from support.refusals import refusal

import kvlab
from kvlab import methods, papers, tasks
from kvlab.papers import registry
from kvlab.workbench import experiments, method_pages
from kvlab.workbench.experiments import notebooks
from kvlab.workbench.jobs import launch
from kvlab.workbench.workspace import KINDS, add, making, new, rendering

HERE = Path(__file__).parent.as_uri()


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def run_pytest(folder: Path, *files: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pytest on these files as a user would, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def pytest_says(folder: Path, *files: str | Path) -> str:
    """What pytest prints of these files where a test fails."""
    done = run_pytest(folder, *files)
    assert done.returncode == 1, done.stdout
    return done.stdout


def pytest_passes(folder: Path, *files: str | Path) -> str:
    """The last line of pytest on these files, which pass."""
    done = run_pytest(folder, *files)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()[-1]


def test_a_workspace_has_the_layout_of_a_project(made):
    wanted = "notebooks experiments papers mlruns tests policies tasks environment.yml README.md Makefile".split()
    assert {path.name for path in made.iterdir()} >= set(wanted)
    assert experiments.names() == ["first_tokens"] and experiments.jobs("first_tokens", "full")
    assert [claim.kind for claim in papers.claims(paper="streaming")] == ["finding", "finding", "control"]
    assert papers.figure("streaming", "table1").perplexity.tolist() == [5158.07, 5.40, 5.60]
    assert kvlab.policies()[-1] == "ends"
    pins = (made / "requirements.txt").read_text().splitlines()[1:]
    assert pins[0].startswith("kvlab[lab,workspace]") and not [pin for pin in pins[1:] if "+" in pin]
    assert {"nbval", "pytest", "ipykernel", "torch"} <= {pin.partition("==")[0] for pin in pins}


@pytest.mark.parametrize(
    "told, pin",
    [
        (None, f"=={kvlab.__version__}"),
        (
            {"url": f"{HERE}/kvlab-0.1.0-py3-none-any.whl", "archive_info": {}},
            f"=={kvlab.__version__}",
        ),
        ({"url": f"{HERE}/kvlab", "dir_info": {"editable": True}}, f"=={kvlab.__version__}"),
        ({"url": "https://host/kvlab", "vcs_info": {"vcs": "git", "commit_id": "1f"}}, " @ git+https://host/kvlab@1f"),
    ],
    ids=["index", "wheel", "folder", "commit"],
)
def test_kvlab_is_pinned_to_what_another_machine_finds_too(tmp_path, monkeypatch, told, pin):
    """No folder of this machine is named."""
    real = importlib.metadata.distribution("kvlab")

    class Installed:
        """kvlab's distribution, of whatever class, with another origin."""

        def read_text(self, name):
            return real.read_text(name) if name != "direct_url.json" else told and json.dumps(told)

        def __getattr__(self, name):
            return getattr(real, name)

    found = importlib.metadata.distribution
    monkeypatch.setattr(importlib.metadata, "distribution", lambda n: Installed() if n == "kvlab" else found(n))
    made = new(tmp_path / "lab")
    assert (made / "requirements.txt").read_text().splitlines()[1] == f"kvlab[lab,workspace]{pin}"


def test_python_files_and_notebooks_that_are_written_pass_ruff_and_nbformat(made):
    for kind, name in {"policy": "mine", "task": "riddles", "notebook": "tried", "claim": "paper.gain"}.items():
        add(kind, name)
    for asked in (["check", "--select", "E,F,I,N,W"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *asked, "."], cwd=made, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    for path in (made / "notebooks").glob("*.ipynb"):
        nbformat.validate(nbformat.read(path, as_version=4))


def test_the_example_measures_what_its_claims_read(made, reader, monkeypatch):
    run = executed(made / "notebooks" / "first_tokens.ipynb", reader, monkeypatch, tokens=60, new_tokens=3, budget=8)
    assert run.state == "FINISHED" and run.figures == ["table_1", "sinks"] and run.tables == ["losses"]
    for claim in papers.claims(paper="streaming"):
        assert claim.metrics <= run.metrics.keys() and claim.figure in run.figures
        assert papers.judge(claim, run.metrics).verdict != "not measured"
    assert run.metrics["entries/difference"] == 0 and run.metrics["attention/even"] > 0
    assert kvlab.Trace.load("first_tokens.safetensors").steps == 3
    assert "*.safetensors" in (made / ".gitignore").read_text().split()
    last = notebooks.source(list(notebooks.cells(made / "notebooks" / "first_tokens.ipynb"))[-1])
    assert last.splitlines()[-1].startswith("kvlab.explore(")


def test_the_examples_tests_pass_from_outside_the_folder(made):
    """From inside `make test` runs them, see test_wheel.py."""
    assert "9 passed" in pytest_passes(made.parent, "my-lab/tests")


@pytest.mark.parametrize("paper", [paper.name for paper in registry.shipped()])
def test_a_copy_of_a_paper_passes_its_tests(paper, tmp_path, monkeypatch):
    """Each of its experiments has jobs in both profiles, and each of its claims an experiment that is there."""
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    folder = new(tmp_path / "copy", paper)
    (known,) = [one for one in registry.shipped() if one.name == paper]
    experiments_of = {claim.experiment for claim in known.claims if claim.experiment}
    assert pytest_passes(folder, "tests").startswith(f"{len(experiments_of) + len(known.claims)} passed")


def test_a_copy_of_a_paper_is_that_paper(tmp_path, monkeypatch):
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    (known,) = [paper for paper in registry.shipped() if paper.name == "dapq"]
    folder = new(tmp_path / "my-dapq", "dapq")
    monkeypatch.chdir(folder)
    assert set(experiments.names()) == {claim.experiment for claim in known.claims if claim.experiment}
    (copy,) = papers.of_project()
    assert copy.replaces and copy.claims == known.claims
    for name in experiments.names():
        job = experiments.jobs(name, "quick")[0]
        assert job.notebook.is_relative_to(folder) and job.notebook.is_file()
    figures = {name for name in papers.figures() if name.startswith("dapq/")}
    assert figures and all(
        (folder / "papers" / "figures" / f"{name.replace('/', '_')}.csv").is_file() for name in figures
    )


def test_what_is_there_is_never_touched(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        assert "exists already" in refusal(new, tmp_path / name)
    assert "there is no folder" in refusal(new, tmp_path / "no" / "where")
    assert "did you mean 'dapq'" in refusal(new, tmp_path / "lab", "dapk")
    assert "is no name for a workspace" in refusal(new, tmp_path / "a\nb")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_nothing_half_made_is_left(tmp_path, monkeypatch):
    written = itertools.count()

    def full(*arguments, **values):
        if next(written) == 3:
            raise OSError(28, "No space left on device")
        return rendering.render(*arguments, **values)

    monkeypatch.setattr(making, "render", full)
    assert "No space left on device" in refusal(new, tmp_path / "lab")
    assert not list(tmp_path.iterdir())


def test_what_add_writes_passes_its_tests_as_it_is(made):
    asked = [("policy", "mine"), ("task", "riddles"), ("claim", "mypaper.table1.gain"), ("claim", "mypaper.loss")]
    files = [path for kind, name in asked for path in add(kind, name)]
    assert kvlab.policies()[-1] == "mine" and tasks.tasks()[-1] == "riddles"
    assert [claim.id for claim in papers.claims(paper="mypaper")] == ["mypaper.table1.gain", "mypaper.loss"]
    assert len(papers.figure("mypaper", "table1")) == 1
    tests = [path for path in files if path.parent.name == "tests"]
    assert len(tests) == len(asked)
    assert "14 passed" in pytest_passes(made, *tests)
    described = method_pages.PolicyDocstring.of(methods.registry()["mine"])  # `kvlab pages --only mine` needs it
    assert described.paper == "Not from a paper" and described.parameters.keys() == {"budget"}


def test_the_claim_of_the_worked_example_passes_the_skeletons_test(made):
    """No number is printed there, so that no value is too large."""
    path, *_, test = add("claim", "submission.table1.error")
    page = (ROOT / "docs" / "reviewers.md").read_text(encoding="utf-8")
    path.write_text(re.search(r"```yaml\n(name: submission\n.*?)```", page, re.DOTALL)[1])
    assert papers.claims(paper="submission")[0].paper_value is None
    assert "4 passed" in pytest_passes(made, test)


@pytest.mark.parametrize(
    ("name", "where", "figure"),
    [
        ("mypaper.table2.four_enough", "table 2", "table2"),
        ("mypaper.figure12b.gain", "figure 12b", "figure12b"),
        ("mypaper.tables.gain", "table 1", "table1"),
        ("mypaper.gain", "table 1", "table1"),
    ],
)
def test_a_claim_is_of_the_table_that_its_name_has(name, where, figure, made):
    add("claim", name)
    (claim,) = papers.claims(paper="mypaper")
    assert claim.where == where and papers.figure("mypaper", figure).value.tolist() == [claim.paper_value]
    printed = [path.name for path in (made / "papers" / "figures").glob("mypaper*")]
    assert printed == [f"mypaper_{figure}.csv"]


@pytest.mark.parametrize(("parameter", "result"), [("budgets", "passed"), ("budget", "failed")])
def test_an_experiment_needs_only_the_profiles_that_it_has(parameter, result, made):
    add("notebook", "tried")
    profiles = f"profiles: {{quick: {{parameters: {{{parameter}: [40]}}}}}}"
    experiment = made / "experiments" / "tried.yaml"
    experiment.write_text(f"notebook: notebooks/tried.ipynb\ndescription: One profile.\n{profiles}\n")
    done = run_pytest(made, "tests/test_project.py", "-k", "notebook and tried")
    assert done.stdout.splitlines()[-1].startswith(f"1 {result}"), done.stdout


def test_a_trace_is_explored_with_the_workspaces_policy(made, monkeypatch):
    monkeypatch.chdir(made / "notebooks")
    trace = kvlab.capture(kvlab.random_lm("tiny-llama-gqa"), torch.arange(3, 63), new_tokens=3)
    trace.save("kept.safetensors")
    explorer = kvlab.explore("kept.safetensors", "ends", "snapkv", budget=40)
    assert explorer.chosen == ["ends", "snapkv"] and "mine" not in explorer.names
    add("policy", "mine")
    assert {"ends", "mine", "snapkv"} <= set(kvlab.explore(trace, "mine", "ends", budget=40).names)


def test_a_notebook_that_add_writes_runs(made, reader, monkeypatch):
    """The full cache, which has no budget, is compared at each."""
    notebook, experiment = add("notebook", "tried")
    assert experiments.names() == ["first_tokens", "tried"] and experiment.name == "tried.yaml"
    chosen = {"budgets": [40, 50], "policies": ["h2o", "knorm", "ends", "full"]}
    run = executed(notebook, reader, monkeypatch, tokens=60, new_tokens=3, **chosen)
    assert run.state == "FINISHED" and run.metrics["output_error/knorm/50"] > 0
    assert run.metrics["output_error/ends/40"] != run.metrics["output_error/ends/50"]
    for budget in (40, 50):
        assert run.metrics[f"saved/h2o/ends/{budget}"] == pytest.approx(
            run.metrics[f"output_error/ends/{budget}"] - run.metrics[f"output_error/h2o/{budget}"]
        )
        assert run.metrics[f"saved/h2o/full/{budget}"] == -run.metrics[f"output_error/h2o/{budget}"] < 0
    cells = [cell for cell in notebooks.cells(notebook) if "NBVAL_CHECK_OUTPUT" in notebooks.source(cell)]
    assert [cell["outputs"][0]["text"] for cell in cells] == [["as many entries for all at each budget: True\n"]]


def test_a_notebook_of_tasks_runs_and_logs_what_claims_name(made, reader, monkeypatch):
    notebook, _ = add("notebook", "scored", with_tasks=True)
    run = executed(notebook, reader, monkeypatch, settings={"lengths": [144], "depths": [0.0]}, budgets=[40], limit=1)
    assert run.state == "FINISHED" and {"needle/full/score", "needle/snapkv/40/difference"} <= run.metrics.keys()
    assert "notebook" in refusal(add, "policy", "other", with_tasks=True)


def test_an_experiment_of_kvlab_is_copied_and_takes_policies_of_the_workspace(made):
    assert "copy it: kvlab add experiment evict_or_quantise" in refusal(experiments.load, "evict_or_quantise")
    copies = [path.relative_to(made).as_posix() for path in add("experiment", "evict_or_quantise")]
    assert copies == ["experiments/evict_or_quantise.yaml", "notebooks/evict_or_quantise.ipynb"]
    add("policy", "mine")
    (job,) = launch.planned(["evict_or_quantise"], "quick", {"policies": ["mine"]})
    assert job.parameters["policies"] == ["mine"]
    wrong = refusal(launch.planned, ["evict_or_quantise"], "quick", {"policies": ["mine", "snapk"]})
    assert wrong.startswith("parameter 'policies' of evict_or_quantise: unknown policy 'snapk'; did you mean 'snapkv'")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("polcy", "mine", "did you mean 'policy'"),
        ("policy", "snapkv", "there is a policy 'snapkv' already"),
        ("policy", "../mine", "is no name for a policy"),
        ("policy", "class", "is no name for a policy"),
        ("task", "My", "is no name for a task"),
        ("task", "needle", "there is a task 'needle' already"),
        ("notebook", "first_tokens", "first_tokens.ipynb exists already"),
        ("claim", "gain", "PAPER.NAME"),
        ("claim", "dapq.gain", "kvlab new my-lab --paper dapq"),
        ("claim", "streaming.table1.first_tokens", "already"),
        ("task", "ends", "test_ends.py exists already"),
        (
            "experiment",
            "evict_or_quantize",
            "did you mean 'evict_or_quantise'?; for one of your own: kvlab add notebook",
        ),
        ("experiment", "my_own", "for one of your own: kvlab add notebook my_own"),
    ],
)
def test_what_cannot_be_added_is_one_sentence_and_nothing_is_written(kind, name, words, made):
    before = sorted(made.rglob("*"))
    assert words in refusal(add, kind, name)
    assert sorted(made.rglob("*")) == before


def test_a_claim_is_added_only_at_the_end_of_the_claims(made):
    path = made / "papers" / "streaming.yaml"
    path.write_text(path.read_text() + "\nreplaces: false\n")
    before = path.read_bytes()
    assert "move `claims` to its end" in refusal(add, "claim", "streaming.more")
    assert path.read_bytes() == before and not hidden(made / "papers")


def test_a_claim_that_is_renamed_fails_its_own_test_and_stops_no_other(made):
    add("claim", "streaming.table9.mine")
    path = made / "papers" / "streaming.yaml"
    path.write_text(path.read_text().replace("streaming.table9.mine", "streaming.table9.other"))
    said = pytest_says(made, "tests/test_project.py", "tests/test_streaming_table9_mine.py")
    assert "papers/streaming.yaml has no claim 'streaming.table9.mine'" in said
    assert "error" not in said.splitlines()[-1] and re.search(r"4 failed, \d+ passed", said.splitlines()[-1])


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KVLAB_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "is no workspace" in complaint(capsys, "add", "policy", "mine")
    code, out, _ = call(capsys, "new", "my-lab")
    assert code == 0 and out.splitlines()[0] == str(tmp_path / "my-lab") and "kvlab run first_tokens" in out
    assert "exists already" in complaint(capsys, "new", "my-lab")
    assert "cd 'my lab' &&" in call(capsys, "new", "my lab")[1]
    monkeypatch.chdir(tmp_path / "my-lab")
    code, out, _ = call(capsys, "add", "policy", "mine")
    assert code == 0 and out.split() == [
        str(tmp_path / "my-lab" / "policies" / "mine.py"),
        str(tmp_path / "my-lab" / "tests" / "test_mine.py"),
    ]
    code, out, _ = call(capsys, "list", "claims", "--json")
    named = {row["id"] for row in json.loads(out)}
    assert code == 0 and {"streaming.table1.first_tokens", "dapq.table1.dc_sp"} <= named
    for name in ("new", "add"):
        assert "Examples" in call(capsys, name, "--help")[1]
    assert set(KINDS) == {"policy", "claim", "notebook", "task", "experiment"}


def test_outputs_of_a_changed_cell_are_named_by_the_tests_and_saved_by_make_notebooks(made):
    """A small notebook in place of the example, which takes a model."""
    path = made / "notebooks" / "sum.ipynb"
    path.write_text(rendering.notebook("# %%\n# NBVAL_CHECK_OUTPUT\nprint(1 + 2)\n#> 2"))
    command = "make notebooks NOTEBOOKS='notebooks/sum.ipynb'"
    assert command in pytest_says(made, "--nbval-lax", path)
    python = Path(sys.executable).parent
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], cwd=made, check=True, capture_output=True, env=environment)
    assert "3\n" in path.read_text().replace("\\n", "\n") and "passed" in pytest_passes(made, "--nbval-lax", path)
